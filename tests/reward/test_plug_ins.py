"""Plug-ins in real worker processes: how they are called, and what becomes of those that misbehave."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from app.reward.plugin import Moment
from app.reward.rewards import Rewards
from app.reward.signature import Columns
from settings.errors import InputError
from settings.reward_section import Reward
from tests.reward.processes import children, ended, open_files
from tests.reward.samples import (
    kinds_of,
    make_group,
    make_prompt,
    make_sample,
    opened,
    score,
    values_of,
    write_plug_in,
)

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No process, zombie or open file survives the block that opened the rewards."""
    before = open_files()
    yield
    assert children() == []
    assert open_files() == before


# How they are called


@pytest.mark.parametrize(
    ("source", "values"),
    [
        ("def f(completion): return len(completion)", [1.0, 2.0, 3.0]),
        ("def f(completion, answer): return completion == answer", [0.0, 1.0, 0.0]),
        ("async def f(completion): return len(completion)", [1.0, 2.0, 3.0]),
        ("def f(solution_str, ground_truth): return {'score': len(solution_str), 'acc': 1}", [1.0, 2.0, 3.0]),
        ("def f(completions, **kwargs): return [len(c) + len(kwargs['answer']) for c in completions]", [4.0, 5.0, 6.0]),
        ("def f(prompts, completion_ids): return (sum(ids) for ids in completion_ids)", [0.0, 1.0, 3.0]),
        ("async def f(completions):\n    import asyncio\n    await asyncio.sleep(0)\n    return [1] * 3", [1.0] * 3),
        ("import numpy\ndef f(completions): return numpy.float32([0.5, 1.5, 2.5])", [0.5, 1.5, 2.5]),
        ("from fractions import Fraction\ndef f(completion): return Fraction(len(completion), 2)", [0.5, 1.0, 1.5]),
        ("import functools\nf = functools.partial(lambda completion, scale: scale, scale=2)", [2.0, 2.0, 2.0]),
        ("class Judge:\n    def __call__(self, completion): return 1\nf = Judge()", [1.0, 1.0, 1.0]),
        ("def f(completions, trainer_state):\n    s = trainer_state\n"
         "    return [s.global_step + s.max_steps for _ in completions]", [13.0] * 3),
        ("def f(completion):\n    print('{\"outcomes\": []}')\n    return 1", [1.0, 1.0, 1.0]),
        ("import os\ndef f(completion):\n    os.fork()\n    return 1", [1.0, 1.0, 1.0]),
        ("def f(completion):\n    try: return input()\n    except EOFError: return 7", [7.0] * 3),
    ],
)  # fmt: skip
def test_a_plug_in_gives_its_values(tmp_path: Path, source: str, values: list[float]) -> None:
    samples = [make_sample(text, make_prompt("ab")) for text in ("a", "ab", "abc")]
    scored = score([f"{write_plug_in(tmp_path, source)}:f"], samples)
    assert (values_of(scored), scored.notices) == (values, ())


def test_the_functions_of_the_readme_work_as_written(tmp_path: Path) -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", readme, flags=re.DOTALL | re.MULTILINE)
    path = write_plug_in(tmp_path, block)
    sample = make_sample("so 18", make_prompt("18"))
    (scored,) = score([f"{path}:{name}" for name in ("brevity", "score", "overlap")], [sample]).samples
    assert scored.rewards == {"brevity": 0.4, "score": 1.0, "overlap": 1.0}


def test_a_module_of_the_working_directory_may_import_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rewards").mkdir()
    write_plug_in(tmp_path, "from neighbour import SCALE\nclass Style:\n    def f(completion): return SCALE", "my.py")
    write_plug_in(tmp_path / "my_rewards", "from my import Style\ndef g(completion): return 3", "deep.py")
    write_plug_in(tmp_path, "SCALE = 2", "neighbour.py")
    monkeypatch.chdir(tmp_path)
    functions = ["my:Style.f", "my_rewards.deep:g", {"name": "again", "function": "my.py:Style.f", "weight": 10}]
    assert values_of(score(functions, make_group("a"))) == [25.0]


