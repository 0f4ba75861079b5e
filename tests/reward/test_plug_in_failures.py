"""Tests that a failure of a plug-in affects only its own sample."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reward.processes import WORKERS
from tests.reward.samples import kinds_of, make_group, opened, score, values_of, write_plug_in

pytestmark = WORKERS


MISCHIEF = """
import contextlib, os, re, signal, sys, time
def act(text):
    if text == "raise": raise ValueError("no\\x1b[31m" + "x" * 5000)
    if text == "interrupt": raise KeyboardInterrupt
    if text == "sleep": time.sleep(60)
    if text == "regex": re.match("(a+)+$", "a" * 64 + "b")  # and nothing else runs meanwhile
    if text == "sys.exit": sys.exit(3)
    if text == "os._exit": os._exit(3)
    if text == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
    if text == "memory": return len(bytearray(10**12))
    if text == "garbage": scatter(b"{}\\n")
    if text == "unprintable": raise Unprintable()
    values = {"nan": float("nan"), "inf": -float("inf"), "text": "1.0", "list": [1.0], "complex": 1j}
    return values.get(text, float(len(text)))
def scatter(garbage):
    for fd in range(3, 9):
        with contextlib.suppress(OSError): os.write(fd, garbage)
class Unprintable(Exception):
    def __str__(self): raise RuntimeError("no")
def one(completion): return act(completion)
def verl(solution_str): return {"score": act(solution_str)}
def batch(completions): return [act(c) for c in completions]
"""
KINDS = {
    "raise": "raised",
    "interrupt": "raised",
    "unprintable": "raised",
    "sleep": "timeout",
    "regex": "timeout",
    "sys.exit": "exit",
    "os._exit": "exit",
    "segfault": "exit",
    "garbage": "exit",
    "memory": "memory",
    "nan": "value",
    "inf": "value",
    "text": "value",
    "list": "value",
    "complex": "value",
}


@pytest.mark.parametrize("style", ["one", "verl", "batch"])
def test_every_failure_costs_its_own_sample_and_no_other(tmp_path: Path, style: str) -> None:
    path = write_plug_in(tmp_path, MISCHIEF)
    texts = [text for kind in KINDS for text in (kind, "ok")]
    scored = score([f"{path}:{style}"], make_group(*texts), workers=4)
    assert kinds_of(scored) == [KINDS.get(text) for text in texts]
    assert values_of(scored) == [0.0 if text in KINDS else 2.0 for text in texts]
    assert scored.num_errors == len(KINDS)
    (notice,) = scored.notices
    assert f"reward {style} failed on {len(KINDS)} of {len(texts)} samples (3 raised, 2 timeout, 4 exit," in notice
    assert "first q/0/s0: ValueError: no\ufffd[31mxxx" in notice and notice.isprintable() and len(notice) < 500


@pytest.mark.parametrize(
    ("source", "kind", "text"),
    [
        ("def f(completions): return 0.5", "value", "returned float 0.5, expected a list of 2 numbers or None"),
        ("def f(completions): return 'ab'", "value", "returned str 'ab', expected a list of 2 numbers"),
        ("def f(completions): return {0: 1, 1: 1}", "value", "returned dict {0: 1, 1: 1}, expected a list"),
        ("def f(solution_str): return {'acc': 1}", "value", "returned dict {'acc': 1}, expected a number or a dict"),
        ("def f(completion): return [1]", "value", "returned list [1], expected a number"),
        ("def f(completion): return 10**999", "raised", "OverflowError: int too large to convert to float"),
        ("def f(completion):\n    x = 1\n    return x / 0", "raised", "ZeroDivisionError: division by zero (plug.py:3"),
        ("import json\ndef f(completion): return json.loads('{')", "raised", "(plug.py:2)"),
    ],
)  # fmt: skip
def test_a_failure_says_what_came_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, kind: str, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_plug_in(tmp_path, source)
    scored = score(["plug.py:f"], make_group("a", "b"))
    assert kinds_of(scored) == [kind, kind]
    assert text.replace(" 2 ", " 1 ") in scored.notices[0]


def test_a_list_of_the_wrong_length_ends_the_run_after_one_call(tmp_path: Path) -> None:
    source = (
        "def f(completions):\n    with open(__file__ + '.calls', 'a') as out: out.write('x')\n"
        "    return [1] * (len(completions) - 1)"
    )
    path = write_plug_in(tmp_path, source)
    scored = score([f"{path}:f"], [*make_group(*"abcd"), *make_group(*"efgh", group=1)])
    assert scored.fatal_error == (f"reward f: {path}:f returned 7 values for 8 samples, expected one for each")
    assert Path(f"{path}.calls").read_text() == "x"


def test_a_failing_batch_is_tried_again_group_by_group_and_then_one_by_one(tmp_path: Path) -> None:
    path = write_plug_in(
        tmp_path,
        "def f(completions):\n    assert 'bad' not in completions\n    return [len(completions)] * len(completions)",
    )
    samples = [*make_group("a", "b", "c"), *make_group("a", "bad", "c", group=1), *make_group("a", "b", group=2)]
    scored = score([f"{path}:f"], samples)
    assert values_of(scored) == [3.0, 3.0, 3.0, 1.0, 0.0, 1.0, 2.0, 2.0]
    assert scored.num_errors == 1


def test_functions_are_tried_on_two_copies_of_a_sample(tmp_path: Path) -> None:
    path = write_plug_in(tmp_path, "def f(completion, answer): return 1 / (len(answer) - 2)")
    (sample,) = make_group("18")
    with opened([f"{path}:f", "gsm8k"], [sample]) as rewards:
        tried = rewards.try_functions(sample)
    assert "ZeroDivisionError: division by zero" in tried.notices[0] and values_of(tried) == [1.0, 1.0]
