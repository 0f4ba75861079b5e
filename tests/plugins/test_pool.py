"""Tests that plug-ins are imported, and that their workers are replaced and leave no processes behind."""

import math
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

from app.plugins.loading import LoadError, describe_error, load_object
from app.plugins.pool import Limits
from app.plugins.values import Failure
from app.reward.function_pool import FunctionCall, FunctionPool
from settings.errors import InputError
from tests.program import REPOSITORY
from tests.reward.processes import WORKERS, ended
from tests.reward.samples import write_plug_in

pytestmark = WORKERS


@pytest.fixture(autouse=True)
def in_folder_with_same_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", sys.modules.copy())


@contextmanager
def opened(source: str, **limits: Any) -> Iterator[FunctionPool]:
    """Opens a pool of two workers, with a time-out of 1 s, for the function `f` of a module."""
    write_plug_in(Path(), source)
    given = {"workers": 2, "timeout_s": 1, "memory_mib": 4096, **limits}
    pool = FunctionPool("plug.py:f", limits=Limits(**given), setting="reward.functions")
    try:
        pool.load()
        yield pool
    finally:
        pool.close()


def call(pool: FunctionPool, *texts: str) -> list[float | str]:
    fields = {"is_batch": False, "num_samples": 1, "trainer_arguments": [], "trainer_state": {}}
    results = pool.run([fields | {"arguments": {"text": text}} for text in texts])
    return [result.kind if isinstance(result, Failure) else result[0].value or 0.0 for result in results]


def run(source: str, *texts: str, **limits: Any) -> list[float | str]:
    with opened(source, **limits) as pool:
        return call(pool, *texts)


def test_children_and_daemons_end_with_their_worker(tmp_path: Path) -> None:
    source = """
import os, subprocess, time
def f(text):
    if text == 'daemon':
        if os.fork(): return 1
        os.setsid()
        if os.fork(): os._exit(0)
        pid = os.getpid()
    else:
        pid = subprocess.Popen(['sleep', '600']).pid
    with open(f'new-{text}', 'w') as out: out.write(str(pid))
    os.rename(f'new-{text}', f'pid-{text}')
    if text == 'hang': time.sleep(60)
    if text == 'daemon': os.execve('/bin/sleep', ['sleep', '600'], {})
    return 1
"""
    with opened(source) as pool:
        assert call(pool, "hang", "leave", "daemon") == ["timeout", 1.0, 1.0]
        assert ended(int((tmp_path / "pid-hang").read_text()))
        while not (tmp_path / "pid-daemon").exists():
            time.sleep(0.01)
    for text in ("leave", "daemon"):
        assert ended(int((tmp_path / f"pid-{text}").read_text()))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import os\nos._exit(5)", "during the import, it ended with exit code 5"),
        ("import time\ntime.sleep(60)", r"during the import, it took more than 0\.5 s"),
        ("x = bytearray(2 * 2**30)", r"MemoryError.*; if it needs more than plugins\.memory_mib = 1024, raise"),
    ],
)
def test_failures_to_load_a_plug_in_are_input_errors(source: str, message: str) -> None:
    with pytest.raises(InputError, match=f"^reward.functions: plug.py:f: .*{message}"):
        run(source, load_timeout_s=0.5 if "sleep" in source else 30, memory_mib=1024)


@pytest.mark.parametrize("mishap", ["time.sleep(60)", "1 / 0"])
def test_a_replacement_worker_that_fails_to_load_once_is_started_again(tmp_path: Path, mishap: str) -> None:
    source = (
        "import os, time\nif os.path.exists('died'):\n    os.rename('died', 'mishap')\n"
        f"    {mishap}\n"
        "def f(text):\n    if text != 'die' or os.path.exists('mishap'): return 1\n"
        "    open('died', 'w').close()\n    os._exit(1)"
    )
    assert run(source, "ok", "die", "ok", workers=1, load_timeout_s=3) == [1.0] * 3
    assert (tmp_path / "mishap").exists()


def test_a_worker_is_kept_between_calls_and_replaced_after_its_death() -> None:
    with opened("import os\ndef f(text): return os.getpid()", workers=1) as pool:
        [before] = {value for _ in range(3) for value in call(pool, *"ab")}
        os.kill(int(before), signal.SIGKILL)
        assert ended(int(before))
        [after] = call(pool, "a")
    assert isinstance(after, float) and after != before