def test_a_plug_in_may_abstain_in_batch_style_alone(tmp_path: Path) -> None:
    path = write_plug_in(tmp_path, "def f(completions): return [1, None]\ndef g(completion): return None")
    scored = score([f"{path}:f"], make_group("a", "b"))
    assert [s.rewards for s in scored.samples] == [{"f": 1.0}, {}]
    assert scored.num_abstained == 1
    scored = score([f"{path}:g"], make_group("a"))
    assert kinds_of(scored) == ["value"] and "returned None, expected a number" in scored.notices[0]


def test_further_numbers_come_from_dicts_and_from_log_metric(tmp_path: Path) -> None:
    path = write_plug_in(
        tmp_path,
        "def verl(solution_str):\n"
        "    return {'score': 1, 'acc': solution_str == 'b', 'why': 'so', 'bad name!': 1, 'nan': float('nan')}\n"
        "def trl(completions, log_metric):\n    n = len(completions)\n    log_metric('seen', n)\n    return [0] * n\n",
    )
    scored = score([f"{path}:verl", f"{path}:trl"], [*make_group("a", "b"), *make_group("b", group=1)], batch_size=2)
    assert scored.tallies["verl"].extras == {"acc": (2.0, 3)}
    # Two calls, of two samples and of one: each sample counts the number of its call.
    assert scored.tallies["trl"].extras == {"seen": (5.0, 3)}


def test_batches_hold_whole_groups(tmp_path: Path) -> None:
    path = write_plug_in(tmp_path, "def f(completions): return [len(completions)] * len(completions)")
    samples = [sample for group in range(4) for sample in make_group("a", "b", "c", group=group)]
    assert values_of(score([f"{path}:f"], samples, batch_size=7)) == [6.0] * 12
    assert values_of(score([f"{path}:f"], samples, batch_size=1)) == [3.0] * 12
    assert values_of(score([f"{path}:f"], samples[::-1] + samples[:1], batch_size=9)) == [9.0] * 9 + [4.0] * 4


def test_results_come_in_the_order_of_the_samples_whoever_is_done_first(tmp_path: Path) -> None:
    path = write_plug_in(
        tmp_path, "import time\ndef f(completion):\n    time.sleep(0.1 / len(completion))\n    return len(completion)"
    )
    samples = make_group(*("x" * length for length in range(1, 20)))
    assert values_of(score([f"{path}:f"], samples, workers=4)) == [float(n) for n in range(1, 20)]


def test_held_out_samples_are_given_what_their_own_data_have(tmp_path: Path) -> None:
    source = (
        "def f(solution_str, data_source, **kwargs):\n"
        "    return {'score': len(data_source), 'trained': 'level' in kwargs, 'asked': kwargs.get('topic') == 'sums'}"
    )
    training = [make_sample("a", make_prompt(level=1))]
    held_out = [make_sample("a", make_prompt(topic="sums"))]
    settings = Reward.model_validate({"functions": [f"{write_plug_in(tmp_path, source)}:f"]})
    columns = [Columns.of([s.prompt for s in samples], source=source)
               for samples, source in ((training, "train.jsonl"), (held_out, "test"))]  # fmt: skip
    with Rewards(settings, *columns) as rewards:
        scored, judged = rewards.score(training, Moment()), rewards.judge(held_out, Moment())
    assert (values_of(scored), scored.tallies["f"].extras) == ([11.0], {"trained": (1.0, 1), "asked": (0.0, 1)})
    assert (values_of(judged), judged.tallies["f"].extras) == ([4.0], {"trained": (0.0, 1), "asked": (1.0, 1)})


