"""When a checkpoint is due by the clock, and which checkpoints stay: the newest, and the best by an evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from orbax.checkpoint.checkpoint_managers import PolicyCheckpointInfo, PreservationContext


class Best(NamedTuple):
    """The best checkpoint so far."""

    step: int
    metric: str
    value: float


@dataclass
class SaveClock:
    """Whether so many minutes have passed since the last checkpoint; never where there is no such interval."""

    every_minutes: float | None
    now: Callable[[], float]
    """Seconds, monotonic."""

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._last = self.now()

    @property
    def is_due(self) -> bool:
        return self.every_minutes is not None and self.now() - self._last >= 60 * self.every_minutes


@dataclass
class NewestAndBest:
    """A preservation policy for Orbax: the newest `keep` checkpoints, and the best by one metric of its evaluation.

    Not Orbax's own BestN: that one prefers the later of two equals, keeps its figures in an item of their own, which
    stops the program where it is damaged, and gives up the last best before anything can point at the new one.
    """

    keep: int
    metric: str | None = None
    """None: only the newest are kept."""
    mode: Literal["max", "min"] = "max"
    scores: dict[int, float] = field(default_factory=dict)
    """Step -> the metric, of the checkpoints that were evaluated."""

    def note(self, step: int, evaluation: Mapping[str, float | None] | None) -> None:
        """What the checkpoint of a step says of its evaluation; None where there was none at that step."""
        self.scores.pop(step, None)
        score = self.score(evaluation)
        if score is not None:
            self.scores[step] = score

    def score(self, evaluation: Mapping[str, float | None] | None) -> float | None:
        """The finite value of the metric, where there is one."""
        value = None if evaluation is None or self.metric is None else evaluation.get(self.metric)
        return value if value is not None and math.isfinite(value) else None

    def best(self, steps: Iterable[int]) -> int | None:
        """The best of these steps, of equals the earliest; None where none of them was evaluated."""
        sign = -1 if self.mode == "max" else 1
        scored = [step for step in steps if step in self.scores]
        return min(scored, key=lambda step: (sign * self.scores[step], step), default=None)

    def describe(self, steps: Iterable[int]) -> Best | None:
        """The best of these steps, with what makes it so."""
        step = self.best(steps)
        if step is None or self.metric is None:
            return None
        return Best(step, self.metric, self.scores[step])

    def is_better(self, evaluation: Mapping[str, float | None] | None, steps: Iterable[int]) -> bool:
        """Whether an evaluation beats those of all of these steps."""
        score, best = self.score(evaluation), self.best(steps)
        if score is None or best is None:
            return score is not None
        return score > self.scores[best] if self.mode == "max" else score < self.scores[best]

    def superseded(self, steps: Sequence[int]) -> int | None:
        """The best before the newest of these steps (ascending), where only that still keeps it."""
        best = self.best(steps[:-1])
        return best if best not in (*steps[-self.keep :], self.best(steps)) else None

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        """Orbax asks as it begins to save the last of `checkpoints`, which are in ascending order.

        The best before that one stays for as long as somebody may be reading it as the best.
        """
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = {*steps[-self.keep :], self.best(steps), self.best(steps[:-1])}
        return [step in kept for step in steps]
