"""Tracks, on the host, the slots of one device and the KV blocks of their rows."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Array, Int32

from app.rollout.engine.block_pool import BlockPool
from app.rollout.sequence import RolloutSequence


@dataclass(eq=False)
class Slot:
    """A row in a slot of a device, with the values of its `RowTable` fields."""

    row: RolloutSequence
    device: int
    """Index of the device in the engine."""
    prompt_key: bytes
    noise_key: tuple[int, int, int, int]
    """Values of the last four fields of `RowTable`, which determine its PRNG key."""
    token: int
    length: int
    remaining: int
    forced: Int32[np.ndarray, "n"]
    """Forced tokens after `token`, still to be fed."""
    blocks: list[int] = field(default_factory=list)
    prompt_routes: tuple[Array, int] | None = None
    """Routes of the prompts prefilled together, and the index of this row's prompt; None if nothing is to be copied."""

    def num_cached(self, steps: int) -> int:
        """Returns the number of cached tokens after this many steps; the last sampled token is not cached yet."""
        return self.length - 1 + min(steps, self.remaining)

    def collect_prompt_routes(self) -> None:
        """Copies the routes of the row's prompt from the devices; later calls do nothing."""
        if self.prompt_routes is not None:
            (routes, number), self.prompt_routes = self.prompt_routes, None
            # JAX caches the host copy of an array, so the samples of a prompt do not copy it again.
            self.row.prompt_routes = np.asarray(routes)[number, : len(self.row.prompt.token_ids)]


class SlotDevice:
    """One device's slots, in the order of admission, and its parked rows, which wait for an environment.

    Args:
        num_blocks: number of blocks, including block 0, which belongs to no row.
        blocks_for: returns the number of blocks that a number of tokens needs.
    """

    def __init__(self, num_slots: int, num_blocks: int, blocks_for: Callable[[int], int]):
        self.num_slots, self.blocks_for = num_slots, blocks_for
        self.pool = BlockPool(num_blocks)
        self.slots: list[Slot] = []
        self.parked: dict[str, Slot] = {}
        """Row key -> slot of a parked row, in the order of parking; its blocks are kept until other rows need them."""
        self._num_growing: int | None = None
        """Cached result of `num_growing`; None = it must be counted again."""

    @property
    def has_free_slot(self) -> bool:
        return len(self.slots) < self.num_slots

    def num_available(self, *, keeping: bytes | None = None) -> int:
        """Returns how many blocks a row can get without dropping the prompt `keeping` or preempting a row."""
        return self.pool.num_available((slot.blocks for slot in self.parked.values()), keeping=keeping)

    def num_missing(self, slot: Slot, steps: int) -> int:
        """Returns how many more blocks a row needs for this many steps."""
        return max(self.blocks_for(slot.num_cached(steps)) - len(slot.blocks), 0)

    def num_growing(self) -> int:
        """Returns the number of rows that may need another block."""
        if self._num_growing is None:
            self._num_growing = sum(map(self._grows, self.slots))
        return self._num_growing

    def _grows(self, slot: Slot) -> bool:
        return self.blocks_for(slot.num_cached(slot.remaining)) > len(slot.blocks)

    def add(self, slot: Slot) -> None:
        self.slots.append(slot)
        if self._num_growing is not None:
            self._num_growing += self._grows(slot)

    def remove(self, slot: Slot) -> None:
        self.slots.remove(slot)
        self._num_growing = None

    def trim(self) -> None:
        """Frees the blocks that rows got for steps that did not take place."""
        self._num_growing = None
        for slot in self.slots:
            self._trim(slot)

    def _trim(self, slot: Slot) -> None:
        kept = self.blocks_for(max(slot.length, 1))
        self.pool.release(slot.blocks[kept:])
        del slot.blocks[kept:]

    def most_steps(self, length: int) -> int:
        """Returns the largest number of steps, up to `length`, for which all rows can get blocks."""

        def missing(steps: int) -> int:
            return sum(self.num_missing(slot, steps) for slot in self.slots)

        return bisect.bisect_right(range(length + 1), self.num_available(), key=missing) - 1

    def park(self, slot: Slot) -> None:
        """Frees the slot of a row, which keeps its blocks until other rows need them."""
        self.remove(slot)
        self._trim(slot)
        self.parked[slot.row.key] = slot