def test_workers_stay_for_the_next_step(tmp_path: Path) -> None:
    path = write_plug_in(tmp_path, "import os\ndef f(completion): return os.getpid()")
    samples = make_group(*"abcdefgh")
    with opened([f"{path}:f"], samples) as rewards:
        seen = [set(values_of(rewards.score(samples, Moment(step)))) for step in range(3)]
    assert len(set.union(*seen)) <= 2


def test_of_a_long_completion_a_plug_in_sees_the_end(tmp_path: Path) -> None:
    path = write_plug_in(tmp_path, "def f(completion): return len(completion) + (completion == 'end')")
    assert values_of(score([f"{path}:f"], make_group("x" * 10_000 + "end"), max_characters=3)) == [4.0]


def test_a_completion_of_any_size_and_content_arrives(tmp_path: Path) -> None:
    path = write_plug_in(tmp_path, "def f(completion): return len(completion)")
    texts = ["\x00\n\r\u2028\ud800\U0001f600", "x" * 3_000_000, ""]
    scored = score([f"{path}:f"], make_group(*texts), max_characters=10_000_000)
    assert values_of(scored) == [float(len(text)) for text in texts]


# What they see


def test_a_worker_sees_few_variables_and_none_of_our_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        score([f"{path}:f"], make_group("a"), environment=["JUDGE_KEY"])
    seen, files = json.loads((tmp_path / "seen.json").read_text())
    assert [name for name, value in seen.items() if "CANARY" in value] == ["JUDGE_KEY"]
    assert seen["PATH"] == os.environ["PATH"] and seen["PYTHONHASHSEED"] == "0"
    assert all(file.startswith(("pipe:", "anon_inode:", "socket:")) for file in files), files


@pytest.mark.parametrize(("asked_for", "seen"), [([], 0.0), (["CUDA_VISIBLE_DEVICES"], 3.0)])
def test_gpus_are_the_trainers_unless_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked_for: list[str], seen: float
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    path = write_plug_in(tmp_path, "import os\ndef f(completion): return len(os.environ['CUDA_VISIBLE_DEVICES'])")
    assert values_of(score([f"{path}:f"], make_group("a"), environment=asked_for)) == [seen]


def test_an_asked_for_variable_must_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(InputError, match=r"reward\.environment names JUDGE_KEY, which is not set"):
        score(["gsm8k"], make_group("a"), environment=["JUDGE_KEY"])


def test_what_a_plug_in_prints_goes_to_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_plug_in(tmp_path, "print('hello at import')\ndef f(completion):\n    print('hello')\n    return 1")
    assert values_of(score([f"{path}:f"], make_group("a"))) == [1.0]
    assert capfd.readouterr() == ("", "hello at import\nhello\n")


def test_what_a_plug_in_prints_cannot_command_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = (
        "import os, sys\ndef f(completion):\n    print(completion)\n    os.write(1, b'\\xff\\x1b]0;title\\x07\\n')\n"
        "    print('no end', end='', file=sys.stderr, flush=True)\n    return 1"
    )
    assert values_of(score([f"{write_plug_in(tmp_path, source)}:f"], make_group("a\x1b[2J\rb\tc"))) == [1.0]
    printed = "a\ufffd[2J\nb       c\n\ufffd\ufffd]0;title\ufffd\nno end\n"
    assert capfd.readouterr() == ("", printed)


