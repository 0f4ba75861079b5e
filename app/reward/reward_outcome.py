"""The outcome of a reward function for a sample: a value, an abstention, or a failure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """The reason why a function failed to return a value."""

    kind: str
    """`raised`, `value` (not a finite number), `length` (of a list), `timeout`, `cpu`, `memory`, `exit` (its process
    ended), `no reward` (every function abstained), `too long` or `template` (unreadable for a reward model)."""
    text: str
    """One line of text for people to read."""


@dataclass(frozen=True, slots=True)
class RewardOutcome:
    """A value or a failure; with neither, the function abstained."""

    value: float | None = None
    failure: RewardFailure | None = None
    extras: Mapping[str, float] = field(default_factory=dict)
    """Additional metrics to log."""

    @property
    def abstained(self) -> bool:
        return self.value is None and self.failure is None
