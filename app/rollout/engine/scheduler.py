"""Assigns slots and KV blocks to rows, from their admission until they end or are preempted, parked or suspended.

All blocks of a row are on one device; their number grows with its tokens, and samples of a prompt share its full
blocks. If a device runs out of blocks, its newest row is preempted and waits in the queue. A parked row has left its
slot to wait for its environment, but keeps its blocks until other rows need them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from app.model.kv_cache import KVCache
from app.records.sample import DROPPED_PREFIX, Prompt
from app.rollout.counters import RolloutCounters
from app.rollout.engine.programs import SlotPrograms
from app.rollout.engine.segment import RowStatus
from app.rollout.engine.slot_device import Slot, SlotDevice
from app.rollout.sampling.token_sampling import FINISH_NON_FINITE, hash_uids
from app.rollout.scheduling.segment_limits import SegmentLimits
from app.rollout.sequence import RolloutSequence, SuspendedSequence


class Prefill(NamedTuple):
    device: int
    token_ids: Int32[np.ndarray, "n"]
    blocks: list[int]
    """One block for every `block_size` tokens."""
    is_prompt: bool
    """True for the tokens of a prompt, whose cache its samples share; False for all tokens of a single row."""


@dataclass
class CacheWork:
    """Operations on KV blocks before the next segment, to be carried out in the order of these fields."""

    prefills: list[Prefill] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    """(device, source block, target block); source -1 means zeros."""
    insertions: list[tuple[int, list[int], KVCache]] = field(default_factory=list)
    """(device, blocks of a row, their new content)."""
    held: list[tuple[int, list[int]]] = field(default_factory=list)
    """(device, blocks of a prompt) that must not be allocated again within this work."""
    admitted: list[Slot] = field(default_factory=list)


class ScheduledSegment(NamedTuple):
    """The rows of a segment and the conditions that end it."""

    places: dict[int, Slot]
    """Position in the batch -> slot of the row."""
    num_rows: int
    """Batch size of the decode program, including empty rows."""
    limits: SegmentLimits


class DecodedRow(NamedTuple):
    """A row that took part in a segment."""

    row: RolloutSequence
    place: int
    """Position of the row in the batch."""
    num_forced: int
    """Number of forced tokens, which come before the sampled ones."""
    num_drawn: int


class SlotScheduler:
    """Assigns slots and KV blocks to rows; `take_work` returns the cache operations that this requires.

    Args:
        programs: programs of the engine, which determine the numbers of slots and blocks.
        exact: whether lost caches are recomputed by replaying tokens; see `SlotEngine`.
    """

    def __init__(self, programs: SlotPrograms, counters: RolloutCounters, *, exact: bool):
        self._programs, self._shapes, self._exact, self._counters = programs, programs.shapes, exact, counters
        self.queued: deque[SuspendedSequence] = deque()
        """Rows that wait for blocks, with their caches if they have any."""
        self.devices: list[SlotDevice] = []
        """One entry per shard of rows; empty while the engine is closed."""
        self._work: list[CacheWork] = []

    def open(self) -> None:
        """Starts a rollout with empty slots on every device."""
        self.close()
        programs, num_devices = self._programs, self._programs.num_shards
        num_slots = self._shapes.num_slots // num_devices
        self.devices = [SlotDevice(num_slots, programs.num_blocks, programs.blocks_for_row) for _ in range(num_devices)]

    def close(self) -> None:
        """Forgets all rows."""
        self.queued, self.devices, self._work = deque(), [], []

    @property
    def slots(self) -> list[Slot]:
        return [slot for device in self.devices for slot in device.slots]

    @property
    def active_rows(self) -> list[RolloutSequence]:
        """All rows in slots, and rows that wait for KV blocks."""
        return [slot.row for slot in self.slots] + [one.row for one in self.queued]

    @property
    def num_free_slots(self) -> int:
        return self._shapes.num_slots - len(self.slots) - len(self.queued)

    def take_work(self) -> list[CacheWork]:
        """Returns the cache operations since the last call, in the order of their execution."""
        work, self._work = self._work, []
        return work

    # Admission ---------------------------------------------------------------------------------------------------

    def prefill(self, prompts: Iterable[Prompt]) -> None:
        """Prefills as many prompts of upcoming samples as one program takes, unless the first prompt is cached.

        It uses only available blocks. With several devices, it does nothing, because it is not yet known which device
        will get which sample.
        """
        if len(self.devices) > 1:
            return
        work, [device] = CacheWork(), self.devices
        distinct: dict[str, Prompt] = {}
        for prompt in prompts:
            if len(distinct) == self._shapes.prefill_rows[-1] or (
                not distinct and device.pool.has_prompt(prompt_key(prompt))
            ):
                break
            distinct[prompt.uid] = prompt
        growing = device.num_growing()
        for prompt in distinct.values():
            needed = self._num_prompt_blocks(prompt) + growing
            if not device.pool.has_prompt(prompt_key(prompt)) and device.num_available() >= needed:
                self._share_prompt(prompt, 0, work)
        self._add_work(work)

    def has_room(self, row: RolloutSequence) -> bool:
        """Returns whether a row would get a slot and blocks at once."""
        return not self.queued and self._device_for(SuspendedSequence(row)) is not None

    def admit(self, rows: Sequence[SuspendedSequence]) -> None:
        """Queues rows, and gives them slots and blocks in order while there are any."""
        self.queued.extend(rows)
        self._admit_queued()

    def _admit_queued(self) -> None:
        """Gives slots and blocks to queued rows in order, until no device has room for the next row."""
        while self.queued and self._admit_some():
            pass

    def _admit_some(self) -> bool:
        """Admits queued rows whose blocks one `CacheWork` can fill; returns whether there were any."""
        work = CacheWork()
        while self.queued and (number := self._device_for(self.queued[0])) is not None:
            one = self.queued.popleft()
            row, parked = one.row, self._parked(one.row)
            if parked is None:
                self.forget(row.key)
            else:
                del self.devices[parked.device].parked[row.key]
            resumes = parked is not None and parked.device == number
            if row.turns and row.num_tokens == row.turn_start:
                self._counters.resumed_rows += resumes
                self._counters.rebuilt_rows += not resumes
            if parked is not None and resumes:
                slot = _make_slot(row, number, parked.length)
                slot.blocks = parked.blocks
            else:
                slot = self._fill_slot(one, number, work)
                if parked is not None:
                    self._release(parked)
            self.devices[number].add(slot)
            work.admitted.append(slot)
        self._add_work(work)
        return bool(work.admitted)

    def _fill_slot(self, one: SuspendedSequence, number: int, work: CacheWork) -> Slot:
        """Returns a slot on device `number` for a row, and adds the operations that fill its blocks to `work`."""
        row = one.row
        if self._continues_prompt(one):
            slot = _make_slot(row, number, len(row.prompt.token_ids))
            prompt, num_full = self._share_prompt(row.prompt, number, work), self._num_full_blocks(row.prompt)
            self.devices[number].pool.share(prompt[:num_full])
            needed = self._programs.blocks_for(max(slot.length, 1))
            slot.blocks = prompt[:num_full] + self._allocate(number, needed - num_full)
            work.copies.extend((number, block, slot.blocks[num_full]) for block in prompt[num_full:])
            self._counters.recomputed_tokens += len(slot.forced)
        elif one.cache is not None:
            slot = _make_slot(row, number, one.length)
            slot.blocks = self._allocate(number, self._programs.blocks_for(max(slot.length, 1)))
            work.insertions.append((number, slot.blocks, one.cache))
        else:
            ids = np.concatenate([row.prompt.token_ids, row.token_ids])
            slot = _make_slot(row, number, len(ids))
            slot.blocks = self._allocate(number, self._programs.blocks_for(max(slot.length, 1)))
            work.prefills.append(Prefill(number, ids, slot.blocks, is_prompt=False))
            self._counters.recomputed_tokens += len(ids)
        return slot

    def _continues_prompt(self, one: SuspendedSequence) -> bool:
        """Returns whether a row starts from the cache of its prompt."""
        return one.cache is None and (self._exact or not one.row.num_tokens)

    def _device_for(self, one: SuspendedSequence) -> int | None:
        """Returns the index of the device for a row; None if no device has room.

        A device that has cached the row's prompt is preferred until it has an equal share of all rows. Unless it is
        empty, a device needs free blocks for the row, and one more for every row that can still grow.
        """
        row, parked = one.row, self._parked(one.row)
        if parked is not None and self.devices[parked.device].has_free_slot:
            return parked.device
        key, length = prompt_key(row.prompt), len(row.prompt.token_ids) + row.num_tokens
        needed = self._programs.blocks_for(max(length, 1))
        grows = self._programs.blocks_for_row(length + row.max_new_tokens - row.num_tokens - 1) > needed
        share = -(-(len(self.slots) + max(len(self.queued), 1)) // len(self.devices))

        def has_room(device: SlotDevice) -> bool:
            if not device.has_free_slot:
                return False
            missing = needed + grows
            if self._continues_prompt(one):
                # The last block of a prompt is kept in addition to its copy.
                missing += -self._num_full_blocks(row.prompt) if device.pool.has_prompt(key) else 1
            available = device.num_available(keeping=key)
            return not device.slots or available >= missing + device.num_growing()

        def rank(number: int) -> tuple[bool, bool, int]:
            device = self.devices[number]
            return len(device.slots) >= share, not device.pool.has_prompt(key), len(device.slots)

        return min((i for i, device in enumerate(self.devices) if has_room(device)), key=rank, default=None)

    # Blocks ------------------------------------------------------------------------------------------------------

    def _num_full_blocks(self, prompt: Prompt) -> int:
        """Returns the number of blocks that all samples of a prompt share."""
        return max(len(prompt.token_ids) - 1, 0) // self._programs.block_size

    def _num_prompt_blocks(self, prompt: Prompt) -> int:
        """Returns the number of blocks of a prompt without its last token, which each sample decodes itself."""
        return self._programs.blocks_for(max(len(prompt.token_ids) - 1, 0))

    def _share_prompt(self, prompt: Prompt, number: int, work: CacheWork) -> list[int]:
        """Returns a prompt's blocks on a device, reserved until `work` is complete; prefills them if not cached."""
        pool, key = self.devices[number].pool, prompt_key(prompt)
        if not pool.has_prompt(key):
            blocks = self._allocate(number, self._num_prompt_blocks(prompt))
            pool.keep_prompt(key, blocks)
            if blocks:
                work.prefills.append(Prefill(number, prompt.token_ids, blocks, is_prompt=True))
                self._counters.prefilled_tokens += len(prompt.token_ids)
        blocks = pool.prompt_blocks(key)
        pool.share(blocks)
        work.held.append((number, blocks))
        return blocks

    def _add_work(self, work: CacheWork) -> None:
        self._work.append(work)
        # Safe before the work runs: a row that gets these blocks is filled by later work.
        for number, blocks in work.held:
            self.devices[number].pool.release(blocks)

    def _allocate(self, number: int, count: int) -> list[int]:
        """Returns free blocks of a device; if necessary, takes blocks from parked rows, oldest first."""
        device = self.devices[number]
        while device.parked and device.pool.num_available() < count:
            self._release(device.parked.pop(next(iter(device.parked))))
        return device.pool.allocate(count)

    def _release(self, slot: Slot) -> None:
        pool = self.devices[slot.device].pool
        pool.release(slot.blocks)
        # A non-finite value would break the next row even where it is masked.
        if spoilt := pool.take_spoilt():
            self._work.append(CacheWork(copies=[(slot.device, -1, block) for block in spoilt]))

    # Rows that leave their slots ---------------------------------------------------------------------------------

    def finish(self, slot: Slot, reason: str) -> None:
        """Ends a row, or only its turn if an environment must answer it."""
        row = slot.row
        if row.plays and not reason.startswith(DROPPED_PREFIX):
            row.turn_end = reason
            if reason == "stop":
                self.devices[slot.device].park(slot)
                return
        else:
            row.finish(reason)
        self.remove(slot)

    def remove(self, slot: Slot) -> None:
        """Takes a row out of its slot and frees its blocks."""
        self.devices[slot.device].remove(slot)
        self._release(slot)

    def take_queued(self, row: RolloutSequence) -> SuspendedSequence | None:
        """Takes a row out of the queue; returns None if it is not there."""
        one = next((one for one in self.queued if one.row is row), None)
        if one is not None:
            self.queued.remove(one)
        return one

    def _parked(self, row: RolloutSequence) -> Slot | None:
        """Returns the former slot of a parked row if forced tokens can complete its cache; otherwise None."""
        slot = next((device.parked[row.key] for device in self.devices if row.key in device.parked), None)
        if slot is None:
            return None
        num_new = len(row.prompt.token_ids) + row.num_tokens - slot.length
        return slot if num_new >= 0 and (self._exact or num_new <= self._shapes.max_forced) else None

    def forget(self, key: str) -> None:
        """Frees the blocks of the row with this key if it is parked."""
        for device in self.devices:
            if (slot := device.parked.pop(key, None)) is not None:
                self._release(slot)

    # A segment ---------------------------------------------------------------------------------------------------

    def schedule(self, limits: SegmentLimits, *, is_stopped: Callable[[RolloutSequence], bool]) -> ScheduledSegment:
        """Admits queued rows and gives all rows blocks for the next segment, which is shortened if blocks run out.

        Args:
            is_stopped: returns whether a row contains a stop string; may wait for tokens from the devices.
        """
        self._admit_queued()
        length = min(limits.length, self._shapes.segment_max)
        if any(len(slot.forced) > self._shapes.max_forced for slot in self.slots):
            length = min(length, self._shapes.max_forced)
        limits = limits._replace(length=self._reserve(length, is_stopped))
        if self.queued and not limits.leave_when_finished:
            limits = SegmentLimits(limits.length, leave_when_finished=1)
        # Every device gets equally many rows of the batch, since rows cannot move to another device.
        most = max(len(device.slots) for device in self.devices)
        num_rows = next(size for size in self._shapes.batch_buckets if size >= most * len(self.devices))
        per_device = num_rows // len(self.devices)
        places = {
            n * per_device + i: slot for n, device in enumerate(self.devices) for i, slot in enumerate(device.slots)
        }
        return ScheduledSegment(places, num_rows, limits)

    def _reserve(self, length: int, is_stopped: Callable[[RolloutSequence], bool]) -> int:
        """Gives every row blocks for a segment of up to `length` steps; returns the number of steps that fit.

        While a device has blocks for fewer steps than a block has tokens, its newest row is preempted.
        """
        for device in self.devices:
            least = min(length, self._programs.block_size)
            while (fitting := device.most_steps(length)) < least and len(device.slots) > 1:
                newest = device.slots[-1]
                if is_stopped(newest.row):
                    self.finish(newest, "stop")
                else:
                    self._preempt(newest)
            length = fitting
        for number, device in enumerate(self.devices):
            for slot in device.slots:
                slot.blocks += self._allocate(number, device.num_missing(slot, length))
        return length

    def _preempt(self, slot: Slot) -> None:
        self.remove(slot)
        self.queued.appendleft(SuspendedSequence(slot.row))
        self._counters.preempted_rows += 1

    def postprocess(self, segment: ScheduledSegment, after: RowStatus) -> list[DecodedRow]:
        """Updates the rows and slots after a segment, and frees the slots of finished rows."""
        decoded = []
        for place, slot in segment.places.items():
            row, count = slot.row, int(after.length[place]) - slot.length
            num_forced = min(count, len(slot.forced))
            row.num_tokens += count - num_forced
            row.num_segments += 1
            decoded.append(DecodedRow(row, place, num_forced, count - num_forced))
            slot.token, slot.length, slot.remaining = (int(field[place]) for field in after[:3])
            slot.forced = slot.forced[num_forced:]
            if slot.remaining == 0:
                reason = "stop" if after.stopped[place] else "length"
                if after.non_finite[place]:
                    reason = FINISH_NON_FINITE
                    self.devices[slot.device].pool.spoil(slot.blocks, slot.prompt_key)
                self.finish(slot, reason)
        for device in self.devices:
            device.trim()
        return decoded


def _make_slot(row: RolloutSequence, device: int, length: int) -> Slot:
    """Returns a slot for a row, still without blocks.

    Args:
        length: number of the row's tokens up to and including the next one to decode. Tokens before it are cached, or
            will be; tokens after it are forced.
    """
    low, high = hash_uids([row.prompt.uid])[0].view(np.int32)
    ids = np.concatenate([row.prompt.token_ids, row.token_ids])
    forced = ids[length:]
    return Slot(
        row,
        device,
        prompt_key(row.prompt),
        (int(low), int(high), row.sample_index, row.noise_step),
        token=int(ids[length - 1]) if length else 0,
        length=length,
        remaining=row.num_allowed + len(forced),
        forced=forced,
    )


def prompt_key(prompt: Prompt) -> bytes:
    """Returns a key that is equal for prompts with equal tokens."""
    return prompt.token_ids.tobytes()
