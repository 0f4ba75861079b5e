"""Retention of checkpoints: when one is due by the clock, and which ones are kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from orbax.checkpoint.checkpoint_managers import PolicyCheckpointInfo, PreservationContext


class BestCheckpoint(NamedTuple):
    """The best checkpoint so far, or the start of the run as step 0 if no checkpoint is better."""

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
    mode: Literal["max", "min"] = "max"
    metric_values: dict[int, float] = field(default_factory=dict)
    """Step -> value of the metric, for evaluated checkpoints."""
    initial_value: float | None = None
    """Value of the metric before the first step; the best checkpoint is not worse."""

    def record_evaluation(self, step: int, evaluation: Mapping[str, float | None] | None) -> None:
        """Records the evaluation of a step's checkpoint, or None if it was not evaluated."""
        self.metric_values.pop(step, None)
        score = self.metric_value(evaluation)
        if score is not None:
            self.metric_values[step] = score

    def metric_value(self, evaluation: Mapping[str, float | None] | None) -> float | None:
        """Returns the value of the metric, or None if it is missing or not finite."""
        value = None if evaluation is None or self.metric is None else evaluation.get(self.metric)
        return value if value is not None and math.isfinite(value) else None

    def best_step(self, steps: Iterable[int]) -> int | None:
        """Returns the best of these steps, the earliest if several are equal.

        Returns None if none of them was evaluated, or if the start was better than all of them.
        """
        evaluated = [step for step in steps if step in self.metric_values]
        best = min(evaluated, key=lambda step: (self._sign * self.metric_values[step], step), default=None)
        if best is None or self.initial_value is None:
            return best
        return None if self._sign * (self.metric_values[best] - self.initial_value) > 0 else best

    def best_checkpoint(self, steps: Iterable[int]) -> BestCheckpoint | None:
        """Returns the best of these steps with its metric, or the start; None if neither was evaluated."""
        step = self.best_step(steps)
        value = self.initial_value if step is None else self.metric_values[step]
        return None if self.metric is None or value is None else BestCheckpoint(step or 0, self.metric, value)

    def is_better(self, evaluation: Mapping[str, float | None] | None, steps: Iterable[int]) -> bool:
        """Returns whether an evaluation is better than those of all these steps, and not worse than the start."""
        value, step = self.metric_value(evaluation), self.best_step(steps)
        best = self.initial_value if step is None else self.metric_values[step]
        if value is None or best is None:
            return value is not None
        gain = self._sign * (best - value)
        return gain > 0 or (gain == 0 and step is None)

    @property
    def _sign(self) -> int:
        return -1 if self.mode == "max" else 1

    def superseded(self, steps: Sequence[int]) -> int | None:
        """Returns the best of `steps` (ascending) without the last one, if nothing else keeps it; otherwise None."""
        best = self.best_step(steps[:-1])
        return best if best not in (*steps[-self.keep :], self.best_step(steps)) else None

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        """Returns whether to keep each of the `checkpoints`, which are in ascending order.

        Orbax calls it before saving the last one. The previous best is kept until the link points to its successor.
        """
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = {*steps[-self.keep :], self.best_step(steps), self.best_step(steps[:-1])}
        return [step in kept for step in steps]
