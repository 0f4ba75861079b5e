"""When a checkpoint is due by the clock, and which checkpoints stay: the newest, and the best by an evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from orbax.checkpoint.checkpoint_managers import PolicyCheckpointInfo, PreservationContext


class BestCheckpoint(NamedTuple):
    """The best checkpoint so far."""

    step: int
    metric: str
    value: float


@dataclass
class SaveClock:
    """Whether so many minutes have passed since the last checkpoint; never where there is no such interval."""

    every_minutes: float | None
    clock: Callable[[], float]
    """Seconds, monotonic."""

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._last = self.clock()

    @property
    def is_due(self) -> bool:
        return self.every_minutes is not None and self.clock() - self._last >= 60 * self.every_minutes


@dataclass
class LatestAndBestPolicy:
    """A preservation policy for Orbax: the newest `keep` checkpoints, and the best by one metric of its evaluation.

    Not Orbax's own BestN: that one prefers the later of two equals, keeps its figures in an item of their own, which
    stops the program where it is damaged, and gives up the last best before anything can point at the new one.
    """

    keep: int
    metric: str | None = None
    """None: only the newest are kept."""
    mode: Literal["max", "min"] = "max"
    metric_values: dict[int, float] = field(default_factory=dict)
    """Step -> the metric, of the checkpoints that were evaluated."""

    def record_evaluation(self, step: int, evaluation: Mapping[str, float | None] | None) -> None:
        """What the checkpoint of a step says of its evaluation; None where there was none at that step."""
        self.metric_values.pop(step, None)
        score = self.metric_value(evaluation)
        if score is not None:
            self.metric_values[step] = score

    def metric_value(self, evaluation: Mapping[str, float | None] | None) -> float | None:
        """The finite value of the metric, where there is one."""
        value = None if evaluation is None or self.metric is None else evaluation.get(self.metric)
        return value if value is not None and math.isfinite(value) else None

    def best_step(self, steps: Iterable[int]) -> int | None:
        """The best of these steps, of equals the earliest; None where none of them was evaluated."""
        sign = -1 if self.mode == "max" else 1
        scored = [step for step in steps if step in self.metric_values]
        return min(scored, key=lambda step: (sign * self.metric_values[step], step), default=None)

    def best_checkpoint(self, steps: Iterable[int]) -> BestCheckpoint | None:
        """The best of these steps, with what makes it so."""
        step = self.best_step(steps)
        if step is None or self.metric is None:
            return None
        return BestCheckpoint(step, self.metric, self.metric_values[step])

    def is_better(self, evaluation: Mapping[str, float | None] | None, steps: Iterable[int]) -> bool:
        """Whether an evaluation beats those of all of these steps."""
        score, best = self.metric_value(evaluation), self.best_step(steps)
        if score is None or best is None:
            return score is not None
        return score > self.metric_values[best] if self.mode == "max" else score < self.metric_values[best]

    def superseded(self, steps: Sequence[int]) -> int | None:
        """The best before the newest of these steps (ascending), where only that still keeps it."""
        best = self.best_step(steps[:-1])
        return best if best not in (*steps[-self.keep :], self.best_step(steps)) else None

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        """Orbax asks as it begins to save the last of `checkpoints`, which are in ascending order.

        The best before that one stays for as long as somebody may be reading it as the best.
        """
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = {*steps[-self.keep :], self.best_step(steps), self.best_step(steps[:-1])}
        return [step in kept for step in steps]
