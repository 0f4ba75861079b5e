"""Retention of checkpoints: when one is due, and which ones are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from orbax.checkpoint.checkpoint_managers import PolicyCheckpointInfo, PreservationContext

from app.report.metrics_history import best_step, finite_metric


class BestCheckpoint(NamedTuple):
    """The best checkpoint so far; step 0 is the model before training, if no checkpoint is better."""

    step: int
    metric: str
    value: float


@dataclass
class SaveClock:
    """A timer that is due `every_minutes` after the last checkpoint; never due if `every_minutes` is None."""

    every_minutes: float | None
    clock: Callable[[], float]
    """Returns a monotonic time in seconds."""

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._last = self.clock()

    @property
    def is_due(self) -> bool:
        return self.every_minutes is not None and self.clock() - self._last >= 60 * self.every_minutes


@dataclass
class LatestAndBestPolicy:
    """A preservation policy for Orbax: keeps the newest `keep` checkpoints, and the best by one evaluation metric.

    Orbax's own BestN is not used: it prefers the later of two equals, fails if the separate item with its metrics is
    damaged, and deletes the previous best before a link can point to the new one.
    """

    keep: int
    metric: str | None = None
    """Name of the metric; if None, only the newest checkpoints are kept."""
    metric_values: dict[int, float] = field(default_factory=dict)
    """Maps each evaluated step to its value of the metric; step 0 is the model before training."""

    def record_evaluation(self, step: int, evaluation: Mapping[str, float | None] | None) -> None:
        """Records the evaluation at a step; None means that it was not evaluated, and removes an earlier value."""
        self.metric_values.pop(step, None)
        value = finite_metric(evaluation or {}, self.metric or "")
        if value is not None:
            self.metric_values[step] = value

    def best_step(self, steps: Iterable[int]) -> int | None:
        """Returns the best of these steps; None if none was evaluated or step 0 (before training) is better."""
        evaluated = {step: self.metric_values[step] for step in (0, *steps) if step in self.metric_values}
        return best_step(evaluated, self.metric) or None

    def best_checkpoint(self, steps: Iterable[int]) -> BestCheckpoint | None:
        """Returns the best of these steps and step 0 (before training) with its metric; None if none was evaluated."""
        step = self.best_step(steps) or 0
        value = self.metric_values.get(step)
        return None if self.metric is None or value is None else BestCheckpoint(step, self.metric, value)

    def superseded(self, steps: Sequence[int]) -> int | None:
        """Returns the best step before the last one if it need no longer be kept, else None. Steps are ascending."""
        best = self.best_step(steps[:-1])
        return best if best not in (*steps[-self.keep :], self.best_step(steps)) else None

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        """Returns whether to keep each of the `checkpoints`, which are in ascending order.

        Orbax calls it before it saves the last one. The previous best is kept until the link points to the new one.
        """
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = {*steps[-self.keep :], self.best_step(steps), self.best_step(steps[:-1])}
        return [step in kept for step in steps]
