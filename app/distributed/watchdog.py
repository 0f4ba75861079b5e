"""Ends a run that is stuck, saying where: a heartbeat finds processes that are dead, and none that wait for ever."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from app.distributed.shutdown import EXITING_TOPIC, exit_delay_s
from app.distributed.status_board import StatusBoard
from settings.schema.watchdog import WatchdogSettings as Limits

EXIT_CODE = 70
STDERR_FD = 2
"""Its descriptor: whoever is stuck may hold the lock of `sys.stderr`, or of the board that stands in for it."""
STUCK_TOPIC = "stuck"
"""The topic under which hosts say so."""
POLL_INTERVAL_S = 0.5
"""How often the clock is looked at."""
HARD_EXIT_DELAY_S = 10.0
"""After so many seconds more the process is ended from C, with exit code 1: Python code does not run any more."""

WAIT_PHASE = "wait"
"""A phase without a limit: this host is done, and waits for others, who have limits of their own."""

LIMIT_PHASES = {"advantage": "update", "report": "save"}
"""Phase -> whose limit it has, where it has none of its own."""


class ActivePhase(NamedTuple):
    """One phase of one step, from its beginning on."""

    phase: str
    step: int
    since: float
    limit_s: float | None
    setting_name: str
    """Its limit's name."""


class Watchdog:
    """A context. Whoever begins a phase says so; a thread finds out when it does not end.

    Args:
        folder: where the stacks go, beside stderr.
        bulletin: which tells the other hosts, so that all of them show where they are.
    """

    def __init__(self, limits: Limits, crash_dir: Path, status_board: StatusBoard):
        self.step = 0
        """The one that is under way; 0 before the first."""
        self._limits = limits
        self._crash_dir = crash_dir
        self._status_board = status_board
        self._seen: set[str] = set()
        self._active_phase: ActivePhase | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self.enter_phase("compile")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()
        self._thread.join()

    def enter_phase(self, phase: str) -> None:
        """A phase begins, and the one before it is over."""
        section = LIMIT_PHASES.get(phase, phase.split("_")[0])
        setting, allowed = (
            f"watchdog.{section}_s",
            None if phase == WAIT_PHASE else getattr(self._limits, f"{section}_s"),
        )
        if phase not in self._seen and section != "compile":
            setting = f"{setting} + watchdog.compile_s"
            compile_s = self._limits.compile_s
            allowed = None if allowed is None or compile_s is None else allowed + compile_s
        self._seen.add(phase)
        self._active_phase = ActivePhase(phase, self.step, time.monotonic(), allowed, setting)
        if allowed is None:
            faulthandler.cancel_dump_traceback_later()
        else:
            faulthandler.dump_traceback_later(allowed + HARD_EXIT_DELAY_S, exit=True, file=STDERR_FD)

    def _watch(self) -> None:
        while not self._closed.wait(POLL_INTERVAL_S):
            current = self._active_phase
            assert current is not None
            seconds = time.monotonic() - current.since
            of_step = f" of step {current.step}" if current.step else ""
            where = f"in phase {current.phase}{of_step} for {seconds:.0f} s"
            if current.limit_s is not None and seconds > current.limit_s:
                self._dump_and_exit(
                    f"has been {where}, longer than {current.setting_name} = {current.limit_s:g}", broadcasts=True
                )
            for told in self._posts_of_other_hosts(STUCK_TOPIC).values():
                self._dump_and_exit(f"has been {where}; {told}", broadcasts=False)
            for host, reason in self._posts_of_other_hosts(EXITING_TOPIC).items():
                self._exit_with_host(host, reason)

    def _posts_of_other_hosts(self, topic: str) -> dict[int, str]:
        return {host: told for host, told in self._status_board.read(topic).items() if host != self._status_board.host}

    def _exit_with_host(self, host: int, reason: str) -> None:
        """Ends this process, which waits for one that leaves, and would until the heartbeat tells of it."""
        with suppress(OSError):
            os.write(STDERR_FD, f"\nhost {host} has failed, so this one ends: {reason}\n".encode())
        time.sleep(exit_delay_s(self._status_board, broadcasts=False))
        os._exit(1)

    def _dump_and_exit(self, reason: str, *, broadcasts: bool) -> None:
        """Shows every thread's stack, and ends this process."""
        # Even a disk that hangs, too, must not keep it from ending.
        faulthandler.dump_traceback_later(HARD_EXIT_DELAY_S, exit=True, file=STDERR_FD)
        sentence = f"host {self._status_board.host} {reason}"
        text = f"\nwatchdog: {sentence}. Where its threads are follows; exit code {EXIT_CODE}\n"
        with suppress(OSError):
            os.write(STDERR_FD, text.encode())
        faulthandler.dump_traceback(file=STDERR_FD, all_threads=True)
        if broadcasts:
            self._status_board.post(STUCK_TOPIC, sentence)
        with suppress(OSError):
            self._crash_dir.mkdir(parents=True, exist_ok=True)
            with (self._crash_dir / f"host_{self._status_board.host}.txt").open("w", encoding="utf-8") as file:
                _write_stacks(file, text)
        time.sleep(exit_delay_s(self._status_board, broadcasts=broadcasts))
        os._exit(EXIT_CODE)


def _write_stacks(file: IO[str], text: str) -> None:
    """With the stacks, and on the disk when this returns."""
    file.write(text)
    file.flush()
    faulthandler.dump_traceback(file=file, all_threads=True)
    os.fsync(file.fileno())
