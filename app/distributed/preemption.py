"""Preemption: the first Ctrl-C, SIGTERM or SIGHUP saves a checkpoint and stops all hosts; a second exits at once."""

from __future__ import annotations

import errno
import os
import signal
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple

import numpy as np

from app.distributed.collectives import any_host, gather_over_hosts
from app.distributed.status_board import StatusBoard
from app.distributed.stop_check import StoppedError

EXIT_CODES = {signal.SIGTERM: 75, signal.SIGHUP: 75, signal.SIGINT: 130}
"""Maps a signal to the exit code after the checkpoint. SIGHUP means that the terminal or the connection was lost."""

STOP_TOPIC = "stop"
"""Topic of the notice posted by a host that has received a signal."""

DUPLICATE_SIGNAL_S = 1.0
"""Signals within this time count as one: a supervisor may signal both the process and its process group."""

NOHUP = (signal.SIGHUP, signal.SIG_IGN)
"""SIGHUP and its handler in a process started with `nohup`."""

EXIT_SENTINEL = 0
"""Byte that ends the watching thread; no signal has this number."""

STOPPING_MESSAGE = "stopping with a checkpoint: a step still generating is dropped, an update is completed"
"""Message printed when a signal arrives before the end of the last step."""
FINISHING_MESSAGE = "all steps are done; the remaining files are being written"
"""Message printed when a signal arrives after the last step."""


class StopDecision(NamedTuple):
    exit_code: int
    """Exit code of every host; 0 if no host has to stop."""
    save_is_due: bool
    end_is_asked: bool
    """Whether the caller of `sync_stop_decision` on any host asks to end the run."""
    signaled_hosts: tuple[int, ...]
    """Hosts that have received a signal."""


class PreemptionHandler:
    """Context manager that records signals. Generation checks for them between segments, the step loop between steps.

    A thread records them, because Python runs a signal handler only between two instructions of the main thread, which
    may spend minutes inside one compiled program, and may run it only once for two signals.
    """

    def __init__(self, status_board: StatusBoard) -> None:
        self.exit_code = 0
        """Exit code for the first signal on this host; 0 until one arrives."""
        self._status_board = status_board
        self._signaled_at = 0.0
        self.all_steps_done = False
        """Set after the last step; from then on, a first signal changes nothing."""

    def __enter__(self) -> PreemptionHandler:
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)  # required by set_wakeup_fd
        self._thread = threading.Thread(target=self._watch, args=(reading,), name="interrupts", daemon=True)
        self._thread.start()
        # Under `nohup`, the process ignores SIGHUP and continues without its terminal.
        handled = [number for number in EXIT_CODES if (number, signal.getsignal(number)) != NOHUP]
        # Handlers that do nothing, because a signal without a Python handler is not written to the pipe.
        self._handlers_before = {number: signal.signal(number, lambda *_: None) for number in handled}
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
        """Returns whether this host knows of a signal on any host. Thread-safe; does not block."""
        return bool(self._status_board.read(STOP_TOPIC))

    def sync_stop_decision(self, *, save_is_due: bool = False, end_is_asked: bool = False) -> StopDecision:
        """Returns the joint decision of all hosts: what is true on any host is true for all.

        All hosts must call it at the same points of the program.

        Args:
            save_is_due: whether this host wants to save a checkpoint.
            end_is_asked: whether the caller on this host asks to end the run.
        """
        hosts = gather_over_hosts([self.exit_code, save_is_due, end_is_asked])
        exit_code, due, asked = hosts.max(axis=0).tolist()
        return StopDecision(exit_code, bool(due), bool(asked), tuple(np.flatnonzero(hosts[:, 0]).tolist()))

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
            # Exits without clean-up, which is safe: files are renamed into place only once they are complete.
            os._exit(EXIT_CODES[signal.SIGINT])
        self._signaled_at = time.monotonic()
        self.exit_code = EXIT_CODES[signal.Signals(number)]
        # Posted only after exit_code is set: a host that reads the notice gathers the exit codes of all hosts.
        self._status_board.post(STOP_TOPIC, signal.Signals(number).name)
        if number == signal.SIGHUP:
            _redirect_lost_terminal()
        reply = FINISHING_MESSAGE if self.all_steps_done else STOPPING_MESSAGE
        print(f"\n{reply}; a second signal stops at once", file=sys.stderr, flush=True)


def _redirect_lost_terminal() -> None:
    """Redirects output to a lost terminal to /dev/null; writing it would raise before the checkpoint is saved."""
    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                with open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), descriptor)


@contextmanager
def cancellation_barrier() -> Iterator[None]:
    """Returns a context manager: if its block raises StoppedError on any host, every host raises it at its end.

    All hosts must enter it.
    """
    stopped = None
    try:
        yield
    except StoppedError as error:
        stopped = error
    if any_host(stopped is not None):
        raise stopped or StoppedError
