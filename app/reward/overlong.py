"""The soft length penalty of DAPO, which grows over the last tokens before the length limit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.records.sample import Sample
from settings.schema.reward import OVERLONG_REWARD


@dataclass(frozen=True, slots=True)
class OverlongPenalty:
    """A reward of 0 up to `max_length - buffer` tokens, falling linearly to `-max_penalty` at `max_length`.

    Source: Yu et al. 2025 (DAPO), eq. 13, with max_penalty = 1.
    """

    max_length: int
    """Value of `rollout.max_new_tokens`."""
    buffer: int
    """Number of tokens over which the reward falls."""
    max_penalty: float

    def penalty_for(self, num_tokens: int) -> float:
        beyond = min(max(num_tokens - (self.max_length - self.buffer), 0), self.buffer)
        return 0.0 - self.max_penalty * beyond / self.buffer

    def apply(self, sample: Sample) -> Sample:
        """Returns the sample with the penalty added to its rewards; unchanged if it has no reward."""
        if sample.reward is None:
            return sample
        penalty = self.penalty_for(len(sample.completion_ids))
        return replace(
            sample, rewards={**(sample.rewards or {}), OVERLONG_REWARD: penalty}, reward=sample.reward + penalty
        )
