"""A soft limit on length: the last tokens before the hard one cost more and more."""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.records.sample import Sample
from settings.schema.reward import OVERLONG


@dataclass(frozen=True, slots=True)
class OverlongPenalty:
    """Of a completion by its tokens: 0 up to `longest - buffer`, from there falling to `-most` at `longest`.

    Source: Yu et al. 2025 (DAPO), eq. 13, which has most = 1.
    """

    longest: int
    """`rollout.max_new_tokens`."""
    buffer: int
    """Tokens over which it falls."""
    most: float

    def of(self, num_tokens: int) -> float:
        beyond = min(max(num_tokens - (self.longest - self.buffer), 0), self.buffer)
        return 0.0 - self.most * beyond / self.buffer

    def added(self, sample: Sample) -> Sample:
        """The sample with the penalty among its rewards and in their sum; untouched where it has no reward."""
        if sample.reward is None:
            return sample
        penalty = self.of(len(sample.completion_ids))
        return replace(sample, rewards={**(sample.rewards or {}), OVERLONG: penalty}, reward=sample.reward + penalty)
