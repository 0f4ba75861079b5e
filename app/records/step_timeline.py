"""What training and each rollout worker did while a step ran, as `timeline.jsonl` has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class PhaseTime(NamedTuple):
    """A phase of the step, in seconds since it began."""

    name: str
    start_s: float
    end_s: float


class SegmentTime(NamedTuple):
    """A segment of a rollout worker, in seconds since the step began: below 0 if it began before."""

    worker: str
    start_s: float
    end_s: float
    num_rows: int
    """Rows that decoded in it."""
    num_slots: int


@dataclass(frozen=True)
class StepTimeline:
    """The phases of a step, and the segments that ended since the step before."""

    step: int
    unix_s: float
    """When the step began."""
    phases: tuple[PhaseTime, ...]
    segments: tuple[SegmentTime, ...]

    @property
    def duration_s(self) -> float:
        """Seconds until its last phase ended."""
        return max((phase.end_s for phase in self.phases), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """Returns a line of the file; times are rounded to 0.1 ms."""
        phases, segments = ([_rounded(one) for one in part] for part in (self.phases, self.segments))
        return {"step": self.step, "time/unix_s": round(self.unix_s, 4), "phases": phases, "segments": segments}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> StepTimeline:
        """Raises KeyError, TypeError or ValueError if the line is none of this file."""
        phases = tuple(PhaseTime(*one) for one in line["phases"])
        segments = tuple(SegmentTime(*one) for one in line["segments"])
        return cls(int(line["step"]), float(line["time/unix_s"]), phases, segments)


def _rounded(span: PhaseTime | SegmentTime) -> list[Any]:
    return [round(value, 4) if isinstance(value, float) else value for value in span]