def test_a_plug_in_may_print_more_than_a_pipe_holds(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_plug_in(tmp_path, "def f(completion):\n    print('x' * 10**6)\n    return 1")
    assert values_of(score([f"{path}:f"], make_group("a"))) == [1.0]
    assert capfd.readouterr().err.count("x") == 10**6


def test_a_plug_in_may_close_what_it_prints_to(tmp_path: Path) -> None:
    path = write_plug_in(tmp_path, "import os\ndef f(completion):\n    os.close(1)\n    os.close(2)\n    return 1")
    assert values_of(score([f"{path}:f"], make_group("a"), workers=1)) == [1.0]


# When they fail

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


def test_a_forged_answer_costs_the_sample_it_was_forged_for(tmp_path: Path) -> None:
    source = (
        "import contextlib, os, time\ndef f(completion):\n    if completion == 'ok': return 1\n"
        "    for fd in range(3, 9):\n"
        "        with contextlib.suppress(OSError): os.write(fd, completion.encode() + b'\\n')\n"
        "    time.sleep(60)"
    )
    values = ['"x"', "NaN", "1e999", "true", "[1]", "1" * 400]
    outcomes = [f'[{{"value": {value}}}]' for value in values]
    extras = ['{"a": "x"}', '{"a": -Infinity}', '{"not a name": 1}', "[1]", '"no"']
    outcomes += [f'[{{"value": 1, "extras": {extra}}}]' for extra in extras]
    outcomes += ['[{"failure": 3}]', '{"value": 1}', '"ab"', "[null]", "[[1]]"]
    forged = [f'{{"outcomes": {outcome}, "call": 1}}' for outcome in outcomes] + ["[" * 50_000]
    scored = score([f"{write_plug_in(tmp_path, source)}:f"], make_group("ok", *forged, "ok"), timeout_s=30)
    assert kinds_of(scored) == [None, *["exit"] * len(forged), None]
    assert values_of(scored) == [1.0, *[0.0] * len(forged), 1.0]


@pytest.mark.parametrize(
    ("source", "kind", "text"),
    [
        ("def f(completions): return [1]", "length", "returned 1 values for 2 samples"),
        ("def f(completions): return 0.5", "value", "returned float 0.5, expected a list of 2 numbers or None"),
        ("def f(completions): return 'ab'", "value", "returned str 'ab', expected a list of 2 numbers"),
        ("def f(completions): return {0: 1, 1: 1}", "value", "returned dict {0: 1, 1: 1}, expected a list"),
        ("def f(solution_str): return {'acc': 1}", "value", "returned dict {'acc': 1}, a dict without `score`"),
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
    # A list of the wrong length for two may be right for one.
    expected = [None, None] if kind == "length" else [kind, kind]
    assert kinds_of(scored) == expected
    assert expected[0] is None or text.replace(" 2 ", " 1 ") in scored.notices[0]


def test_a_failing_batch_is_tried_again_group_by_group_and_then_one_by_one(tmp_path: Path) -> None:
    path = write_plug_in(
        tmp_path,
        "def f(completions):\n    assert 'bad' not in completions\n    return [len(completions)] * len(completions)",
    )
    samples = [*make_group("a", "b", "c"), *make_group("a", "bad", "c", group=1), *make_group("a", "b", group=2)]
    scored = score([f"{path}:f"], samples)
    assert values_of(scored) == [3.0, 3.0, 3.0, 1.0, 0.0, 1.0, 2.0, 2.0]
    assert scored.num_errors == 1


def test_a_sample_is_not_blamed_for_what_an_earlier_one_did_to_the_process(tmp_path: Path) -> None:
    source = (
        "import os\npoisoned = False\ndef f(completion):\n    global poisoned\n    if poisoned: os._exit(1)\n"
        "    poisoned = completion == 'poison'\n    return 1"
    )
    scored = score([f"{write_plug_in(tmp_path, source)}:f"], make_group("poison", "good", "good"), workers=1)
    assert (values_of(scored), scored.num_errors) == ([1.0, 1.0, 1.0], 0)


def test_processor_time_is_limited_too(tmp_path: Path) -> None:
    source = "def f(completion):\n    while completion == 'spin': pass\n    return 1"
    scored = score([f"{write_plug_in(tmp_path, source)}:f"], make_group("spin", "ok"), timeout_s=30, cpu_s=1)
    assert (kinds_of(scored), values_of(scored)) == (["cpu", None], [0.0, 1.0])
    assert "used more than 1 s of processor time" in scored.notices[0]


def test_memory_is_limited_before_the_import_and_honest_use_is_not(tmp_path: Path) -> None:
    source = "import numpy\ndef f(completion): return numpy.zeros(int(completion) * 2**20, numpy.uint8).nbytes / 2**20"
    path = write_plug_in(tmp_path, source)
    scored = score([f"{path}:f"], make_group("10", "2000", "20"), memory_mib=1024)
    assert (kinds_of(scored), values_of(scored)) == ([None, "memory", None], [10.0, 0.0, 20.0])
    hog = write_plug_in(tmp_path, "x = bytearray(2 * 2**30)\ndef f(completion): return 1", "hog.py")
    with pytest.raises(InputError, match=r"hog\.py failed: MemoryError .*may need more than reward\.memory_mib = 1024"):
        score([f"{hog}:f"], make_group("a"), memory_mib=1024)


def test_what_a_killed_function_started_is_killed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "import os, subprocess, time\ndef f(completion):\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        "    with open(f'pid-{completion}', 'w') as out: out.write(str(child.pid))\n"
        "    if completion == 'hang': time.sleep(60)\n    return 1"
    )
    monkeypatch.chdir(tmp_path)
    write_plug_in(tmp_path, source)
    samples = make_group("hang", "leave")
    with opened(["plug.py:f"], samples) as rewards:
        scored = rewards.score(samples, Moment())
        assert kinds_of(scored) == ["timeout", None]
        assert ended(int((tmp_path / "pid-hang").read_text()))
    assert ended(int((tmp_path / "pid-leave").read_text()))


def test_a_function_that_cannot_be_loaded_again_ends_the_run(tmp_path: Path) -> None:
    path = write_plug_in(tmp_path, "import os\ndef f(completion):\n    os.unlink(__file__)\n    os._exit(1)")
    scored = score([f"{path}:f"], make_group("a"), workers=1)
    assert (scored.problem or "").startswith("reward f: no worker can be started any more: no such file: ")


@pytest.mark.parametrize("mishap", ["time.sleep(60)", "1 / 0", "os._exit(1)"])
def test_a_successor_that_fails_to_load_once_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mishap: str
) -> None:
    source = (
        "import os, time\nif os.path.exists('died'):\n    os.rename('died', 'mishap')\n"
        f"    {mishap}\n"
        "def f(completion):\n    if completion != 'die' or os.path.exists('mishap'): return 1\n"
        "    open('died', 'w').close()\n    os._exit(1)"
    )
    monkeypatch.chdir(tmp_path)
    write_plug_in(tmp_path, source)
    scored = score(["plug.py:f"], make_group("ok", "die", "ok"), workers=1, load_timeout_s=3)
    assert (tmp_path / "mishap").exists()
    assert (values_of(scored), scored.problem) == ([1.0] * 3, None)


def test_a_worker_that_died_between_two_steps_is_replaced(tmp_path: Path) -> None:
    path = write_plug_in(tmp_path, "import os\ndef f(completions): return [os.getpid()] * len(completions)")
    samples = make_group("a", "b")
    with opened([f"{path}:f"], samples) as rewards:
        before, _ = values_of(rewards.score(samples, Moment()))
        os.kill(int(before or 0), signal.SIGKILL)
        assert ended(int(before or 0))
        after = values_of(rewards.score(samples, Moment()))
    # Still one call of two samples: nobody had to find out by losing one.
    assert after[0] == after[1] != before


def test_an_interrupt_while_they_work_leaves_none_behind(tmp_path: Path) -> None:
    path = write_plug_in(tmp_path, "import os, signal, time\ndef f(completion):\n"
                                   "    os.kill(os.getppid(), signal.SIGINT)\n    time.sleep(60)")  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        score([f"{path}:f"], make_group("a", "b"), timeout_s=30)


# When they cannot be used at all


@pytest.mark.parametrize(
    ("source", "function", "message"),
    [
        (None, "no.py:f", "no.py:f: no such file: /"),
        (None, "no_such_module:f", "there is no module `no_such_module` in /"),
        (None, "json.no:f", "there is no module `json.no` in /"),
        ("def g(completion): return 1\n_h = g", "plug.py:f", "plug.py has no `f`; functions there: g"),
        ("f = 3", "plug.py:f", "f is a int, not a function"),
        ("class f:\n    def __init__(self, completion): ...", "plug.py:f", "f is a class, not a function"),
        ("import os\n1 / 0", "plug.py:f", "importing plug.py failed: ZeroDivisionError: division by zero (plug.py:2)"),
        ("def f(:", "plug.py:f", "importing plug.py failed: SyntaxError: invalid syntax (plug.py:1)"),
        ("import no_such_package", "plug.py:f", "ModuleNotFoundError: No module named 'no_such_package' (plug.py:1)"),
        ("import no_such_package", "plug:f", "importing plug failed: ModuleNotFoundError: No module named 'no_such_p"),
        ("raise SystemExit(0)", "plug:f", "importing plug failed: SystemExit: 0 (plug.py:1)"),
        ("import os\nos._exit(5)", "plug.py:f", "while it was imported, it ended with exit code 5"),
        ("import time\ntime.sleep(60)", "plug.py:f", "while it was imported, it took more than 0.5 s"),
        ("def f(completion, mood): return 1", "plug.py:f", "asks for `mood`, which nothing fills. A function takes"),
        ("def f(): return 1", "plug.py:f", "takes nothing that a sample has"),
        ("import math\nf = math.hypot", "plug.py:f", "its signature cannot be read"),
        ("import math\nf = math.sqrt", "plug.py:f", "takes `x` by position only"),
    ],
)  # fmt: skip
def test_a_broken_plug_in_is_an_input_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None, function: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if source is not None:
        write_plug_in(tmp_path, source)
    with pytest.raises(InputError) as caught:
        score([function], make_group("a"), load_timeout_s=0.5 if "sleep" in (source or "") else 30)
    assert str(caught.value).startswith(f"reward.functions: {function}: ")
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "__pycache__").exists()


