"""Holds the weights and the paged KV cache of an engine, and runs the compiled programs on them.

`SlotScheduler` decides which slot and which blocks each row gets.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Array, Int32

from app.model.decode_weights import DecodeWeights
from app.model.kv_cache import KVCache
from app.rollout.engine.programs import SlotPrograms
from app.rollout.engine.scheduler import CacheWork, Prefill, ScheduledSegment
from app.rollout.engine.segment import NOT_FORCED, RowTable
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import SamplingRules


class SlotRunner:
    """Runs compiled programs on weights and a KV cache that stay on the devices."""

    def __init__(self, programs: SlotPrograms, *, eos_ids: Sequence[int]):
        self._programs, self._num_devices = programs, programs.num_shards
        self._eos_ids = np.asarray(eos_ids, np.int32)
        self.weights: DecodeWeights | None = None
        self.cache: KVCache = ()
        self._prompt_routes: dict[bytes, tuple[Array, int]] = {}
        """`prompt_key` -> (routes of all prompts prefilled together, index of this prompt among them)."""

    def open(self, request: GenerationRequest) -> None:
        """Allocates the KV blocks, and stores the request's sampling rules and seed."""
        self._truncates = self._programs.truncates
        temperature, top_k, top_p, min_p = request.rules
        # Converted to the dtypes that the compiled programs expect.
        rules = np.float32(temperature), np.int32(top_k), np.float32(top_p), np.float32(min_p)
        self._rules, self._seed = SamplingRules(*rules), np.int32(request.seed)  # pyright: ignore[reportArgumentType]
        self.cache = self._programs["open",]()

    def load_weights(self, weights: DecodeWeights) -> None:
        self.weights, self._prompt_routes = weights, {}

    def close(self) -> None:
        self.weights, self.cache, self._prompt_routes = None, (), {}

    def carry_out(self, work: CacheWork) -> None:
        """Dispatches the programs that carry out these cache operations."""
        self._prefill(work.prefills)
        self._copy(work.copies)
        for device, blocks, cache in work.insertions:
            places = self._places(device, blocks, missing=self._programs.num_blocks)
            self.cache = self._programs["put",](self.cache, cache, places)
        for slot in work.admitted:
            if not slot.row.num_tokens:
                slot.prompt_routes = self._prompt_routes.get(slot.prompt_key)

    def decode(self, segment: ScheduledSegment) -> tuple[Int32[Array, "6 B"], Int32[Array, "fields C B"]]:
        """Dispatches a segment; returns its `RowStatus` and tokens, and starts their copy to the host."""
        self.cache, status, drawn = self._programs["decode", segment.num_rows, self._truncates](
            *(self.weights, self.cache, *self._tables(segment), np.asarray(segment.limits, np.int32)),
            *(self._rules, self._seed, self._eos_ids),
        )
        for array in (status, drawn):
            array.copy_to_host_async()
        return status, drawn

    def _tables(
        self, segment: ScheduledSegment
    ) -> tuple[Int32[np.ndarray, "7 B"], Int32[np.ndarray, "B M"], Int32[np.ndarray, "F B"]]:
        """Returns the `RowTable` of the batch, its block tables, and the forced tokens."""
        max_forced = self._programs.shapes.max_forced
        table = np.zeros((len(RowTable._fields), segment.num_rows), np.int32)
        blocks = np.zeros((segment.num_rows, self._programs.table_width), np.int32)
        forced = np.full((max_forced, segment.num_rows), NOT_FORCED, np.int32)
        for place, slot in segment.places.items():
            table[:, place] = RowTable(slot.token, slot.length, slot.remaining, *slot.noise_key)
            blocks[place, : len(slot.blocks)] = slot.blocks
            known = slot.forced[:max_forced]
            forced[: len(known), place] = known
        return table, blocks, forced

    def take(self, device: int, blocks: Sequence[int]) -> KVCache:
        """Returns a copy of a row's blocks on a device, padded to the number of blocks of the longest sample."""
        return self._programs["take",](self.cache, self._places(device, blocks, missing=-1))

    def _prefill(self, prefills: Sequence[Prefill]) -> None:
        """Prefills rows of tokens, bucket by bucket, on all devices at once."""
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
                self.cache, routes = program(self.weights, self.cache, ids, lengths, targets)
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
            self.cache = self._programs["copy",](self.cache, *pairs.reshape(2, -1), counts)

    def _places(self, device: int, blocks: Sequence[int], *, missing: int) -> Int32[np.ndarray, "DM"]:
        """Returns a row's blocks in the part of its device, and `missing` in the padding and for all other devices."""
        places = np.full((self._num_devices, self._programs.blocks_per_sample), missing, np.int32)
        places[device, : len(blocks)] = blocks
        return places.reshape(-1)
