"""Simulates the slots of a worker and their costs: the slot engine without arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from scripts.simulate.cost_model import CostModel


class ProgramSizes(NamedTuple):
    """Sizes of an engine's programs, in ascending order."""

    batch: tuple[int, ...]
    """Numbers of rows; the last is the number of slots."""
    cache: tuple[int, ...]
    """Cache lengths in tokens."""
    prompt: tuple[int, ...] = ()
    """Padded lengths of prompts; empty if prompts are not padded."""
    prefill_rows: tuple[int, ...] = (1,)
    """Numbers of prompts that are prefilled together."""


def _smallest_fitting(sizes: Sequence[int], size: int) -> int:
    return next((rung for rung in sizes if rung >= size), size)


class SimulatedSlots:
    """Rows that decode in programs of `size` rows with caches of `room` tokens.

    As in the engine, admission uses all slots, caches only grow, and programs with fewer rows have the full cache
    length. Methods return the seconds that they take.
    """

    def __init__(self, program_sizes: ProgramSizes, cost: CostModel):
        self.program_sizes = program_sizes
        self.cost = cost
        self.batch_size = program_sizes.batch[-1]
        self.cache_length = program_sizes.cache[0]
        self._pooled: set[str] = set()
        """Prompts in the pool."""

    def suspend(self) -> float:
        """Prepares for taking rows out."""
        return self._expand() + self._grow_cache(self.program_sizes.cache[-1])

    def admit(self, prompts: Mapping[str, int], *, num_fresh: int, recomputed: Iterable[int], num_copied: int) -> float:
        """Admits rows.

        Args:
            prompts: tokens of each prompt whose samples start; those not in the pool are prefilled first.
            num_fresh: number of rows that start.
            reread: tokens of each row whose cache is computed again by a prefill as long as the cache.
            num_copied: number of rows that come with their caches.
        """
        full, seconds = self.program_sizes.cache[-1], self._expand()
        for tokens in recomputed:
            num_copied += 1
            seconds += self.cost.prefill(full if self.program_sizes.prompt else tokens)
        if num_copied:
            seconds += self._grow_cache(full) + num_copied * self.cost.move(self.cache_length)
        if num_fresh:
            seconds += self._prefill({uid: tokens for uid, tokens in prompts.items() if uid not in self._pooled})
            seconds += self.cost.admit(num_fresh)
        return seconds

    def _prefill(self, prompts: Mapping[str, int]) -> float:
        self._pooled.update(prompts)
        by_rung: dict[int, int] = {}
        for tokens in prompts.values():
            rung = _smallest_fitting(self.program_sizes.prompt, tokens)
            by_rung[rung] = by_rung.get(rung, 0) + 1
        rows, seconds = self.program_sizes.prefill_rows, 0.0
        for rung, count in by_rung.items():
            whole, rest = divmod(count, rows[-1])
            seconds += whole * self.cost.prefill(rows[-1] * rung)
            seconds += self.cost.prefill(_smallest_fitting(rows, rest) * rung) if rest else 0.0
        return seconds

    def compact(self, num_rows: int) -> float:
        """Changes to the smallest program that holds this many rows."""
        size, seconds = _smallest_fitting(self.program_sizes.batch, num_rows), 0.0
        while self.batch_size > size:
            seconds += self._grow_cache(self.program_sizes.cache[-1])
            self.batch_size = max(rung for rung in self.program_sizes.batch if rung < self.batch_size)
            seconds += self.cost.copy(self.batch_size * self.cache_length)
        return seconds

    def grow_to_fit(self, rows: Iterable[tuple[int, int]]) -> tuple[int | None, float]:
        """Returns the steps until a cache is full (None: any number) and seconds; full caches are extended first.

        Args:
            rows: (tokens so far, maximum further tokens) of each row.
        """
        seconds, rows = 0.0, list(rows)
        while True:
            # The last token drawn is not fed, so it needs no room.
            short = [steps for length, left in rows if left > (steps := self.cache_length - length + 1)]
            if not short or min(short) > 0:
                return min(short, default=None), seconds
            seconds += self._grow_cache(self.cache_length + 1)

    def decode(self, count: int) -> float:
        return count * self.cost.step(rows=self.batch_size, cache_length=self.cache_length)

    def _expand(self) -> float:
        slots = self.program_sizes.batch[-1]
        if self.batch_size == slots:
            return 0.0
        self.batch_size = slots
        return self.cost.copy(slots * self.cache_length)

    def _grow_cache(self, length: int) -> float:
        seconds = 0.0
        while self.cache_length < length:
            self.cache_length = next((rung for rung in self.program_sizes.cache if rung > self.cache_length), length)
            seconds += self.cost.copy(self.batch_size * self.cache_length)
        return seconds