def test_a_call_is_retried_if_it_ends_its_process_but_not_if_it_hangs(tmp_path: Path) -> None:
    source = (
        "import os, time\ndef f(text):\n    with open(text, 'a') as out: out.write('x')\n"
        "    if text == 'hang': time.sleep(60)\n    os._exit(1)"
    )
    assert run(source, "exit", "hang") == ["exit", "timeout"]
    assert [(tmp_path / text).read_text() for text in ("exit", "hang")] == ["xx", "x"]


def test_a_call_does_not_fail_because_an_earlier_call_broke_its_worker() -> None:
    source = (
        "import os\npoisoned = False\ndef f(text):\n    global poisoned\n    if poisoned: os._exit(1)\n"
        "    poisoned = text == 'poison'\n    return 1"
    )
    for workers in (1, 2):
        assert run(source, *["poison", "good"] * 4, "good", workers=workers) == [1.0] * 9


def test_a_forged_answer_fails_only_its_own_call() -> None:
    source = (
        "import contextlib, json, os, re, sys, time\n"
        "def f(text):\n    if text == 'ok': return 1\n"
        "    key = sys._getframe(1).f_locals['request']['key']\n"
        "    for fd in range(3, 9):\n"
        "        with contextlib.suppress(OSError): os.write(fd, text.replace('KEY', str(key)).encode() + b'\\n')\n"
        "    time.sleep(60)"
    )
    forged = ['{"outcomes": [{"value": NaN}], "key": KEY}', '{"key": KEY, "failure": 3}', "5", "[" * 50_000]
    forged += ['{"outcomes": [{"value": 1}], "key": -1}']
    assert run(source, "ok", *forged, "ok", timeout_s=30) == [1.0, *["exit"] * len(forged), 1.0]


def test_invalid_outcomes_of_a_plug_in_are_refused() -> None:
    outcomes: list[Any] = [[{"value": value}] for value in ("x", math.nan, math.inf, True, [1], 10**400)]
    outcomes += [[{"value": 1, "extras": extra}] for extra in ({"a": "x"}, {"a": -math.inf}, {"not a name": 1}, [1])]
    outcomes += [[{"failure": 3}], {"value": 1}, "ab", [None], [[1]], [{"value": 1}, {"value": 1}]]
    for outcome in outcomes:
        with pytest.raises((TypeError, ValueError, OverflowError)):
            FunctionCall({"num_samples": 1}).read({"outcomes": outcome})


def test_an_interrupt_leaves_no_worker_behind() -> None:
    source = f"import os, signal, time\ndef f(text):\n    os.kill({os.getpid()}, signal.SIGINT)\n    time.sleep(60)"
    # A shell starts background jobs with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(source, "a", "b", timeout_s=30)
    finally:
        signal.signal(signal.SIGINT, before)


def test_workers_and_their_children_end_with_the_trainer(tmp_path: Path) -> None:
    # One worker sleeps; the other one holds the interpreter's lock, so that no other thread of it runs.
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


def test_plug_ins_of_one_file_share_its_module_and_may_import_neighbouring_files() -> None:
    Path("neighbour.py").write_text("SCALE = 2")
    Path("plug.py").write_text(
        "from neighbour import SCALE\nclass A:\n    seen = []\ndef see(): A.seen.append(SCALE)\n"
    )
    first, see = load_object("plug.py:A"), load_object("plug.py:see")
    see()
    assert first.seen == [2] and load_object("plug.py:A.seen") == [2] and load_object("plug:A.seen") == []


def test_plug_in_files_of_equal_name_are_different_modules() -> None:
    for folder in ("a", "b"):
        Path(folder).mkdir()
        Path(folder, "plug.py").write_text(f"name = '{folder}'")
    assert [load_object(f"{folder}/plug.py:name") for folder in ("a", "b", "a")] == ["a", "b", "a"]


def test_error_locations_of_plug_ins_are_in_the_users_file() -> None:
    Path("plug.py").write_text("import json\ndef f():\n    json.loads('x')\n")
    with pytest.raises(ValueError) as caught:
        load_object("plug.py:f")()
    assert (
        describe_error(caught.value)
        == "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0) (plug.py:3)"
    )


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gone.py:f", r"no such file: .*gone\.py"),
        ("gone.deeper:f", "there is no module `gone` in .* or among the installed packages"),
        ("leaves:f", r"importing leaves failed: SystemExit: 0 \(leaves.py:1\)"),
        ("json:load_all", "json has no `load_all`; did you mean load"),
    ],
)
def test_missing_plug_in_files_modules_and_names_are_reported(path: str, message: str) -> None:
    Path("leaves.py").write_text("raise SystemExit(0)")
    with pytest.raises(LoadError, match=message):
        load_object(path)
