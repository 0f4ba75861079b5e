"""Which of the prompts of `grpo rollout` each host samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import jax

from app.distributed.lockstep import host_run, longest_run
from app.records.sample import Prompt
from settings import Settings


@dataclass(frozen=True)
class Round:
    """`rollout.prompts_per_step` prompts for each host, as a step of training has them; of the last, what is left."""

    own: range
    """This host's, by their places in the file."""
    longest: int
    """How many the host has that has most."""


@dataclass(frozen=True)
class Work:
    """Which of the prompts this host samples: a run of every round."""

    prompts: Sequence[Prompt]
    rounds: Sequence[Round]
    group_size: int

    @classmethod
    def of(cls, prompts: Sequence[Prompt], settings: Settings) -> Work:
        size = settings.rollout.prompts_per_step * jax.process_count()
        rounds = []
        for first in range(0, len(prompts), size):
            count = min(size, len(prompts) - first)
            run = host_run(count)
            rounds.append(Round(range(first + run.start, first + run.stop), longest_run(count)))
        return cls(prompts, rounds, settings.rollout.group_size)

    @property
    def places(self) -> list[int]:
        """Of this host's prompts in the file."""
        return [place for one in self.rounds for place in one.own]

    @property
    def own(self) -> list[Prompt]:
        return [self.prompts[place] for place in self.places]

    @property
    def num_samples(self) -> int:
        """Of this host."""
        return len(self.places) * self.group_size

    def asked(self, one: Round) -> list[Prompt]:
        """As many on every host, in a round: its own, and others behind them whose samples do not count."""
        first = one.own.start
        return [self.prompts[place % len(self.prompts)] for place in range(first, first + one.longest)]

    def in_rounds(self, lines: Iterator[bytes]) -> Iterator[Iterator[bytes]]:
        """Lines of this host's samples, as they come, by rounds. Each is to be used up before the next."""
        for one in self.rounds:
            yield islice(lines, len(one.own) * self.group_size)
        # Who generates them sums up behind the last.
        assert next(lines, None) is None
