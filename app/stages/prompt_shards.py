"""The assignment of prompts to hosts in `grpo rollout`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import jax

from app.distributed.collective_files import host_slice
from app.records.sample import Prompt
from settings import Settings


@dataclass(frozen=True)
class PromptShard:
    """The prompts assigned to this host: a contiguous part of every round."""

    prompts: Sequence[Prompt]
    rounds: Sequence[range]
    """Indices of this host's prompts in each round: `rollout.prompts_per_step` prompts for each host, as in a training
    step; the last may be smaller."""
    group_size: int

    @classmethod
    def from_prompts(cls, prompts: Sequence[Prompt], settings: Settings) -> PromptShard:
        size = settings.rollout.prompts_per_step * jax.process_count()
        rounds = []
        for first in range(0, len(prompts), size):
            count = min(size, len(prompts) - first)
            run = host_slice(count)
            rounds.append(range(first + run.start, first + run.stop))
        return cls(prompts, rounds, settings.rollout.group_size)

    @property
    def prompt_indices(self) -> list[int]:
        """Indices of this host's prompts in the file."""
        return [place for one in self.rounds for place in one]

    @property
    def host_prompts(self) -> list[Prompt]:
        return [self.prompts[place] for place in self.prompt_indices]

    @property
    def num_samples(self) -> int:
        """Number of samples of this host."""
        return len(self.prompt_indices) * self.group_size

    def split_by_round(self, lines: Iterator[bytes]) -> Iterator[Iterator[bytes]]:
        """Yields the lines of this host's samples, round by round. Consume each round before the next."""
        for one in self.rounds:
            yield islice(lines, len(one) * self.group_size)
        # Resumes the generator of the lines once more, because it finishes its work after the last line.
        assert next(lines, None) is None
