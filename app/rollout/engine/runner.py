"""The KV cache of an engine: blocks on all its devices, and the programs that fill, copy and take them out.

It knows no rows: who has which blocks is up to the engine and its `SlotDevice`s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Int32

from app.model.decode_weights import DecodeWeights
from app.model.kv_cache import KVCache
from app.rollout.engine.programs import SlotPrograms


class Prefill(NamedTuple):
    device: int
    token_ids: Int32[np.ndarray, "n"]
    blocks: list[int]
    """The block of each part of the tokens."""
    is_prompt: bool
    """Whether rows will share what is computed."""


@dataclass
class CacheWork:
    """What is done to the blocks before the next segment, in this order."""

    prefills: list[Prefill] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    """Device, source and target; the source -1 stands for zeros."""
    insertions: list[tuple[int, list[int], KVCache]] = field(default_factory=list)
    """Device, blocks of a row, and what they will hold."""
    held: list[tuple[int, list[int]]] = field(default_factory=list)
    """Device, and blocks of a prompt that are in use until then."""


class BlockCache:
    """The arrays of all blocks of an engine."""

    def __init__(self, programs: SlotPrograms):
        self._programs, self._num_devices = programs, programs.num_shards
        self.arrays: KVCache = ()
        self._prompt_routes: dict[bytes, tuple[Array, int]] = {}

    def open(self) -> None:
        """Allocates the blocks."""
        self.arrays = self._programs["open",]()

    def close(self) -> None:
        self.arrays = ()
        self.forget_routes()

    def prompt_routes(self, key: bytes) -> tuple[Array, int] | None:
        """Returns the routes of prefilled prompts, and the number of one among them, if they are recorded.

        Args:
            key: bytes of the prompt's token ids.
        """
        return self._prompt_routes.get(key)

    def forget_routes(self) -> None:
        self._prompt_routes = {}

    def carry_out(self, work: CacheWork, weights: DecodeWeights) -> None:
        """Dispatches the programs that do the work."""
        self._prefill(work.prefills, weights)
        self._copy(work.copies)
        for device, blocks, cache in work.insertions:
            places = self._places(device, blocks, missing=self._programs.num_blocks)
            self.arrays = self._programs["put",](self.arrays, cache, places)

    def take(self, device: int, blocks: Sequence[int]) -> KVCache:
        """Returns a copy of a row's blocks."""
        return self._programs["take",](self.arrays, self._places(device, blocks, missing=-1))

    def clear(self, device: int, blocks: Sequence[int]) -> None:
        """Sets blocks to zero."""
        self._copy([(device, -1, block) for block in blocks])

    def _prefill(self, prefills: Sequence[Prefill], weights: DecodeWeights) -> None:
        """Prefills rows of tokens, on all devices at once."""
        programs, shapes = self._programs, self._programs.shapes
        buckets = sorted({*shapes.prompt_buckets, *shapes.recompute_buckets})
        by_bucket: dict[int, list[list[Prefill]]] = {}
        for one in prefills:
            bucket = next(size for size in buckets if size >= len(one.token_ids))
            by_bucket.setdefault(bucket, [[] for _ in range(self._num_devices)])[one.device].append(one)
        for bucket, by_device in sorted(by_bucket.items()):
            rows = shapes.prefill_rows if bucket in shapes.prompt_buckets else (1,)
            while most := max(map(len, by_device)):
                count = next((size for size in rows if size >= most), rows[-1])
                size = self._num_devices * count
                ids, lengths = np.zeros((size, bucket), np.int32), np.zeros(size, np.int32)
                targets = np.full((size, programs.blocks_for(bucket)), programs.num_blocks, np.int32)
                numbers: dict[bytes, int] = {}
                for device, waiting in enumerate(by_device):
                    for i, one in enumerate(waiting[:count], start=device * count):
                        ids[i, : len(one.token_ids)], lengths[i] = one.token_ids, len(one.token_ids)
                        targets[i, : len(one.blocks)] = one.blocks
                        if one.is_prompt:
                            numbers[one.token_ids.tobytes()] = i
                    del waiting[:count]
                program = programs["prefill", count, bucket]
                self.arrays, routes = program(weights, self.arrays, ids, lengths, targets)
                if routes is not None:
                    self._prompt_routes |= {key: (routes, number) for key, number in numbers.items()}

    def _copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        most = self._programs.shapes.num_slots // self._num_devices
        by_device = [[pair for device, *pair in copies if device == i] for i in range(self._num_devices)]
        for first in range(0, max(map(len, by_device)), most):
            pairs, counts = np.zeros((2, self._num_devices, most), np.int32), np.zeros(self._num_devices, np.int32)
            for device, waiting in enumerate(by_device):
                for i, pair in enumerate(waiting[first : first + most]):
                    pairs[:, device, i] = pair
                    counts[device] = i + 1
            self.arrays = self._programs["copy",](self.arrays, *pairs.reshape(2, -1), counts)

    def _places(self, device: int, blocks: Sequence[int], *, missing: int) -> Int32[np.ndarray, "DM"]:
        """Returns the blocks of a row for its device, padded to those of a sample, and `missing` for all others."""
        places = np.full((self._num_devices, self._programs.blocks_per_sample), missing, np.int32)
        places[device, : len(blocks)] = blocks
        return places.reshape(-1)
