"""Token counts of a rollout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class RolloutCounters:
    """Counts of everything generated since the last `take`."""

    segments: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of all samples, as if each sample had its own prefill."""
    prefilled_tokens: int = 0
    """Prompt tokens actually prefilled, without padding."""
    recomputed_tokens: int = 0
    """Tokens processed again because suspended or preempted samples continued without their caches."""
    preempted_rows: int = 0
    """Times that a row gave its blocks up for older rows."""
    resumed_rows: int = 0
    """Rows that went on with their own blocks after their environment had answered."""
    rebuilt_rows: int = 0
    """Rows whose blocks others had got meanwhile, or whose observation was too long to be fed."""
    row_steps: int = 0
    """Rows times steps, also of known tokens: the number of tokens that could have been drawn."""
    generated_tokens: int = 0

    @classmethod
    def sum(cls, counters: Iterable[RolloutCounters]) -> RolloutCounters:
        return cls(*map(sum, zip(*(vars(part).values() for part in counters), strict=True)))

    def take(self) -> RolloutCounters:
        """Returns the counts and resets them to 0."""
        taken = RolloutCounters(**vars(self))
        self.__init__()
        return taken
