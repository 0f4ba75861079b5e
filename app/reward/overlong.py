"""A soft limit on length: the last tokens before the hard one cost more and more."""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.records.sample import Sample
from settings.schema.reward import OVERLONG_REWARD


@dataclass(frozen=True, slots=True)
class OverlongPenalty:
    """Of a completion by its tokens: 0 up to `longest - buffer`, from there falling to `-most` at `longest`.

    Source: Yu et al. 2025 (DAPO), eq. 13, which has most = 1.
    """

    max_length: int
    """`rollout.max_new_tokens`."""
    buffer: int
    """Tokens over which it falls."""
    max_penalty: float

    def penalty_for(self, num_tokens: int) -> float:
        beyond = min(max(num_tokens - (self.max_length - self.buffer), 0), self.buffer)
        return 0.0 - self.max_penalty * beyond / self.buffer

    def apply(self, sample: Sample) -> Sample:
        """The sample with the penalty among its rewards and in their sum; untouched where it has no reward."""
        if sample.reward is None:
            return sample
        penalty = self.penalty_for(len(sample.completion_ids))
        return replace(
            sample, rewards={**(sample.rewards or {}), OVERLONG_REWARD: penalty}, reward=sample.reward + penalty
        )
