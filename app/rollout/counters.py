"""Counts of the tokens, rows and segments of a rollout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class RolloutCounters:
    """Counts of the work done since the last `take`."""

    segments: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of all samples, as if each sample had its own prefill."""
    prefilled_tokens: int = 0
    """Prompt tokens actually prefilled, without padding."""
    recomputed_tokens: int = 0
    """Tokens processed again because suspended or preempted samples continued without their caches."""
    preempted_rows: int = 0
    """Number of preemptions: rows that lost their KV blocks to older rows."""
    resumed_rows: int = 0
    """Number of times that a row continued with its KV cache after its environment had answered."""
    rebuilt_rows: int = 0
    """Number of times that an answered row's cache was rebuilt, because other rows had taken its blocks or the
    observation was too long to be fed token by token."""
    row_steps: int = 0
    """Rows times decode steps, including idle slots and forced tokens; never less than the number of sampled tokens."""
    generated_tokens: int = 0

    @classmethod
    def sum(cls, counters: Iterable[RolloutCounters]) -> RolloutCounters:
        return cls(*map(sum, zip(*(vars(part).values() for part in counters), strict=True)))

    def take(self) -> RolloutCounters:
        """Returns the counts and resets them to 0."""
        taken = RolloutCounters(**vars(self))
        self.__init__()
        return taken
