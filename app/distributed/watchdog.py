"""Ends a run that is stuck, saying where: a heartbeat finds processes that are dead, and none that wait for ever."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from app.distributed.shutdown import LEAVING, parting_s
from app.distributed.status_board import Bulletin
from settings.schema.watchdog import Watchdog as Limits

EXIT_CODE = 70
STDERR = 2
"""Its descriptor: whoever is stuck may hold the lock of `sys.stderr`, or of the board that stands in for it."""
STUCK = "stuck"
"""The topic under which hosts say so."""
LOOK_S = 0.5
"""How often the clock is looked at."""
LAST_RESORT_S = 10.0
"""After so many seconds more the process is ended from C, with exit code 1: Python code does not run any more."""

WAIT = "wait"
"""A phase without a limit: this host is done, and waits for others, who have limits of their own."""

SECTION_OF = {"advantage": "update", "report": "save"}
"""Phase -> whose limit it has, where it has none of its own."""


class Pass(NamedTuple):
    """One phase of one step, from its beginning on."""

    phase: str
    step: int
    since: float
    limit_s: float | None
    setting: str
    """Its limit's name."""


class Watchdog:
    """A context. Whoever begins a phase says so; a thread finds out when it does not end.

    Args:
        folder: where the stacks go, beside stderr.
        bulletin: which tells the other hosts, so that all of them show where they are.
    """

    def __init__(self, limits: Limits, folder: Path, bulletin: Bulletin):
        self.step = 0
        """The one that is under way; 0 before the first."""
        self._limits = limits
        self._folder = folder
        self._bulletin = bulletin
        self._seen: set[str] = set()
        self._pass: Pass | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self.enter("compile")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()
        self._thread.join()

    def enter(self, phase: str) -> None:
        """A phase begins, and the one before it is over."""
        section = SECTION_OF.get(phase, phase.split("_")[0])
        setting, allowed = f"watchdog.{section}_s", None if phase == WAIT else getattr(self._limits, f"{section}_s")
        if phase not in self._seen and section != "compile":
            setting = f"{setting} + watchdog.compile_s"
            compile_s = self._limits.compile_s
            allowed = None if allowed is None or compile_s is None else allowed + compile_s
        self._seen.add(phase)
        self._pass = Pass(phase, self.step, time.monotonic(), allowed, setting)
        if allowed is None:
            faulthandler.cancel_dump_traceback_later()
        else:
            faulthandler.dump_traceback_later(allowed + LAST_RESORT_S, exit=True, file=STDERR)

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_S):
            current = self._pass
            assert current is not None
            seconds = time.monotonic() - current.since
            of_step = f" of step {current.step}" if current.step else ""
            where = f"in phase {current.phase}{of_step} for {seconds:.0f} s"
            if current.limit_s is not None and seconds > current.limit_s:
                self._end(f"has been {where}, longer than {current.setting} = {current.limit_s:g}", tells=True)
            for told in self._of_others(STUCK).values():
                self._end(f"has been {where}; {told}", tells=False)
            for host, reason in self._of_others(LEAVING).items():
                self._follow(host, reason)

    def _of_others(self, topic: str) -> dict[int, str]:
        return {host: told for host, told in self._bulletin.read(topic).items() if host != self._bulletin.host}

    def _follow(self, host: int, reason: str) -> None:
        """Ends this process, which waits for one that leaves, and would until the heartbeat tells of it."""
        with suppress(OSError):
            os.write(STDERR, f"\nhost {host} has failed, so this one ends: {reason}\n".encode())
        time.sleep(parting_s(self._bulletin, tells=False))
        os._exit(1)

    def _end(self, what: str, *, tells: bool) -> None:
        """Shows every thread's stack, and ends this process."""
        # Even a disk that hangs, too, must not keep it from ending.
        faulthandler.dump_traceback_later(LAST_RESORT_S, exit=True, file=STDERR)
        sentence = f"host {self._bulletin.host} {what}"
        text = f"\nwatchdog: {sentence}. Where its threads are follows; exit code {EXIT_CODE}\n"
        with suppress(OSError):
            os.write(STDERR, text.encode())
        faulthandler.dump_traceback(file=STDERR, all_threads=True)
        if tells:
            self._bulletin.post(STUCK, sentence)
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / f"host_{self._bulletin.host}.txt").open("w", encoding="utf-8") as file:
                _write(file, text)
        time.sleep(parting_s(self._bulletin, tells=tells))
        os._exit(EXIT_CODE)


def _write(file: IO[str], text: str) -> None:
    """With the stacks, and on the disk when this returns."""
    file.write(text)
    file.flush()
    faulthandler.dump_traceback(file=file, all_threads=True)
    os.fsync(file.fileno())
