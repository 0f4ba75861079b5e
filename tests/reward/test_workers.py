"""Tests of the lifetime of worker processes: restarts, replacements, and none left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from app.reward.plugin import StepInfo
from settings.errors import InputError
from tests.reward.processes import WORKERS, ended
from tests.reward.samples import kinds_of, make_group, opened, score, values_of, write_plug_in

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = WORKERS


def test_workers_stay_for_the_next_step(tmp_path: Path) -> None:
    path = write_plug_in(tmp_path, "import os\ndef f(completion): return os.getpid()")
    samples = make_group(*"abcdefgh")
    with opened([f"{path}:f"], samples) as rewards:
        seen = [set(values_of(rewards.compute_rewards(samples, StepInfo(step)))) for step in range(3)]
    assert len(set.union(*seen)) <= 2


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
        scored = rewards.compute_rewards(samples, StepInfo())
        assert kinds_of(scored) == ["timeout", None]
        assert ended(int((tmp_path / "pid-hang").read_text()))
    assert ended(int((tmp_path / "pid-leave").read_text()))


def test_a_daemon_ends_with_its_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "import os\ndef f(completion):\n    if os.fork(): return 1\n    os.setsid()\n    if os.fork(): os._exit(0)\n"
        "    with open('new', 'w') as out: out.write(str(os.getpid()))\n    os.rename('new', 'pid')\n"
        "    os.execve('/bin/sleep', ['sleep', '600'], {})"
    )
    monkeypatch.chdir(tmp_path)
    write_plug_in(tmp_path, source)
    samples = make_group("a")
    with opened(["plug.py:f"], samples) as rewards:
        assert values_of(rewards.compute_rewards(samples, StepInfo())) == [1.0]
        while not (tmp_path / "pid").exists():
            time.sleep(0.01)
    assert ended(int((tmp_path / "pid").read_text()))


def test_a_function_that_cannot_be_loaded_again_ends_the_run(tmp_path: Path) -> None:
    path = write_plug_in(tmp_path, "import os\ndef f(completion):\n    os.unlink(__file__)\n    os._exit(1)")
    scored = score([f"{path}:f"], make_group("a"), workers=1)
    assert (scored.fatal_error or "").startswith("reward f: no worker can be restarted: no such file: ")


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
    assert (values_of(scored), scored.fatal_error) == ([1.0] * 3, None)


def test_a_worker_that_died_between_two_steps_is_replaced(tmp_path: Path) -> None:
    path = write_plug_in(tmp_path, "import os\ndef f(completions): return [os.getpid()] * len(completions)")
    samples = make_group("a", "b")
    with opened([f"{path}:f"], samples) as rewards:
        before, _ = values_of(rewards.compute_rewards(samples, StepInfo()))
        os.kill(int(before or 0), signal.SIGKILL)
        assert ended(int(before or 0))
        after = values_of(rewards.compute_rewards(samples, StepInfo()))
    # Still one call of two samples: nobody had to find out by losing one.
    assert after[0] == after[1] != before


def test_an_interrupt_while_they_work_leaves_none_behind(tmp_path: Path) -> None:
    path = write_plug_in(tmp_path, "import os, signal, time\ndef f(completion):\n"
                                   f"    os.kill({os.getpid()}, signal.SIGINT)\n    time.sleep(60)")  # fmt: skip
    # A shell starts what it puts in the background with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            score([f"{path}:f"], make_group("a", "b"), timeout_s=30)
    finally:
        signal.signal(signal.SIGINT, before)


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
