"""Tests phases that exceed their limit."""

from pathlib import Path

from tests.program import run_of, run_python, settings

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

STUCK_ELSEWHERE = """\
import sys, threading
from pathlib import Path
from app.distributed.status_board import KEY_PREFIX, StatusBoard
from app.distributed.watchdog import Watchdog

class Store:
    def key_value_set(self, key, value, allow_overwrite=False): pass
    def key_value_dir_get(self, prefix):
        return [(f"{KEY_PREFIX}{sys.argv[2]}/1", sys.argv[3])]

with StatusBoard(Store(), host=0, num_hosts=2) as board, Watchdog(None, Path(sys.argv[1]), board) as dog:
    dog.enter_phase("report")
    threading.Event().wait()
"""

STUCK_RUN = """\
import threading
import cli
from app.training import setup
def hang_while_reading(*_): threading.Event().wait()
setup.read_training_inputs = hang_while_reading
cli.main()
"""


def test_watchdog_writes_every_stack_and_exits_70_if_a_phase_does_not_end(tmp_path: Path) -> None:
    ended = run_python("-c", STUCK, "in_python", tmp_path / "crash")
    assert ended.returncode == 70, ended.stderr
    written = (tmp_path / "crash" / "host_3.txt").read_text()
    for text in (ended.stderr, written):
        assert "watchdog: host 3 has been in phase rollout of step 5 for 1 s, longer than " in text
        assert "2 x watchdog.phase_s = 0.7" in text
        assert "in in_python" in text


def test_the_watchdog_ends_a_run_that_hangs_during_startup(config: Path) -> None:
    ended = run_python("-c", STUCK_RUN, "train", "--config", config, *settings("watchdog.phase_s=1"))
    assert ended.returncode == 70, ended.stderr
    for text in (ended.stderr, (run_of(config) / "crash" / "host_0.txt").read_text()):
        assert "host 0 has been in phase compile for " in text and "in hang_while_reading" in text


def test_hosts_exit_with_the_code_of_a_host_that_hangs_or_fails(tmp_path: Path) -> None:
    ended = run_python("-c", STUCK_ELSEWHERE, tmp_path / "crash", "stuck", "host 1 has been in phase reward")
    assert ended.returncode == 70, ended.stderr
    assert "host 0 has been in phase report for " in ended.stderr
    assert "; host 1 has been in phase reward. The stacks" in (tmp_path / "crash" / "host_0.txt").read_text()
    ended = run_python("-c", STUCK_ELSEWHERE, tmp_path / "crash", "leaving", "no idea")
    assert ended.returncode == 1, ended.stderr
    assert "host 1 has failed, so this host exits: no idea" in ended.stderr


def test_watchdog_ends_a_process_whose_interpreter_is_blocked(tmp_path: Path) -> None:
    ended = run_python("-c", STUCK, "in_c_without_python", tmp_path / "crash")
    assert ended.returncode == 1, ended.stderr
    assert "in in_c_without_python" in ended.stderr
