"""Slots on one mesh, decoded segment by segment.

Between segments, waiting samples are admitted to free slots and others may be suspended. A segment runs on the devices
while the host reads the tokens of the previous one.

Every row has a table of blocks on one device, so that memory follows its tokens, and samples of a prompt share its full
blocks. Where blocks run out, the newest row of the device gives its own up and waits in the engine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int32

from app.mesh.device_mesh import num_hosts
from app.model.decode_weights import DecodeWeights
from app.model.decoder import DecoderDefinition
from app.records.sample import DROPPED_PREFIX, Prompt
from app.rollout.counters import RolloutCounters
from app.rollout.engine.programs import SlotPrograms, rules_to_arrays
from app.rollout.engine.runner import BlockCache, CacheWork, Prefill
from app.rollout.engine.segment import NOT_FORCED, DecodeLimits, RowStatus, RowTable
from app.rollout.engine.shapes import BatchShape, Footprint, SlotShapes
from app.rollout.engine.slot_device import NoiseKey, Slot, SlotDevice
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import SamplingRules, finish_reason, hash_uids
from app.rollout.sequence import RolloutSequence, SuspendedSequence
from app.rollout.stop_strings import DecodeText
from settings.errors import InputError


class DecodedRow(NamedTuple):
    """A row that took part in a segment."""

    row: RolloutSequence
    place: int
    """Its place in the batch."""
    num_forced: int
    """Number of its first steps, whose tokens were known."""
    num_drawn: int


@dataclass
class SegmentResult:
    """Result of one segment. Until `collect`, its tokens are being copied from the devices."""

    decoded: Sequence[DecodedRow]
    waited: Sequence[RolloutSequence]
    """Rows of the engine for which there were no blocks."""
    steps: int
    num_rows: int
    """Number of rows decoded at each step, including empty ones."""
    policy_version: int
    _slots: Sequence[Slot]
    _tokens: Array | None

    @property
    def finished(self) -> list[RolloutSequence]:
        return [one.row for one in self.decoded if one.row.finish_reason]

    @property
    def acting(self) -> list[RolloutSequence]:
        """Rows whose turns have ended."""
        return [one.row for one in self.decoded if one.row.is_acting]

    def collect(self) -> None:
        """Appends the tokens of the segment to its rows, once. Segments must be collected in order."""
        if self._tokens is None:
            return
        drawn, self._tokens = np.asarray(self._tokens), None
        for slot in self._slots:
            slot.collect_prompt_routes()
        for row, place, num_forced, num_drawn in self.decoded:
            row.segment_tokens.append(drawn[:, num_forced : num_forced + num_drawn, place].copy())
            row.segment_versions.append((self.policy_version, num_drawn))


class SlotEngine:
    """A fixed number of slots for one decoder on one mesh of this host's devices.

    Args:
        eos_ids: every token id that ends a sequence.
        exact: whether the tokens of a suspended sample without a cache are fed again through the program that drew
            them; otherwise a prefill recomputes the cache, which rounds differently.
        decode_text: converts token ids to text, to find stop strings between segments; None = only when they are cut.
        programs: programs of another engine with the same arguments, shared so that they are compiled only once.

    Raises:
        InputError: the blocks do not hold one sample.
    """

    def __init__(
        self,
        definition: DecoderDefinition,
        mesh: Mesh,
        shapes: SlotShapes,
        *,
        eos_ids: Sequence[int],
        dtype: jnp.dtype,
        exact: bool,
        decode_text: DecodeText | None = None,
        programs: SlotPrograms | None = None,
    ):
        self.shapes = shapes
        self.exact = exact
        self.counters = RolloutCounters()
        self.programs = programs or SlotPrograms(definition, mesh, shapes, dtype=dtype, num_eos=len(eos_ids))
        self._eos_ids = np.asarray(eos_ids, np.int32)
        self._decode_text = decode_text
        self._weights: Any = ()
        self._cache = BlockCache(self.programs)
        self._queued: deque[RolloutSequence | SuspendedSequence] = deque()
        """Rows that wait for blocks."""
        self._devices: list[SlotDevice] = []
        """Those with different rows."""
        self._running: tuple[dict[int, Slot], int, Array, Array] | None = None
        self._last: SegmentResult | None = None

    # A rollout ---------------------------------------------------------------------------------------------------

    def compile(self, rules: SamplingRules, *, suspends: bool = False) -> None:
        """Compiles the programs that a rollout needs, except those already compiled.

        Args:
            suspends: whether samples may be suspended.
        """
        # The truncating sampler also serves rules that exclude no token, which saves a program.
        truncates = rules.truncates or self.programs.truncates
        recomputes = self.recomputes or (suspends and not self.exact)
        self.programs.compile(suspends=suspends, recomputes=recomputes, truncates=truncates)

    @property
    def recomputes(self) -> bool:
        """Whether a prefill computes the caches of preempted rows and of long observations."""
        return (self.programs.preempts or self.shapes.max_forced > 0) and not self.exact

    def open(self, weights: DecodeWeights, request: GenerationRequest, *, suspends: bool = False) -> None:
        """Starts a rollout with empty slots, after compiling any missing programs."""
        self.compile(request.rules, suspends=suspends)
        self._truncates, self._suspends = self.programs.truncates, suspends
        self._rules, self._seed = rules_to_arrays(request.rules), np.int32(request.seed)
        self._stop = request.stop
        self._cache.open()
        programs = self.programs
        sizes = self.shapes.num_slots // programs.num_shards, programs.num_blocks, programs.blocks_for_row
        self._devices = [SlotDevice(*sizes) for _ in range(programs.num_shards)]
        self._queued, self._last = deque(), None
        self.load_weights(weights, policy_version=request.policy_version)

    def load_weights(self, weights: DecodeWeights, *, policy_version: int) -> None:
        """Replaces the weights. Rows keep their caches and noise keys.

        Prompts of rows admitted later are prefilled again.
        """
        self._weights, self._policy_version = weights, policy_version
        self._cache.forget_routes()
        for device in self._devices:
            device.pool.drop_prompts()

    def close(self) -> None:
        """Frees the devices. Unfinished samples and the caches of suspended ones are lost."""
        self._weights = ()
        self._cache.close()
        self._devices, self._queued, self._running, self._last = [], deque(), None, None

    @property
    def is_open(self) -> bool:
        """Whether the engine holds weights."""
        return bool(self._weights)

    @property
    def active_rows(self) -> list[RolloutSequence]:
        """All rows of the engine, none of which is finished."""
        return [slot.row for slot in self._slots] + [_row_of(one) for one in self._queued]

    @property
    def _slots(self) -> list[Slot]:
        return [slot for device in self._devices for slot in device.slots]

    @property
    def num_free_slots(self) -> int:
        return self.shapes.num_slots - len(self._slots) - len(self._queued)

    # Between segments --------------------------------------------------------------------------------------------

    def check_fits(self, row: RolloutSequence) -> None:
        """Raises InputError if a row does not fit into a slot."""
        length = len(row.prompt.token_ids)
        self.shapes.prompt_bucket(length)
        if length + row.max_new_tokens > self.shapes.max_length:
            raise InputError(
                f"rollout.max_new_tokens: {length} + {row.max_new_tokens} tokens of prompt and completion are more "
                f"than the {self.shapes.max_length} that fit into a slot; lower this setting or data.max_prompt_length"
            )

    def has_prefilled(self, prompt: Prompt) -> bool:
        return any(device.pool.has_prompt(_prompt_key(prompt)) for device in self._devices)

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        """Prefills distinct prompts of samples that come next, as far as the only device has room for them.

        Of several devices, it is not known yet which will have the slots.
        """
        if len(self._devices) > 1:
            return
        work, pool, growing = CacheWork(), self._devices[0].pool, self._devices[0].num_growing()
        for prompt in prompts:
            key, needed = _prompt_key(prompt), self._num_prompt_blocks(prompt) + growing
            if not pool.has_prompt(key) and self._devices[0].num_available() >= needed:
                self._share_prompt(prompt, 0, work)
        self._carry_out(work)

    def has_room(self, row: RolloutSequence) -> bool:
        """Returns whether a row would get blocks at once."""
        return not self._queued and self._device_for(row) is not None

    def admit(self, rows: Sequence[RolloutSequence | SuspendedSequence]) -> None:
        """Puts rows into free slots. Those for which there are no blocks yet follow before later segments.

        Raises:
            InputError: a row does not fit into a slot.
        """
        assert self._running is None and len(rows) <= self.num_free_slots
        for row in rows:
            self.check_fits(_row_of(row))
        for row in map(_row_of, rows):
            if not row.started_s:
                row.started_s = time.perf_counter()
                self.counters.prompt_tokens += len(row.prompt.token_ids)
        self._queued.extend(rows)
        self._admit_queued()

    def _admit_queued(self) -> None:
        """Gives blocks to queued rows, in order, until no device can hold the next one."""
        while self._queued and self._admit_some():
            pass

    def _admit_some(self) -> bool:
        """Admits the rows whose blocks can be filled together; returns whether there were any."""
        work, admitted = CacheWork(), []
        while self._queued and (number := self._device_for(self._queued[0])) is not None:
            one = self._queued.popleft()
            row, parked = _row_of(one), self._take_parked(_row_of(one))
            if row.turns and row.num_tokens == row.turn_start:
                self.counters.resumed_rows += parked is not None and parked.device == number
                self.counters.rebuilt_rows += parked is None or parked.device != number
            if parked is not None and parked.device == number:
                slot = _make_slot(row, number, parked.length)
                slot.blocks = parked.blocks
            else:
                slot = self._fill_slot(one, number, work)
                if parked is not None:
                    self._release(parked)
            self._devices[number].add(slot)
            admitted.append(slot)
        self._carry_out(work)
        for slot in admitted:
            if not slot.row.num_tokens:
                slot.prompt_routes = self._cache.prompt_routes(slot.prompt_key)
        return bool(admitted)

    def _fill_slot(self, one: RolloutSequence | SuspendedSequence, number: int, work: CacheWork) -> Slot:
        """Returns a slot on a device for a row, and adds to the work what fills its blocks."""
        row = _row_of(one)
        if self._continues_prompt(one):
            slot = _make_slot(row, number, len(row.prompt.token_ids))
            prompt, num_full = self._share_prompt(row.prompt, number, work), self._num_full_blocks(row.prompt)
            self._devices[number].pool.share(prompt[:num_full])
            needed = self.programs.blocks_for(max(slot.length, 1))
            slot.blocks = prompt[:num_full] + self._allocate(number, needed - num_full)
            work.copies.extend((number, block, slot.blocks[num_full]) for block in prompt[num_full:])
            self.counters.recomputed_tokens += len(slot.forced)
        elif isinstance(one, SuspendedSequence) and one.cache is not None:
            slot = _make_slot(row, number, one.length)
            slot.blocks = self._allocate(number, self.programs.blocks_for(max(slot.length, 1)))
            work.insertions.append((number, slot.blocks, one.cache))
        else:
            ids = np.concatenate([row.prompt.token_ids, row.token_ids])
            slot = _make_slot(row, number, len(ids))
            slot.blocks = self._allocate(number, self.programs.blocks_for(max(slot.length, 1)))
            work.prefills.append(Prefill(number, ids, slot.blocks, is_prompt=False))
            self.counters.recomputed_tokens += len(ids)
        return slot

    def _continues_prompt(self, one: RolloutSequence | SuspendedSequence) -> bool:
        """Returns whether a row starts from the cache of its prompt."""
        if isinstance(one, SuspendedSequence) and one.cache is not None:
            return False
        return self.exact or not _row_of(one).num_tokens

    def _parked(self, row: RolloutSequence) -> Slot | None:
        """Returns the slot that a row had when it was parked, if its blocks are still those of the row's beginning."""
        slot = next((device.parked[row.key] for device in self._devices if row.key in device.parked), None)
        if slot is None:
            return None
        num_new = len(row.prompt.token_ids) + row.num_tokens - slot.length
        return slot if num_new >= 0 and (self.exact or num_new <= self.shapes.max_forced) else None

    def _take_parked(self, row: RolloutSequence) -> Slot | None:
        """Removes a parked row, and frees its blocks unless they are of use; see `_parked`."""
        useful = self._parked(row)
        for device in self._devices:
            if (slot := device.parked.pop(row.key, None)) is not None and slot is not useful:
                self._release(slot)
        return useful

    def forget(self, key: str) -> None:
        """Frees the blocks of a parked row that does not come back."""
        for device in self._devices:
            if (slot := device.parked.pop(key, None)) is not None:
                self._release(slot)

    def _allocate(self, number: int, count: int) -> list[int]:
        """Returns free blocks of a device; the rows that were parked longest give theirs up if need be."""
        device = self._devices[number]
        while device.parked and device.pool.num_available() < count:
            self._release(device.parked.pop(next(iter(device.parked))))
        return device.pool.allocate(count)

    def _num_full_blocks(self, prompt: Prompt) -> int:
        """Returns the number of blocks that all samples of a prompt share."""
        return max(len(prompt.token_ids) - 1, 0) // self.programs.block_size

    def _num_prompt_blocks(self, prompt: Prompt) -> int:
        """Returns the number of blocks of a prompt, whose last token every sample feeds itself."""
        return self.programs.blocks_for(max(len(prompt.token_ids) - 1, 0))

    def _share_prompt(self, prompt: Prompt, number: int, work: CacheWork) -> list[int]:
        """Returns the blocks of a prompt on a device, which no other row gets until the work is done."""
        pool, key = self._devices[number].pool, _prompt_key(prompt)
        if not pool.has_prompt(key):
            blocks = self._allocate(number, self._num_prompt_blocks(prompt))
            pool.keep_prompt(key, blocks)
            if blocks:
                work.prefills.append(Prefill(number, prompt.token_ids, blocks, is_prompt=True))
                self.counters.prefilled_tokens += len(prompt.token_ids)
        blocks = pool.prompt_blocks(key)
        pool.share(blocks)
        work.held.append((number, blocks))
        return blocks

    def _device_for(self, one: RolloutSequence | SuspendedSequence) -> int | None:
        """Returns the number of the device for a row; None if all are full.

        A device that has the row's prompt is preferred until it has its share of the rows. All rows that can grow, and
        the new one, must be able to grow by a block.
        """
        row = _row_of(one)
        parked = self._parked(row)
        if parked is not None and len(self._devices[parked.device].slots) < self._devices[parked.device].num_slots:
            return parked.device
        key, length = _prompt_key(row.prompt), len(row.prompt.token_ids) + row.num_tokens
        needed = self.programs.blocks_for(max(length, 1))
        grows = self.programs.blocks_for_row(length + row.max_new_tokens - row.num_tokens - 1) > needed
        share = -(-(len(self._slots) + max(len(self._queued), 1)) // len(self._devices))

        def has_room(device: SlotDevice) -> bool:
            if len(device.slots) == device.num_slots:
                return False
            missing = needed + grows
            if self._continues_prompt(one):
                # The last block of a prompt is kept beside its copy.
                missing += -self._num_full_blocks(row.prompt) if device.pool.has_prompt(key) else 1
            available = device.num_available(keeping=key)
            return not device.slots or available >= missing + device.num_growing()

        def rank(number: int) -> tuple[bool, bool, int]:
            device = self._devices[number]
            return len(device.slots) >= share, not device.pool.has_prompt(key), len(device.slots)

        return min((i for i, device in enumerate(self._devices) if has_room(device)), key=rank, default=None)

    def _carry_out(self, work: CacheWork) -> None:
        self._cache.carry_out(work, self._weights)
        for number, blocks in work.held:
            self._devices[number].pool.release(blocks)

    def suspend(self, rows: Sequence[RolloutSequence]) -> list[SuspendedSequence]:
        """Takes unfinished samples out of their slots. Their last segment must have been collected."""
        assert self._running is None and self._suspends
        suspended = []
        for row in rows:
            assert row.is_collected
            if waiting := [one for one in self._queued if _row_of(one) is row]:
                self._queued.remove(waiting[0])
                suspended.append(waiting[0] if isinstance(waiting[0], SuspendedSequence) else SuspendedSequence(row))
                continue
            slot = next(slot for slot in self._slots if slot.row is row)
            slot.collect_prompt_routes()
            cache = self._cache.take(slot.device, slot.blocks[: self.programs.blocks_for(slot.length)])
            suspended.append(SuspendedSequence(row, cache, slot.length))
            self._remove(slot)
        return suspended

    def _remove(self, slot: Slot) -> None:
        self._devices[slot.device].remove(slot)
        self._release(slot)

    def _release(self, slot: Slot) -> None:
        """Frees the blocks of a row without a slot."""
        pool = self._devices[slot.device].pool
        pool.release(slot.blocks)
        # A value that is not finite would break the next row even where it is masked.
        self._cache.clear(slot.device, pool.take_spoilt())

    # A segment ---------------------------------------------------------------------------------------------------

    def start_segment(self, *, length: int, leave_when_finished: int = 0, leave_when_active: int = 0) -> None:
        """Dispatches a segment and returns at once.

        The segment ends after `length` tokens of each row, when all rows are done, when the blocks are full, or, while
        rows wait for blocks, as soon as a row is done.

        Args:
            leave_when_finished: number of newly finished rows at which it ends, because samples need slots; 0 = never.
            leave_when_active: number of active rows at which it ends, because they fit into a smaller program.
        """
        assert self._running is None and self.active_rows
        self._admit_queued()
        length = min(length, self.shapes.segment_max)
        if any(len(slot.forced) > self.shapes.max_forced for slot in self._slots):
            length = min(length, self.shapes.max_forced)
        length = self._reserve(length)
        if self._queued and not leave_when_finished:
            leave_when_finished, leave_when_active = 1, 0
        places = self._places()
        limits = DecodeLimits(length, leave_when_finished, leave_when_active)
        self._cache.arrays, status, drawn = self.programs["decode", self._batch_size, self._truncates](
            *(self._weights, self._cache.arrays, *self._table(places), np.asarray(limits, np.int32)),
            *(self._rules, self._seed, self._eos_ids),
        )
        for array in (status, drawn):
            array.copy_to_host_async()
        self._running = places, self._batch_size, status, drawn

    def _reserve(self, length: int) -> int:
        """Gives every row the blocks for a segment of up to `length` steps; returns how many steps it can have.

        While a device has no blocks for as many steps as a block holds, its newest row gives its own up.
        """
        for device in self._devices:
            least = min(length, self.programs.block_size)
            while (fitting := device.most_steps(length)) < least and len(device.slots) > 1:
                self._preempt(device.slots[-1])
            length = fitting
        for number, device in enumerate(self._devices):
            for slot in device.slots:
                slot.blocks += self._allocate(number, device.num_missing(slot, length))
        return length

    def _preempt(self, slot: Slot) -> None:
        """Puts a row back into the queue, without its cache."""
        if self._last is not None:
            self._last.collect()
        if self._contains_stop(slot.row):
            self._finish(slot, "stop")
            return
        self._remove(slot)
        self._queued.appendleft(SuspendedSequence(slot.row) if slot.row.num_tokens else slot.row)
        self.counters.preempted_rows += 1

    @property
    def _batch_size(self) -> int:
        """Number of rows of the smallest program that holds all rows, which do not change their devices."""
        most = max(len(device.slots) for device in self._devices)
        return next(size for size in self.shapes.batch_buckets if size >= most * len(self._devices))

    def _places(self) -> dict[int, Slot]:
        """Returns the rows by their places in the batch."""
        per_device = self._batch_size // len(self._devices)
        return {
            n * per_device + i: slot for n, device in enumerate(self._devices) for i, slot in enumerate(device.slots)
        }

    def _table(
        self, places: dict[int, Slot]
    ) -> tuple[Int32[np.ndarray, "7 B"], Int32[np.ndarray, "B M"], Int32[np.ndarray, "F B"]]:
        """Returns the `RowTable` of the batch, its tables of blocks, and the tokens that are known already."""
        table = np.zeros((len(RowTable._fields), self._batch_size), np.int32)
        blocks = np.zeros((self._batch_size, self.programs.table_width), np.int32)
        forced = np.full((self.shapes.max_forced, self._batch_size), NOT_FORCED, np.int32)
        for place, slot in places.items():
            table[:, place] = RowTable(slot.token, slot.length, slot.remaining, *slot.noise_key)
            blocks[place, : len(slot.blocks)] = slot.blocks
            known = slot.forced[: self.shapes.max_forced]
            forced[: len(known), place] = known
        return table, blocks, forced

    def finish_segment(self) -> SegmentResult:
        """Waits for the running segment and frees the slots of finished rows."""
        assert self._running is not None
        (places, num_rows, status, drawn), self._running = self._running, None
        after, decoded = RowStatus(*np.asarray(status)), []
        for place, slot in places.items():
            row, count = slot.row, int(after.length[place]) - slot.length
            num_forced = min(count, len(slot.forced))
            row.num_tokens += count - num_forced
            row.num_segments += 1
            decoded.append(DecodedRow(row, place, num_forced, count - num_forced))
            slot.token, slot.length, slot.remaining = (int(field[place]) for field in after[:3])
            slot.forced = slot.forced[num_forced:]
            if slot.remaining == 0:
                if after.non_finite[place]:
                    self._devices[slot.device].pool.spoil(slot.blocks, slot.prompt_key)
                self._finish(slot, finish_reason(after.stopped[place], after.non_finite[place]))
        for device in self._devices:
            device.trim()
        steps = int(after.steps[0])
        self.counters.count_segment(steps=steps, num_rows=num_rows, num_generated=sum(d.num_drawn for d in decoded))
        waited = [_row_of(one) for one in self._queued]
        slots = [*places.values()]
        self._last = SegmentResult(decoded, waited, steps, num_rows, self._policy_version, slots, drawn)
        return self._last

    def _finish(self, slot: Slot, reason: str) -> None:
        """Ends a row, or its turn if an environment answers."""
        row = slot.row
        if row.plays and not reason.startswith(DROPPED_PREFIX):
            row.turn_end = reason
            if reason == "stop":
                self._devices[slot.device].park(slot)
                return
        else:
            row.finish(reason)
        self._remove(slot)

    def finish_stopped_rows(self) -> None:
        """Frees the slots of rows whose collected text contains a stop string. No segment may be running."""
        assert self._running is None
        for slot in self._slots:
            if self._contains_stop(slot.row):
                self._finish(slot, "stop")

    def _contains_stop(self, row: RolloutSequence) -> bool:
        return self._decode_text is not None and row.newly_contains(self._stop, self._decode_text)

    # Sizes -------------------------------------------------------------------------------------------------------

    @property
    def batch_shape(self) -> BatchShape:
        """Largest batch shape of the engine on this host."""
        shapes = self.shapes
        lengths = shapes.max_prompt_length, shapes.max_row_length, self.programs.block_size
        hosts = num_hosts(self.programs.mesh)
        num_prompts = shapes.prefill_rows[-1] * self.programs.num_shards // hosts
        return BatchShape(num_prompts, shapes.num_slots // hosts, *lengths)

    def footprint(self) -> Footprint:
        """Returns the arrays on the devices. Compiles nothing."""
        return Footprint(self.programs.abstract_weights, self.programs.abstract_pool)


def _row_of(one: RolloutSequence | SuspendedSequence) -> RolloutSequence:
    return one.row if isinstance(one, SuspendedSequence) else one


def _make_slot(row: RolloutSequence, device: int, length: int) -> Slot:
    """Returns a slot, still without blocks, for a row whose first tokens are cached or will be.

    Args:
        length: number of its first tokens of prompt and completion, the last of which is fed next.
    """
    low, high = hash_uids([row.prompt.uid])[0].view(np.int32)
    ids = np.concatenate([row.prompt.token_ids, row.token_ids])
    forced = ids[length:]
    return Slot(
        row,
        device,
        _prompt_key(row.prompt),
        NoiseKey(int(low), int(high), row.sample_index, row.noise_step),
        token=int(ids[length - 1]) if length else 0,
        length=length,
        remaining=row.num_allowed + len(forced),
        forced=forced,
    )


def _prompt_key(prompt: Prompt) -> bytes:
    """Returns a key that is equal for prompts with equal tokens."""
    return prompt.token_ids.tobytes()
