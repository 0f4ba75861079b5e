"""Ctrl-C and SIGTERM: once finishes the step and saves, twice stops at once."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType, TracebackType

EXIT_INTERRUPTED = 130
EXIT_STOPPED_EARLY = 75


class Interrupts:
    """A context in which signals set a flag that the loop reads between steps."""

    def __init__(self) -> None:
        self.exit_code: int | None = None
        """What the process should exit with once it has saved; None while nothing was asked."""
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._asked)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self.exit_code is not None:
            # The second time a person means it: no clean-up, nothing half-written survives a rename.
            os._exit(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_STOPPED_EARLY)
        self.exit_code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_STOPPED_EARLY
        print(
            "\nstopping after this step, with a checkpoint; once more stops at once",
            file=sys.stderr,
            flush=True,
        )
