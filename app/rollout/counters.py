"""What a rollout costs, counted: the same counts for slots and for one batch to the end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class RolloutCounters:
    """Of all that was generated since the last `take`."""

    segments: int = 0
    prompt_tokens: int = 0
    """Of all samples, as if each had read its prompt itself."""
    prefilled_tokens: int = 0
    """Of prompts, padding left out."""
    recomputed_tokens: int = 0
    """Of suspended samples that went on without their caches."""
    row_steps: int = 0
    """Tokens that could have been drawn: rows times steps, those in which tokens were fed again among them."""
    generated_tokens: int = 0

    def count_segment(self, *, steps: int, num_rows: int, num_generated: int) -> None:
        self.segments += 1
        self.row_steps += steps * num_rows
        self.generated_tokens += num_generated

    @classmethod
    def sum(cls, counters: Iterable[RolloutCounters]) -> RolloutCounters:
        return cls(*map(sum, zip(*(vars(tally).values() for tally in counters), strict=True)))

    def take(self) -> RolloutCounters:
        """The counts, which start again from 0."""
        taken = RolloutCounters(**vars(self))
        self.__init__()
        return taken
