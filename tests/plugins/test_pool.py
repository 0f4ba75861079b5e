"""Tests of workers and their replacement, with functions: none is left behind, and each fault costs its own call."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from app.plugins.pool import Limits, WorkersLostError
from app.plugins.values import Failure
from app.reward.function_pool import FunctionPool
from settings.errors import InputError
from tests.reward.processes import WORKERS, ended
from tests.reward.samples import write_plug_in

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = WORKERS


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@contextmanager
def opened(source: str, **limits: Any) -> Iterator[FunctionPool]:
    """Opens a pool of two workers, with a time-out of 1 s, for the function `f` of a module."""
    write_plug_in(Path(), source)
    given = {"workers": 2, "timeout_s": 1, "memory_mib": 4096, **limits}
    pool = FunctionPool("plug.py:f", limits=Limits(**given))
    try:
        pool.load()
        yield pool
    finally:
        pool.close()


def call(pool: FunctionPool, *texts: str) -> list[float | str]:
    """Calls the function for each text; returns its value or the kind of its failure."""
    requests = [{"arguments": {"text": text}, "is_batch": False, "num_samples": 1} for text in texts]
    results = pool.run(requests)
    return [result.kind if isinstance(result, Failure) else result[0].value or 0.0 for result in results]


def run(source: str, *texts: str, **limits: Any) -> list[float | str]:
    with opened(source, **limits) as pool:
        return call(pool, *texts)


def test_workers_stay_for_the_next_calls() -> None:
    with opened("import os\ndef f(text): return os.getpid()") as pool:
        assert len({value for _ in range(3) for value in call(pool, *"abcdefgh")}) <= 2


def test_what_a_killed_function_started_is_killed_too(tmp_path: Path) -> None:
    source = (
        "import os, subprocess, time\ndef f(text):\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        "    with open(f'pid-{text}', 'w') as out: out.write(str(child.pid))\n"
        "    if text == 'hang': time.sleep(60)\n    return 1"
    )
    with opened(source) as pool:
        assert call(pool, "hang", "leave") == ["timeout", 1.0]
        assert ended(int((tmp_path / "pid-hang").read_text()))
    assert ended(int((tmp_path / "pid-leave").read_text()))


def test_a_daemon_ends_with_its_worker(tmp_path: Path) -> None:
    source = (
        "import os\ndef f(text):\n    if os.fork(): return 1\n    os.setsid()\n    if os.fork(): os._exit(0)\n"
        "    with open('new', 'w') as out: out.write(str(os.getpid()))\n    os.rename('new', 'pid')\n"
        "    os.execve('/bin/sleep', ['sleep', '600'], {})"
    )
    with opened(source) as pool:
        assert call(pool, "a") == [1.0]
        while not (tmp_path / "pid").exists():
            time.sleep(0.01)
    assert ended(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import os\nos._exit(5)", "during the import, it ended with exit code 5"),
        ("import time\ntime.sleep(60)", r"during the import, it took more than 0\.5 s"),
        ("x = bytearray(2 * 2**30)", r"MemoryError.*; it may need more than plugins\.memory_mib = 1024"),
    ],
)
def test_what_cannot_be_loaded_is_an_input_error(source: str, message: str) -> None:
    with pytest.raises(InputError, match=f"^reward.functions: plug.py:f: .*{message}"):
        run(source, load_timeout_s=0.5 if "sleep" in source else 30, memory_mib=1024)


def test_a_worker_that_cannot_be_replaced_ends_the_wait_of_all_callers() -> None:
    source = "import os\ndef f(text):\n    os.unlink(__file__)\n    os._exit(1)"
    why = "^reward.functions: plug.py:f: two attempts to start a process have failed: no such file: .*; mend that"
    with opened(source, workers=1) as pool:
        for _ in range(2):
            with pytest.raises(WorkersLostError, match=why):
                call(pool, "a", "b")


@pytest.mark.parametrize("mishap", ["time.sleep(60)", "1 / 0", "os._exit(1)"])
def test_a_successor_that_fails_to_load_once_is_started_again(tmp_path: Path, mishap: str) -> None:
    source = (
        "import os, time\nif os.path.exists('died'):\n    os.rename('died', 'mishap')\n"
        f"    {mishap}\n"
        "def f(text):\n    if text != 'die' or os.path.exists('mishap'): return 1\n"
        "    open('died', 'w').close()\n    os._exit(1)"
    )
    assert run(source, "ok", "die", "ok", workers=1, load_timeout_s=3) == [1.0] * 3
    assert (tmp_path / "mishap").exists()


def test_a_worker_that_died_between_two_calls_is_replaced() -> None:
    with opened("import os\ndef f(text): return os.getpid()", workers=1) as pool:
        [before] = call(pool, "a")
        os.kill(int(before), signal.SIGKILL)
        assert ended(int(before))
        [after] = call(pool, "a")
    assert isinstance(after, float) and after != before


def test_a_call_that_ends_its_process_is_tried_once_more_and_one_that_hangs_is_not(tmp_path: Path) -> None:
    source = (
        "import os, time\ndef f(text):\n    with open(text, 'a') as out: out.write('x')\n"
        "    if text == 'hang': time.sleep(60)\n    os._exit(1)"
    )
    assert run(source, "exit", "hang") == ["exit", "timeout"]
    assert [(tmp_path / text).read_text() for text in ("exit", "hang")] == ["xx", "x"]


def test_a_call_is_not_blamed_for_what_an_earlier_one_did_to_the_process() -> None:
    source = (
        "import os\npoisoned = False\ndef f(text):\n    global poisoned\n    if poisoned: os._exit(1)\n"
        "    poisoned = text == 'poison'\n    return 1"
    )
    for workers in (1, 2):
        assert run(source, *["poison", "good"] * 4, "good", workers=workers) == [1.0] * 9


def test_memory_is_limited_and_honest_use_is_not() -> None:
    fill = "import numpy\ndef f(text): return numpy.zeros(int(text) * 2**20, numpy.uint8).nbytes / 2**20"
    assert run(fill, "10", "2000", "20", timeout_s=30, memory_mib=1024) == [10.0, "memory", 20.0]


def test_an_answer_that_is_no_outcome_costs_the_call_it_was_forged_for() -> None:
    source = (
        "import contextlib, json, os, re, sys, time\n"
        "def f(text):\n    if text == 'ok': return 1\n"
        "    key = sys._getframe(1).f_locals['request']['key']\n"
        "    for fd in range(3, 9):\n"
        "        with contextlib.suppress(OSError): os.write(fd, text.replace('KEY', str(key)).encode() + b'\\n')\n"
        "    time.sleep(60)"
    )
    values = ['"x"', "NaN", "1e999", "true", "[1]", "1" * 400]
    outcomes = [f'[{{"value": {value}}}]' for value in values]
    extras = ['{"a": "x"}', '{"a": -Infinity}', '{"not a name": 1}', "[1]", '"no"']
    outcomes += [f'[{{"value": 1, "extras": {extra}}}]' for extra in extras]
    outcomes += ['[{"failure": 3}]', '{"value": 1}', '"ab"', "[null]", "[[1]]", '[{"value": 1}, {"value": 1}]']
    forged = [f'{{"outcomes": {outcome}, "key": KEY}}' for outcome in outcomes]
    forged += ['{"key": KEY, "failure": 3}', '{"outcomes": [{"value": 1}], "key": -1}', "{}", "5", "[" * 50_000]
    assert run(source, "ok", *forged, "ok", timeout_s=30) == [1.0, *["exit"] * len(forged), 1.0]


def test_an_interrupt_while_they_work_leaves_none_behind() -> None:
    source = f"import os, signal, time\ndef f(text):\n    os.kill({os.getpid()}, signal.SIGINT)\n    time.sleep(60)"
    # A shell starts what it puts in the background with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(source, "a", "b", timeout_s=30)
    finally:
        signal.signal(signal.SIGINT, before)


def test_workers_and_what_they_started_end_with_the_trainer_however_it_ends(tmp_path: Path) -> None:
    # One worker sleeps, and a second one does not let any other thread of its run.
    source = (
        "import os, re, subprocess, time\ndef f(text):\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        "    with open(f'new-{text}', 'w') as out: out.write(f'{os.getpid()} {child.pid}')\n"
        "    os.rename(f'new-{text}', f'pids-{text}')\n"
        "    if text == 'busy': re.match('(a+)+$', 'a' * 64 + 'b')\n"
        "    time.sleep(60)"
    )
    program = f"from tests.plugins.test_pool import run\nrun({source!r}, 'idle', 'busy', timeout_s=60)"
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ) as trainer:
        waiting = [tmp_path / "pids-idle", tmp_path / "pids-busy"]
        while not all(path.exists() for path in waiting):
            with suppress(subprocess.TimeoutExpired):
                trainer.wait(timeout=0.01)
            assert trainer.poll() is None
        trainer.kill()
    idle, idle_child, busy, busy_child = (int(pid) for path in waiting for pid in path.read_text().split())
    assert ended(idle) and ended(idle_child) and ended(busy) and ended(busy_child)