def test_a_good_plug_in_is_closed_when_the_next_one_is_broken(tmp_path: Path) -> None:
    path = write_plug_in(tmp_path, "def f(completion): return 1")
    with pytest.raises(InputError, match="has no `g`"):
        score([f"{path}:f", f"{path}:g"], make_group("a"))


def test_workers_and_what_they_started_end_with_the_trainer_however_it_ends(tmp_path: Path) -> None:
    # One worker sleeps, and a second one does not let any other thread of its run.
    source = (
        "import os, re, subprocess, time\ndef f(completion):\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        "    with open(f'new-{completion}', 'w') as out: out.write(f'{os.getpid()} {child.pid}')\n"
        "    os.rename(f'new-{completion}', f'pids-{completion}')\n"
        "    if completion == 'busy': re.match('(a+)+$', 'a' * 64 + 'b')\n"
        "    time.sleep(60)"
    )
    write_plug_in(tmp_path, source)
    program = (
        "from tests.reward.samples import make_group, score\n"
        "score(['plug.py:f'], make_group('idle', 'busy'), timeout_s=60, cpu_s=1)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ) as trainer:
        waiting = [tmp_path / "pids-idle", tmp_path / "pids-busy"]
        while not all(path.exists() for path in waiting):
            with suppress(subprocess.TimeoutExpired):
                trainer.wait(timeout=0.01)
            assert trainer.poll() is None
        trainer.kill()
    idle, idle_child, busy = [int(pid) for path in waiting for pid in path.read_text().split()][:3]
    # The busy one ends when its processor time does; its own child is out of everybody's reach.
    assert ended(idle) and ended(idle_child) and ended(busy)
    with suppress(ProcessLookupError):
        os.kill(int(waiting[1].read_text().split()[1]), signal.SIGKILL)
