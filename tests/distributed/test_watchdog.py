"""Tests of phases that exceed their limit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from app.distributed.status_board import StatusBoard
from app.distributed.watchdog import Watchdog
from app.tracking.console import ProgressDisplay
from app.tracking.timer import StepTimer
from tests.program import DEADLINE_S, REPOSITORY

STUCK = """\
import ctypes, sys, threading, time
from pathlib import Path
from app.distributed.status_board import StatusBoard
from app.distributed import watchdog

watchdog.HARD_EXIT_DELAY_S = 1.0
def in_python(): threading.Event().wait()
def in_c_without_python(): ctypes.PyDLL(None).sleep(1000)
with watchdog.Watchdog(0.35, Path(sys.argv[2]), StatusBoard(None, host=3)) as dog:
    dog.step = 5
    dog.enter_phase("rollout")
    {"in_python": in_python, "in_c_without_python": in_c_without_python}[sys.argv[1]]()
"""


def stuck(where: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", STUCK, where, str(folder)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def test_a_phase_that_does_not_end_shows_every_stack_and_exits_70(tmp_path: Path) -> None:
    ended = stuck("in_python", tmp_path / "crash")
    assert ended.returncode == 70, ended.stderr
    written = (tmp_path / "crash" / "host_3.txt").read_text()
    for text in (ended.stderr, written):
        assert "watchdog: host 3 has been in phase rollout of step 5 for 1 s, longer than " in text
        assert "2 x watchdog.phase_s = 0.7" in text
        assert "in in_python" in text


def test_what_does_not_let_python_run_is_ended_all_the_same(tmp_path: Path) -> None:
    ended = stuck("in_c_without_python", tmp_path / "crash")
    assert ended.returncode == 1, ended.stderr
    assert "in in_c_without_python" in ended.stderr


def test_the_first_pass_of_a_phase_may_compile(tmp_path: Path) -> None:
    found: list[tuple[str, float | None]] = []

    def limit() -> float | None:
        assert dog._active_phase is not None
        return dog._active_phase.limit_s

    with Watchdog(100.0, tmp_path / "crash", StatusBoard(None, host=0)) as dog:
        board = ProgressDisplay(num_steps=1, first_step=0, enabled=False, on_phase=dog.enter_phase)
        assert limit() == 100.0
        for _ in range(2):
            timer = StepTimer(board)
            with timer.phase("rollout"):
                found.append(("rollout", limit()))
            with timer.phase("reward"):
                with timer.phase("score_reward"):
                    found.append(("score_reward", limit()))
                found.append(("reward", limit()))
            with timer.phase("advantage"):
                found.append(("advantage", limit()))
            board.set_phase("report")
            found.append(("report", limit()))
    assert found[:5] == [
        *(("rollout", 200.0), ("score_reward", 200.0), ("reward", 100.0), ("advantage", 200.0), ("report", 200.0)),
    ]
    assert {limit for _, limit in found[5:]} == {100.0}
    assert not (tmp_path / "crash").exists()


def test_without_a_limit_nothing_is_watched(tmp_path: Path) -> None:
    with Watchdog(None, tmp_path / "crash", StatusBoard(None, host=0)) as dog:
        dog.enter_phase("rollout")
        assert dog._active_phase is not None and dog._active_phase.limit_s is None
