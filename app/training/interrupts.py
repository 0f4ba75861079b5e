"""Ctrl-C and SIGTERM: once finishes the step and saves, twice stops at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from app.mesh.placement import max_over_hosts

EXIT_CODES = {signal.SIGTERM: 75, signal.SIGINT: 130}
"""What the process exits with once it has saved: stopped early, interrupted."""

CLOSED = 0
"""No signal has this number: it ends the watching thread."""


class Agreement(NamedTuple):
    exit_code: int
    """What every host stops with; 0 = none was asked to."""
    save_is_due: bool


class Interrupts:
    """A context in which signals are noted, for the loop to read between steps.

    A thread notes them: Python runs a signal's handler only between two instructions of the main thread, which
    may stand for minutes inside one compiled program, and it would run it once for two signals.

    Where several processes train together SIGTERM is left to JAX, which tells all of them when one is to go; a
    handler of ours would take that notice away.
    """

    def __init__(self) -> None:
        self.exit_code = 0
        """Of the first signal; 0 while there was none."""
        self._numbers = EXIT_CODES if jax.process_count() == 1 else {signal.SIGINT: EXIT_CODES[signal.SIGINT]}

    def __enter__(self) -> Interrupts:
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)  # set_wakeup_fd demands it
        self._thread = threading.Thread(target=self._watch, args=(reading,), name="interrupts", daemon=True)
        self._thread.start()
        self._handlers_before = {number: signal.signal(number, _noted_elsewhere) for number in self._numbers}
        self._descriptor_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._descriptor_before)
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        os.write(self._writing, bytes([CLOSED]))
        self._thread.join()
        os.close(self._writing)

    def agreed(self, step: int, *, save_is_due: bool = False) -> Agreement:
        """What all hosts do after this step, where any of them was asked to stop or finds that a save is due.

        All hosts call it at every step.
        """
        preempted = jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step)
        own = EXIT_CODES[signal.SIGTERM] if preempted else self.exit_code
        exit_code, due = max_over_hosts(np.asarray([own, save_is_due])).tolist()
        return Agreement(exit_code, bool(due))

    def _watch(self, reading: int) -> None:
        with open(reading, "rb", buffering=0) as numbers:
            while (number := numbers.read(1)[0]) != CLOSED:
                self._note(number)

    def _note(self, number: int) -> None:
        if number not in self._numbers:
            return
        if self.exit_code:
            # The second time a person means it: no clean-up, nothing half-written survives a rename.
            os._exit(EXIT_CODES[signal.SIGINT])
        self.exit_code = self._numbers[signal.Signals(number)]
        print("\nstopping after this step, with a checkpoint; once more stops at once", file=sys.stderr, flush=True)


def _noted_elsewhere(number: int, frame: FrameType | None) -> None:
    """Only a signal that has a handler reaches the thread."""
