"""Ctrl-C and SIGTERM, on any host: once stops all of them with a checkpoint, twice stops the one at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import NamedTuple

import numpy as np

from app.distributed.cancellation import StoppedError
from app.distributed.collectives import gather_over_hosts, max_over_hosts
from app.distributed.status_board import StatusBoard

EXIT_CODES = {signal.SIGTERM: 75, signal.SIGINT: 130}
"""What the process exits with once it has saved: stopped early, interrupted."""

STOP_TOPIC = "stop"
"""The topic under which a host says that it was asked to stop."""

DUPLICATE_SIGNAL_S = 1.0
"""Signals that come so soon after the first are the same: a supervisor tells the program and its process group."""

EXIT_SENTINEL = 0
"""No signal has this number: it ends the watching thread."""


STOPPING_MESSAGE = "stopping with a checkpoint: a step that still generates is given up, one that learns is finished"
FINISHING_MESSAGE = "all steps are done, and what is left is written"
"""What a host says to a signal."""


class StopDecision(NamedTuple):
    exit_code: int
    """What every host stops with; 0 = none was asked to."""
    save_is_due: bool
    signaled_hosts: tuple[int, ...]
    """The hosts that have got a signal."""


class PreemptionHandler:
    """A context in which signals are noted, for generation to read in its segments and for the loop between steps.

    A thread notes them: Python runs a signal's handler only between two instructions of the main thread, which
    may stand for minutes inside one compiled program, and it would run it once for two signals.
    """

    def __init__(self, status_board: StatusBoard) -> None:
        self.exit_code = 0
        """Of the first signal here; 0 while there was none."""
        self._status_board = status_board
        self._signaled_at = 0.0
        self.all_steps_done = False
        """Then a signal changes nothing any more: what is left is written."""

    def __enter__(self) -> PreemptionHandler:
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)  # set_wakeup_fd demands it
        self._thread = threading.Thread(target=self._watch, args=(reading,), name="interrupts", daemon=True)
        self._thread.start()
        self._handlers_before = {number: signal.signal(number, _no_op_handler) for number in EXIT_CODES}
        self._descriptor_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._descriptor_before)
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        os.write(self._writing, bytes([EXIT_SENTINEL]))
        self._thread.join()
        os.close(self._writing)

    def stop_requested(self) -> bool:
        """Whether any host is known here to have been asked to stop. From any thread, and at once."""
        return bool(self._status_board.read(STOP_TOPIC))

    def sync_stop_decision(self, *, save_is_due: bool = False) -> StopDecision:
        """What all hosts do now, where any of them was asked to stop or finds that a save is due.

        All hosts call it at the same places.
        """
        hosts = gather_over_hosts(np.asarray([self.exit_code, save_is_due]))
        exit_code, due = hosts.max(axis=0).tolist()
        return StopDecision(exit_code, bool(due), tuple(np.flatnonzero(hosts[:, 0]).tolist()))

    def _watch(self, read_fd: int) -> None:
        with open(read_fd, "rb", buffering=0) as numbers:
            while (number := numbers.read(1)[0]) != EXIT_SENTINEL:
                self._handle_signal(number)

    def _handle_signal(self, number: int) -> None:
        if number not in EXIT_CODES:
            return
        if self.exit_code:
            if time.monotonic() - self._signaled_at < DUPLICATE_SIGNAL_S:
                return
            # The second time a person means it: no clean-up, nothing half-written survives a rename.
            os._exit(EXIT_CODES[signal.SIGINT])
        self._signaled_at = time.monotonic()
        self.exit_code = EXIT_CODES[signal.Signals(number)]
        # Not before: whoever hears of it asks every host for its exit code.
        self._status_board.post(STOP_TOPIC, signal.Signals(number).name)
        comes = FINISHING_MESSAGE if self.all_steps_done else STOPPING_MESSAGE
        print(f"\n{comes}; once more stops at once", file=sys.stderr, flush=True)


def _no_op_handler(number: int, frame: FrameType | None) -> None:
    """Only a signal that has a handler reaches the thread."""


@contextmanager
def cancellation_barrier() -> Iterator[None]:
    """A part of the program in which this host generates. All hosts go through it.

    Raises:
        StoppedError: on every host, where generation was stopped on any.
    """
    stopped = None
    try:
        yield
    except StoppedError as error:
        stopped = error
    if max_over_hosts(np.asarray(stopped is not None)):
        raise stopped or StoppedError
