"""Watchdog: ends a hanging run and shows where it hangs. JAX's heartbeat detects only dead processes."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from app.distributed.shutdown import EXITING_TOPIC, exit_delay_s
from app.distributed.status_board import StatusBoard

EXIT_CODE = 70
STDERR_FD = 2
"""File descriptor of stderr, written directly because a hanging thread may hold the lock of `sys.stderr`."""
STUCK_TOPIC = "stuck"
"""Topic of the notice posted by a hanging host."""
POLL_INTERVAL_S = 0.5
"""Interval between checks of the current phase and of notices."""
HARD_EXIT_DELAY_S = 10.0
"""Time after which C code ends the process, with exit code 1, if Python code no longer runs."""

COMPILE_PHASE = "compile"
"""Phase of loading and compiling, before the first step or evaluation."""
WAIT_PHASE = "wait"
"""Phase without a limit: this host has finished and waits for the others, whose phases have their own limits."""


class ActivePhase(NamedTuple):
    """The current phase of a step."""

    phase: str
    step: int
    since: float
    limit_s: float | None
    limit_name: str
    """Name of the limit in messages, such as `2 x watchdog.phase_s`."""


class Watchdog:
    """Context manager whose thread ends the process if a phase exceeds its limit.

    Args:
        phase_s: limit of a phase (`watchdog.phase_s`); None = no limit. Doubled for the first pass, which compiles.
        crash_dir: directory for the stack traces, in addition to stderr.
        status_board: board for the notice that makes the other hosts show their stack traces too.
    """

    def __init__(self, phase_s: float | None, crash_dir: Path, status_board: StatusBoard):
        self.step = 0
        """Current step; 0 before the first."""
        self._phase_s = phase_s
        self._crash_dir = crash_dir
        self.status_board = status_board
        self._seen: set[str] = set()
        self._active_phase: ActivePhase | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self.enter_phase(COMPILE_PHASE)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()
        self._thread.join()

    def enter_phase(self, phase: str) -> None:
        """Starts a phase, which ends the current one; see `phase_s` for its limit."""
        allowed, name = None if phase == WAIT_PHASE else self._phase_s, "watchdog.phase_s"
        if allowed is not None and phase != COMPILE_PHASE and phase not in self._seen:
            allowed, name = 2 * allowed, f"2 x {name}"
        self._seen.add(phase)
        self._active_phase = ActivePhase(phase, self.step, time.monotonic(), allowed, name)
        if allowed is None:
            faulthandler.cancel_dump_traceback_later()
        else:
            faulthandler.dump_traceback_later(allowed + HARD_EXIT_DELAY_S, exit=True, file=STDERR_FD)

    def _watch(self) -> None:
        while not self._closed.wait(POLL_INTERVAL_S):
            current = self._active_phase
            assert current is not None
            seconds = time.monotonic() - current.since
            step_text = f" of step {current.step}" if current.step else ""
            where = f"in phase {current.phase}{step_text} for {seconds:.0f} s"
            if current.limit_s is not None and seconds > current.limit_s:
                self._dump_and_exit(
                    f"has been {where}, longer than {current.limit_name} = {current.limit_s:g}", broadcasts=True
                )
            for notice in self.status_board.read_others(STUCK_TOPIC).values():
                self._dump_and_exit(f"has been {where}; {notice}", broadcasts=False)
            for host, reason in self.status_board.read_others(EXITING_TOPIC).items():
                # Otherwise this host would wait for that one until the heartbeat fails.
                with suppress(OSError):
                    os.write(STDERR_FD, f"\nhost {host} has failed, so this host exits: {reason}\n".encode())
                time.sleep(exit_delay_s(self.status_board, broadcasts=False))
                os._exit(1)

    def _dump_and_exit(self, reason: str, *, broadcasts: bool) -> None:
        """Writes the stack of every thread and ends this process."""
        # A disk that hangs must not prevent the exit.
        faulthandler.dump_traceback_later(HARD_EXIT_DELAY_S, exit=True, file=STDERR_FD)
        sentence = f"host {self.status_board.host} {reason}"
        text = f"\nwatchdog: {sentence}. The stacks of its threads follow; exit code {EXIT_CODE}\n"
        with suppress(OSError):
            os.write(STDERR_FD, text.encode())
        faulthandler.dump_traceback(file=STDERR_FD, all_threads=True)
        if broadcasts:
            self.status_board.post(STUCK_TOPIC, sentence)
        with suppress(OSError):
            self._crash_dir.mkdir(parents=True, exist_ok=True)
            with (self._crash_dir / f"host_{self.status_board.host}.txt").open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                faulthandler.dump_traceback(file=file, all_threads=True)
                os.fsync(file.fileno())
        time.sleep(exit_delay_s(self.status_board, broadcasts=broadcasts))
        os._exit(EXIT_CODE)
