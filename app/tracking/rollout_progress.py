"""Progress of a rollout: a progress bar on a terminal, otherwise a line every ten seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, Progress, TextColumn

from app.records.sample import Sample
from app.rollout.scheduling.sample_states import SampleTable
from app.tracking.console import num_done, rollout_status, stderr_console

REDRAW_INTERVAL_S = 0.1
LOG_INTERVAL_S = 10.0
"""Interval between log lines if there is no terminal."""


class RolloutProgress:
    """Shows the progress of one rollout.

    Args:
        enabled: whether to show anything.
        clock: returns a monotonic time in seconds.
    """

    def __init__(self, *, num_samples: int, enabled: bool = True, clock: Callable[[], float] = time.monotonic):
        self._num_samples = num_samples
        self._console = stderr_console(enabled=enabled)
        self._clock = clock
        self._live = self._console.is_terminal
        self._next = clock() + (0.0 if self._live else LOG_INTERVAL_S)
        self._first: tuple[float, int] | None = None
        """Time and number of tokens at the first count."""
        self._progress = Progress(
            TextColumn("rollout"),
            BarColumn(),
            TextColumn("{task.fields[status]}"),
            console=self._console,
            disable=not self._live,
            transient=True,
        )
        self._task = self._progress.add_task("rollout", total=num_samples, status="")

    def __enter__(self) -> RolloutProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def print_line(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def update_rollout(self, table: SampleTable) -> None:
        """Shows the state of a scheduled rollout after an event."""
        if self._is_due():
            self._show(num_done(table), sum(entry.num_tokens for entry in table), rollout_status(table))

    def track(self, samples: Iterator[Sample]) -> Iterator[Sample]:
        """Yields the samples of a rollout without a scheduler, and shows how many are done."""
        num_tokens = 0
        for number, sample in enumerate(samples, start=1):
            num_tokens += len(sample.completion_ids)
            if self._is_due():
                self._show(number, num_tokens, f"{number} of {self._num_samples} done")
            yield sample

    def _is_due(self) -> bool:
        return self._first is None or self._clock() >= self._next

    def _show(self, num_done: int, num_tokens: int, status: str) -> None:
        now = self._clock()
        start, before = self._first = self._first or (now, num_tokens)
        rate = f"  {(num_tokens - before) / (now - start):,.0f} tokens/s" if now > start else ""
        if self._live:
            self._progress.update(self._task, completed=num_done, status=status + rate)
            self._next = now + REDRAW_INTERVAL_S
        elif now >= self._next:
            self.print_line(f"rollout: {status}{rate}")
            self._next = now + LOG_INTERVAL_S
