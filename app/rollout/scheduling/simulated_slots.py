"""What the slots of a worker do beside decoding, and what it costs: the segment engine without its arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from app.rollout.scheduling.cost_model import CostModel


class Ladders(NamedTuple):
    """The sizes of an engine's programs, ascending."""

    batch: tuple[int, ...]
    """Rows; the last is the number of slots."""
    cache: tuple[int, ...]
    """Tokens that a row has room for."""
    prompt: tuple[int, ...] = ()
    """Tokens of a prefilled prompt; those of none are not padded."""
    prefill_rows: tuple[int, ...] = (1,)
    """Prompts that are read at once."""


def _fitting(ladder: Sequence[int], size: int) -> int:
    return next((rung for rung in ladder if rung >= size), size)


class VirtualSlots:
    """Rows are decoded in programs of `size` rows with `room` for so many tokens each.

    As in the engine: admitting uses all slots, room only grows, and whatever is smaller than all slots has full room.
    What is done returns the seconds that it takes.
    """

    def __init__(self, ladders: Ladders, cost: CostModel):
        self.ladders = ladders
        self.cost = cost
        self.size = ladders.batch[-1]
        self.room = ladders.cache[0]
        self._pooled: set[str] = set()
        """Prompts that were read."""

    def suspend(self) -> float:
        """Makes ready to take rows out."""
        return self._use_all_slots() + self._grow_to(self.ladders.cache[-1])

    def admit(self, prompts: Mapping[str, int], *, num_fresh: int, reread: Iterable[int], num_copied: int) -> float:
        """Rows come in.

        Args:
            prompts: of those that begin there -> tokens. Those that are not pooled are read first.
            num_fresh: rows that begin at their prompts' ends.
            reread: tokens of each row whose cache is computed anew in one pass, as long as the cache.
            num_copied: rows that come with their caches.
        """
        full, seconds = self.ladders.cache[-1], self._use_all_slots()
        for tokens in reread:
            num_copied += 1
            seconds += self.cost.prefill(full if self.ladders.prompt else tokens)
        if num_copied:
            seconds += self._grow_to(full) + num_copied * self.cost.move(self.room)
        if num_fresh:
            seconds += self._prefill({uid: tokens for uid, tokens in prompts.items() if uid not in self._pooled})
            seconds += self.cost.admit(num_fresh)
        return seconds

    def _prefill(self, prompts: Mapping[str, int]) -> float:
        self._pooled.update(prompts)
        by_rung: dict[int, int] = {}
        for tokens in prompts.values():
            rung = _fitting(self.ladders.prompt, tokens)
            by_rung[rung] = by_rung.get(rung, 0) + 1
        rows, seconds = self.ladders.prefill_rows, 0.0
        for rung, count in by_rung.items():
            whole, rest = divmod(count, rows[-1])
            seconds += whole * self.cost.prefill(rows[-1] * rung)
            seconds += self.cost.prefill(_fitting(rows, rest) * rung) if rest else 0.0
        return seconds

    def compact(self, num_rows: int) -> float:
        """To the smallest program that holds so many."""
        size, seconds = _fitting(self.ladders.batch, num_rows), 0.0
        while self.size > size:
            seconds += self._grow_to(self.ladders.cache[-1])
            self.size = max(rung for rung in self.ladders.batch if rung < self.size)
            seconds += self.cost.copy(self.size * self.room)
        return seconds

    def make_room(self, rows: Iterable[tuple[int, int]]) -> tuple[int | None, float]:
        """Steps until a row's cache is full (None: any number), and seconds: full ones are lengthened first.

        Args:
            rows: (tokens so far, tokens that may come) of each.
        """
        seconds, rows = 0.0, list(rows)
        while True:
            # The last token drawn is not fed, so it needs no room.
            short = [steps for length, left in rows if left > (steps := self.room - length + 1)]
            if not short or min(short) > 0:
                return min(short, default=None), seconds
            seconds += self._grow_to(self.room + 1)

    def steps(self, count: int) -> float:
        return count * self.cost.step(rows=self.size, cache_length=self.room)

    def _use_all_slots(self) -> float:
        slots = self.ladders.batch[-1]
        if self.size == slots:
            return 0.0
        self.size = slots
        return self.cost.copy(slots * self.room)

    def _grow_to(self, length: int) -> float:
        seconds = 0.0
        while self.room < length:
            self.room = next((rung for rung in self.ladders.cache if rung > self.room), length)
            seconds += self.cost.copy(self.size * self.room)
        return seconds
