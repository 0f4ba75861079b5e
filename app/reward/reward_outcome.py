"""What a reward function said of a sample: a value, nothing, or why it failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_TEXT_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """Why a function gave no value where it should have."""

    kind: str
    """`raised`, `value` (not a finite number), `length` (of a list), `timeout`, `cpu`, `memory`, `exit` (its process
    ended), `no reward` (every function abstained), `too long` or `template` (what a reward model cannot read)."""
    text: str
    """One line, for a person."""


@dataclass(frozen=True, slots=True)
class RewardOutcome:
    """Neither `value` nor `failure`: the function abstained."""

    value: float | None = None
    failure: RewardFailure | None = None
    extras: Mapping[str, float] = field(default_factory=dict)
    """Numbers to be logged beside the value."""

    @property
    def abstained(self) -> bool:
        return self.value is None and self.failure is None


def replace_control_characters(line: str) -> str:
    """The line without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)


def one_line(text: str) -> str:
    """The text as it may go to a terminal: one line, no control characters, not too long."""
    shown = replace_control_characters(" ".join(text[:2000].split()))
    return shown if len(shown) <= MAX_TEXT_CHARACTERS else f"{shown[: MAX_TEXT_CHARACTERS - 3]}..."
