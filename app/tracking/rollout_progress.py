"""Where the samples of a rollout are, while it runs: a line that is rewritten on a terminal, else one now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from app.records.sample import Sample
from app.rollout.scheduling.sample_states import Ledger
from app.tracking.console import num_done, standing

REDRAWN_EVERY_S = 0.1
TOLD_EVERY_S = 10.0
"""Where there is no terminal."""


class RolloutProgress:
    """Of one rollout.

    Args:
        shown: else nothing is told.
        clock: seconds.
    """

    def __init__(self, *, num_samples: int, shown: bool = True, clock: Callable[[], float] = time.monotonic):
        self._num_samples = num_samples
        self._console = Console(stderr=True, highlight=False, quiet=not shown)
        self._clock = clock
        self._live = self._console.is_terminal
        self._next = clock() + (0.0 if self._live else TOLD_EVERY_S)
        self._first: tuple[float, int] | None = None
        """When the first tokens were counted, and how many."""
        self._progress = Progress(
            TextColumn("rollout"),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
            disable=not self._live,
            transient=True,
        )
        self._task = self._progress.add_task("rollout", total=num_samples, figures="")

    def __enter__(self) -> RolloutProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def watch(self, ledger: Ledger) -> None:
        """After an event of a scheduled rollout."""
        if self._is_due():
            self._tell(num_done(ledger), sum(entry.num_tokens for entry in ledger), standing(ledger))

    def count(self, samples: Iterator[Sample]) -> Iterator[Sample]:
        """Of a rollout that is not scheduled, in order, as they stream past."""
        num_tokens = 0
        for number, sample in enumerate(samples, start=1):
            num_tokens += len(sample.completion_ids)
            if self._is_due():
                self._tell(number, num_tokens, f"{number} of {self._num_samples} done")
            yield sample

    def _is_due(self) -> bool:
        return self._first is None or self._clock() >= self._next

    def _tell(self, num_done: int, num_tokens: int, where: str) -> None:
        now = self._clock()
        begun, before = self._first = self._first or (now, num_tokens)
        rate = f"  {(num_tokens - before) / (now - begun):,.0f} tokens/s" if now > begun else ""
        if self._live:
            self._progress.update(self._task, completed=num_done, figures=where + rate)
            self._next = now + REDRAWN_EVERY_S
        elif now >= self._next:
            self.say(f"rollout: {where}{rate}")
            self._next = now + TOLD_EVERY_S
