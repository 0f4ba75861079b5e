"""Which of the prompts of `grpo rollout` each host samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import jax

from app.distributed.lockstep import host_shard, max_shard_size
from app.records.sample import Prompt
from settings import Settings


@dataclass(frozen=True)
class RolloutRound:
    """`rollout.prompts_per_step` prompts for each host, as a step of training has them; of the last, what is left."""

    prompt_indices: range
    """This host's, by their places in the file."""
    max_num_prompts: int
    """How many the host has that has most."""


@dataclass(frozen=True)
class PromptShard:
    """Which of the prompts this host samples: a run of every round."""

    prompts: Sequence[Prompt]
    rounds: Sequence[RolloutRound]
    group_size: int

    @classmethod
    def from_prompts(cls, prompts: Sequence[Prompt], settings: Settings) -> PromptShard:
        size = settings.rollout.prompts_per_step * jax.process_count()
        rounds = []
        for first in range(0, len(prompts), size):
            count = min(size, len(prompts) - first)
            run = host_shard(count)
            rounds.append(RolloutRound(range(first + run.start, first + run.stop), max_shard_size(count)))
        return cls(prompts, rounds, settings.rollout.group_size)

    @property
    def prompt_indices(self) -> list[int]:
        """Of this host's prompts in the file."""
        return [place for one in self.rounds for place in one.prompt_indices]

    @property
    def host_prompts(self) -> list[Prompt]:
        return [self.prompts[place] for place in self.prompt_indices]

    @property
    def num_samples(self) -> int:
        """Of this host."""
        return len(self.prompt_indices) * self.group_size

    def padded_prompts(self, rollout_round: RolloutRound) -> list[Prompt]:
        """As many on every host, in a round: its own, and others behind them whose samples do not count."""
        first = rollout_round.prompt_indices.start
        return [
            self.prompts[place % len(self.prompts)] for place in range(first, first + rollout_round.max_num_prompts)
        ]

    def split_by_round(self, lines: Iterator[bytes]) -> Iterator[Iterator[bytes]]:
        """Lines of this host's samples, as they come, by rounds. Each is to be used up before the next."""
        for one in self.rounds:
            yield islice(lines, len(one.prompt_indices) * self.group_size)
        # Who generates them sums up behind the last.
        assert next(lines, None) is None
