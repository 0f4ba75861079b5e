"""Simulates the slots of a worker and their costs: the slot engine without arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from app.rollout.slots.shape_buckets import SlotShapes
from scripts.simulate.cost_model import CostModel


class ProgramSizes(NamedTuple):
    """Sizes of an engine's programs, in ascending order."""

    batch: tuple[int, ...]
    """Numbers of rows; the last is the number of slots."""
    prompt: tuple[int, ...] = ()
    """Padded lengths of prompts; empty if prompts are not padded."""
    prefill_rows: tuple[int, ...] = (1,)
    """Numbers of prompts that are prefilled together."""
    recompute: tuple[int, ...] = ()
    """Padded lengths of rows whose cache is computed again."""

    @classmethod
    def of(cls, shapes: SlotShapes) -> ProgramSizes:
        return cls(shapes.batch_buckets, shapes.prompt_buckets, shapes.prefill_rows, shapes.recompute_buckets)


def _smallest_fitting(sizes: Sequence[int], size: int) -> int:
    return next((one for one in sizes if one >= size), size)


class SimulatedSlots:
    """The programs that rows run in, and the prompts that were prefilled. Methods return the seconds that they take."""

    def __init__(self, program_sizes: ProgramSizes, cost: CostModel):
        self.program_sizes = program_sizes
        self.cost = cost
        self._prefilled: set[str] = set()

    def admit(
        self, prompts: Mapping[str, int], *, num_fresh: int, recomputed: Iterable[int], copied: Iterable[int]
    ) -> float:
        """Admits rows.

        Args:
            prompts: tokens of each prompt whose samples start; those already prefilled are not prefilled again.
            num_fresh: number of rows that start.
            recomputed: tokens of each row whose cache is computed again by a prefill.
            copied: tokens of each row that comes with its cache.
        """
        sizes = (*self.program_sizes.prompt, *self.program_sizes.recompute)
        seconds = sum(self.cost.prefill(_smallest_fitting(sorted(sizes), tokens)) for tokens in recomputed)
        seconds += sum(map(self.cost.move, copied))
        if num_fresh:
            seconds += self._prefill({uid: tokens for uid, tokens in prompts.items() if uid not in self._prefilled})
            seconds += self.cost.admit(num_fresh)
        return seconds

    def _prefill(self, prompts: Mapping[str, int]) -> float:
        self._prefilled.update(prompts)
        by_size: dict[int, int] = {}
        for tokens in prompts.values():
            size = _smallest_fitting(self.program_sizes.prompt, tokens)
            by_size[size] = by_size.get(size, 0) + 1
        rows, seconds = self.program_sizes.prefill_rows, 0.0
        for size, count in by_size.items():
            whole, rest = divmod(count, rows[-1])
            seconds += whole * self.cost.prefill(rows[-1] * size)
            seconds += self.cost.prefill(_smallest_fitting(rows, rest) * size) if rest else 0.0
        return seconds

    def decode(self, steps: int, *, lengths: Sequence[int]) -> float:
        """Decodes rows, which now have `lengths` tokens of cache, in the smallest program."""
        size = _smallest_fitting(self.program_sizes.batch, len(lengths))
        longest = max(lengths) if self.cost.reads_to_longest else sum(lengths) / size
        growing = 1 if self.cost.reads_to_longest else len(lengths) / size
        # The mean of lengths that grow by a token at each step.
        return steps * self.cost.step(rows=size, cache_length=longest + growing * max(steps - 1, 0) / 2)
