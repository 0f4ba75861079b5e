"""Tests that a failure of a plug-in affects only its own sample, and what plug-ins see and print."""

import ctypes
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.plugins.worker_process import MAX_PRINTED_BYTES, PIPE_BYTES, worker_environment
from settings.errors import InputError
from tests.reward.processes import WORKERS
from tests.reward.samples import kinds_of, make_group, score, score_by, values_of, write_plug_in

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
    if text == "segfault": signal.raise_signal(signal.SIGSEGV)
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
def verl(solution_str): return {"score": act(solution_str)}
def batch(completions): return [act(c) for c in completions]
"""
KINDS = {
    **{"raise": "raised", "interrupt": "raised", "unprintable": "raised", "sleep": "timeout", "regex": "timeout"},
    **{"sys.exit": "exit", "os._exit": "exit", "segfault": "exit", "garbage": "exit", "memory": "memory"},
    **{"nan": "value", "inf": "value", "text": "value", "list": "value", "complex": "value"},
}


@pytest.mark.parametrize("style", ["verl", "batch"])
def test_each_reward_failure_affects_only_its_own_sample(tmp_path: Path, style: str) -> None:
    path, is_batch = write_plug_in(tmp_path, MISCHIEF), style == "batch"
    kinds = ["raise", "sleep", "segfault", "nan"] if is_batch else KINDS
    texts = [text for kind in kinds for text in (kind, "ok")]
    scored = score([f"{path}:{style}"], make_group(*texts), workers=4)
    assert kinds_of(scored) == [KINDS.get(text) for text in texts]
    assert values_of(scored) == [0.0 if text in KINDS else 2.0 for text in texts]
    assert scored.num_errors == len(kinds)
    (notice,) = scored.notices
    counts = "1 raised, 1 timeout, 1 exit," if is_batch else "3 raised, 2 timeout, 4 exit,"
    assert f"reward {style} failed on {len(kinds)} of {len(texts)} samples ({counts}" in notice
    assert "first q/0/s0: ValueError: no\ufffd[31mxxx" in notice and notice.isprintable() and len(notice) < 500


@pytest.mark.parametrize(
    ("function", "kind", "text"),
    [
        (lambda completions: 0.5, "value", "returned float 0.5, expected a list of 1 numbers or None"),
        (lambda completions: "ab", "value", "returned str 'ab', expected a list of 1 numbers"),
        (lambda completions: {0: 1}, "value", "returned dict {0: 1}, expected a list"),
        (lambda solution_str: {"acc": 1}, "value", "returned dict {'acc': 1}, expected a number or a dict"),
        (lambda completion: [1], "value", "returned list [1], expected a number"),
        (lambda completion: 10**999, "raised", "OverflowError: int too large to convert to float"),
        (lambda completion: json.loads("{"), "raised", "JSONDecodeError: Expecting property name enclosed"),
    ],
)
def test_message_of_a_reward_failure_shows_the_returned_value_or_the_error(
    function: Callable[..., Any], kind: str, text: str
) -> None:
    scored = score_by(function, make_group("a", "b"))
    assert kinds_of(scored) == [kind, kind]
    assert text in scored.notices[0]


def test_a_reward_list_of_the_wrong_length_is_fatal_after_one_call() -> None:
    calls = []

    def shorter(completions: list[str]) -> list[int]:
        calls.append(len(completions))
        return [1] * (len(completions) - 1)

    scored = score_by(shorter, [*make_group(*"abcd"), *make_group(*"efgh", group=1)])
    assert scored.fatal_error == (
        "reward.functions: callable:f returned a list of length 7, expected 8, one per sample; fix the function"
    )
    assert calls == [8]


def test_a_failed_reward_batch_is_retried_by_group_and_then_by_sample() -> None:
    def fussy(completions: list[str]) -> list[int]:
        assert "bad" not in completions
        return [len(completions)] * len(completions)

    samples = [*make_group("a", "b", "c"), *make_group("a", "bad", "c", group=1), *make_group("a", "b", group=2)]
    scored = score_by(fussy, samples)
    assert values_of(scored) == [3.0, 3.0, 3.0, 1.0, 0.0, 1.0, 2.0, 2.0]
    assert scored.num_errors == 1


def test_plug_in_workers_inherit_few_environment_variables_and_no_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "https_proxy", "GRPO__RUN__SEED", "JUDGE_KEY"):
        monkeypatch.setenv(name, "CANARY")
    source = (
        "import json, os\ndef f(completion):\n"
        "    fds = [f'/proc/self/fd/{fd}' for fd in range(3, 50)]\n"
        "    files = [os.readlink(fd) for fd in fds if os.path.exists(fd)]\n"
        "    with open('seen.json', 'w') as out: json.dump([dict(os.environ), files], out)\n    return 1"
    )
    path = write_plug_in(tmp_path, source)
    monkeypatch.chdir(tmp_path)
    with open(path) as ours:
        os.set_inheritable(ours.fileno(), True)
        score([f"{path}:f"], make_group("a"), env_vars=["JUDGE_KEY"])
    seen, files = json.loads((tmp_path / "seen.json").read_text())
    assert [name for name, value in seen.items() if "CANARY" in value] == ["JUDGE_KEY"]
    assert seen["PATH"] == os.environ["PATH"] and seen["PYTHONHASHSEED"] == "0"
    assert all(file.startswith(("pipe:", "anon_inode:", "socket:")) for file in files), files
    # Other processes cannot read the trainer's environment either.
    get_dumpable = 3
    assert ctypes.CDLL(None).prctl(get_dumpable, 0, 0, 0, 0) == 0


def test_control_characters_printed_by_plug_ins_are_replaced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = (
        "import os, sys\ndef f(completion):\n    print(completion)\n    os.write(1, b'\\xff\\x1b]0;title\\x07\\n')\n"
        "    print('no end', end='', file=sys.stderr, flush=True)\n    return 1"
    )
    assert values_of(score([f"{write_plug_in(tmp_path, source)}:f"], make_group("a\x1b[2J\rb\tc"))) == [1.0]
    printed = "a\ufffd[2J\nb       c\n\ufffd\ufffd]0;title\ufffd\nno end\n"
    assert capfd.readouterr() == ("", printed)


def test_printing_of_a_plug_in_is_limited_per_call_and_does_not_block(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_plug_in(tmp_path, "def f(completion):\n    print(('x' * 99 + '\\n') * 10**4)\n    return 1")
    assert values_of(score([f"{path}:f"], make_group("a", "b"), workers=1)) == [1.0, 1.0]
    printed = capfd.readouterr().err
    assert PIPE_BYTES < len(printed) / 2 < MAX_PRINTED_BYTES + 1000
    assert printed.count("the rest of this call's output is dropped") == 2


@pytest.mark.parametrize("num_before", [0, 64 * 2**10 - 6, 256 * 2**10 - 6])
def test_an_api_key_passed_to_a_plug_in_is_redacted_even_in_a_truncated_line(tmp_path, monkeypatch, capfd, num_before):
    monkeypatch.setenv("JUDGE_KEY", "CANARY-0123456789")
    source = (
        "import os\nkey = os.environ['JUDGE_KEY']\nprint(key)\n"
        f"def f(completion):\n    print('x' * {num_before} + key * 9)\n    raise ValueError(key)"
    )
    scored = score([f"{write_plug_in(tmp_path, source)}:f"], make_group("a"), env_vars=["JUDGE_KEY"])
    assert "ValueError: <JUDGE_KEY>" in scored.notices[0]
    out, printed = capfd.readouterr()
    assert printed.count("x") >= num_before - 100
    assert "CANARY" not in f"{scored}{out}{printed}" and "0123456789" not in printed


def test_plug_ins_get_gpus_and_api_keys_only_if_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert worker_environment([], gpus)["CUDA_VISIBLE_DEVICES"] == ""
    assert worker_environment([*gpus], gpus)["CUDA_VISIBLE_DEVICES"] == "0,1"
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(InputError, match="environment variable JUDGE_KEY is not set"):
        score(["gsm8k"], make_group("a"), env_vars=["JUDGE_KEY"])
