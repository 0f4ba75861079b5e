"""What the slots of a worker do beside decoding, and what it costs: the segment engine without its arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from scripts.bench.cost_model import CostModel


class ProgramSizes(NamedTuple):
    """The sizes of an engine's programs, ascending."""

    batch: tuple[int, ...]
    """Rows; the last is the number of slots."""
    cache: tuple[int, ...]
    """Tokens that a row has room for."""
    prompt: tuple[int, ...] = ()
    """Tokens of a prefilled prompt; those of none are not padded."""
    prefill_rows: tuple[int, ...] = (1,)
    """Prompts that are read at once."""


def _smallest_fitting(sizes: Sequence[int], size: int) -> int:
    return next((rung for rung in sizes if rung >= size), size)


class SimulatedSlots:
    """Rows are decoded in programs of `size` rows with `room` for so many tokens each.

    As in the engine: admitting uses all slots, room only grows, and whatever is smaller than all slots has full room.
    What is done returns the seconds that it takes.
    """

    def __init__(self, program_sizes: ProgramSizes, cost: CostModel):
        self.program_sizes = program_sizes
        self.cost = cost
        self.batch_size = program_sizes.batch[-1]
        self.cache_length = program_sizes.cache[0]
        self._pooled: set[str] = set()
        """Prompts that were read."""

    def suspend(self) -> float:
        """Makes ready to take rows out."""
        return self._expand() + self._grow_cache(self.program_sizes.cache[-1])

    def admit(self, prompts: Mapping[str, int], *, num_fresh: int, recomputed: Iterable[int], num_copied: int) -> float:
        """Rows come in.

        Args:
            prompts: of those that begin there -> tokens. Those that are not pooled are read first.
            num_fresh: rows that begin at their prompts' ends.
            reread: tokens of each row whose cache is computed anew in one pass, as long as the cache.
            num_copied: rows that come with their caches.
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
        """To the smallest program that holds so many."""
        size, seconds = _smallest_fitting(self.program_sizes.batch, num_rows), 0.0
        while self.batch_size > size:
            seconds += self._grow_cache(self.program_sizes.cache[-1])
            self.batch_size = max(rung for rung in self.program_sizes.batch if rung < self.batch_size)
            seconds += self.cost.copy(self.batch_size * self.cache_length)
        return seconds

    def grow_to_fit(self, rows: Iterable[tuple[int, int]]) -> tuple[int | None, float]:
        """Steps until a row's cache is full (None: any number), and seconds: full ones are lengthened first.

        Args:
            rows: (tokens so far, tokens that may come) of each.
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
