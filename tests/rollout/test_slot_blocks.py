"""Tests which KV blocks rows get, with caches on the host that contain the tokens themselves.

Every step compares all blocks that a row reads with its tokens, so that a block given to two rows is found at once.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.model.decoder import DecoderDefinition
from app.records.sample import Prompt
from app.rollout.counters import RolloutCounters
from app.rollout.engine.block_pool import BlockPool
from app.rollout.engine.programs import SlotPrograms
from app.rollout.engine.scheduler import SlotScheduler
from app.rollout.engine.segment import RowStatus
from app.rollout.engine.shapes import make_slot_shapes
from app.rollout.engine.slot_device import Slot
from app.rollout.scheduling.segment_limits import SegmentLimits
from app.rollout.sequence import RolloutSequence, SuspendedSequence
from tests.tiny import ODD, make_mesh

DEFINITION = DecoderDefinition.create(ODD)


class HostSlots:
    """Slots whose cache is numpy arrays [devices, blocks, tokens of a block]."""

    def __init__(self, programs: SlotPrograms, *, exact: bool, tokens: dict[str, list[int]]):
        self.scheduler = SlotScheduler(programs, RolloutCounters(), exact=exact)
        self.scheduler.open()
        self.size, self.tokens = programs.block_size, tokens
        self.blocks = np.zeros((programs.num_shards, programs.num_blocks, self.size), int)

    def carry_out(self) -> None:
        for work in self.scheduler.take_work():
            written = [(one.device, block) for one in work.prefills for block in one.blocks]
            assert len(set(written)) == len(written), "a block is written twice in one batch"
            for one in work.prefills:
                # The last token of a prompt is fed by each sample.
                ids = np.resize([*one.token_ids, *[0] * self.size], len(one.blocks) * self.size)
                self.blocks[one.device, one.blocks] = ids.reshape(-1, self.size)
            for device, source, target in work.copies:
                self.blocks[device, target] = 0 if source < 0 else self.blocks[device, source]
            for device, blocks, cache in work.insertions:
                self.blocks[device, blocks[: len(cache)]] = cache
        self.check_accounts()

    def check_accounts(self) -> None:
        """Asserts that every block would be free without the rows and the kept prompts."""
        for device in self.scheduler.devices:
            everything = device.pool.num_available(slot.blocks for slot in device.slots)
            assert everything == device.pool.num_blocks - 1

    def run_segment(self, limits: SegmentLimits) -> None:
        segment = self.scheduler.schedule(limits, is_stopped=lambda _: False)
        self.carry_out()
        left = sorted(len(self.tokens[slot.row.uid]) - slot.length for slot in segment.places.values())
        steps = min(segment.limits.length, left[min(segment.limits.leave_when_finished or len(left), len(left)) - 1])
        status = np.zeros((len(RowStatus._fields), segment.num_rows), int)
        for place, slot in segment.places.items():
            known = self.tokens[slot.row.uid]
            assert slot.forced.tolist() == known[slot.length : slot.length + len(slot.forced)]
            length = min(slot.length + steps, len(known))
            for position in range(slot.length - 1, length - 1):
                self.feed(slot, position, known)
            remaining = 0 if length == len(known) else slot.remaining - (length - slot.length)
            status[:, place] = known[length - 1], length, remaining, remaining == 0, 0, steps
        for row, place, _, num_drawn in self.scheduler.postprocess(segment, RowStatus(*status)):
            end = status[1, place]
            drawn = self.tokens[row.uid][end - num_drawn : end]
            row.segment_tokens.append(np.array([drawn, drawn, drawn], np.int32).reshape(3, -1))
        self.carry_out()

    def feed(self, slot: Slot, position: int, known: list[int]) -> None:
        blocks = self.blocks[slot.device]
        assert slot.blocks[position // self.size] > 0
        blocks[slot.blocks[position // self.size], position % self.size] = known[position]
        seen = blocks[slot.blocks].reshape(-1)[: position + 1]
        assert seen.tolist() == known[: position + 1], "a row reads tokens of another row"

    def suspend(self, row: RolloutSequence) -> SuspendedSequence:
        if (queued := self.scheduler.take_queued(row)) is not None:
            return queued
        slot = next(slot for slot in self.scheduler.slots if slot.row is row)
        cache: Any = self.blocks[slot.device, slot.blocks].copy()
        self.scheduler.remove(slot)
        return SuspendedSequence(row, cache, slot.length)


@given(data=st.data())
@settings(max_examples=40)
@pytest.mark.parametrize("exact", [True, False])
def test_every_row_reads_its_own_tokens_and_every_block_is_freed(exact: bool, data: st.DataObject) -> None:
    draw, small = data.draw, st.integers(0, 3)
    num_shards, max_new = draw(st.sampled_from([1, 1, 2])), draw(st.integers(1, 24))
    lengths = draw(st.lists(st.integers(1, 19), min_size=1, max_size=8))
    shapes = make_slot_shapes(
        num_shards * draw(st.integers(1, 6)),
        max_prompt_length=max(lengths),
        max_new_tokens=max_new,
        prefill_length_min=4,
        segment_max=draw(st.integers(1, 16)),
        exact=exact,
        row_shards=num_shards,
    )._replace(block_size=(size := draw(st.sampled_from([2, 4]))))
    per_row = -(-shapes.max_length // size)
    shapes = shapes._replace(num_blocks=per_row + 2 + draw(st.integers(0, 2 * per_row)))
    prompts = [
        Prompt(f"prompt-{i}", np.arange(1, n + 1, dtype=np.int32) + 100 * i, "", None) for i, n in enumerate(lengths)
    ]
    rows = [RolloutSequence(prompt, i, max_new, noise_step=0) for prompt in prompts for i in range(draw(small) + 1)]
    ends = [draw(st.integers(1, max_new)) for _ in rows]
    drawn: Sequence[range] = [range(1000 * i, 1000 * i + end) for i, end in enumerate(ends, start=1)]
    tokens = {row.uid: [*row.prompt.token_ids.tolist(), *own] for row, own in zip(rows, drawn, strict=True)}
    programs = SlotPrograms(DEFINITION, make_mesh((num_shards, 1, 1)), shapes, dtype=np.dtype("float32"), num_eos=0)
    slots = HostSlots(programs, exact=exact, tokens=tokens)
    scheduler, waiting = slots.scheduler, deque[SuspendedSequence](map(SuspendedSequence, rows))
    while waiting or scheduler.active_rows:
        if draw(small) == 0:
            for device in scheduler.devices:
                device.pool.drop_prompts()  # new weights do the same
        if waiting and draw(small):
            scheduler.prefill([prompts[i] for i in draw(st.sets(st.integers(0, len(prompts) - 1), max_size=4))])
        scheduler.admit([waiting.popleft() for _ in range(min(len(waiting), scheduler.num_free_slots))])
        slots.carry_out()
        slots.run_segment(SegmentLimits(draw(st.integers(1, 9)), draw(small)))
        if draw(small) == 0 and scheduler.active_rows:
            suspended = slots.suspend(scheduler.active_rows[0])
            waiting.append(suspended if draw(st.booleans()) else suspended._replace(cache=None))
            slots.carry_out()
    assert [row.num_tokens for row in rows] == ends and all(len(row.token_ids) == row.num_tokens for row in rows)


def test_blocks_with_non_finite_values_are_overwritten_before_reuse() -> None:
    pool = BlockPool(8)
    prompt = pool.allocate(2)
    pool.keep_prompt(b"prompt", prompt)
    row, sibling = ([prompt[0], *pool.allocate(1)] for _ in range(2))
    pool.share(prompt[:1] * 2)
    pool.spoil(row, b"prompt")
    assert not pool.has_prompt(b"prompt")
    pool.release(row)
    # The block that a sibling still reads is overwritten once it is free.
    assert set(pool.take_spoilt()) == {prompt[1], row[1]}
    pool.release(sibling)
    assert pool.take_spoilt() == [prompt[0]] and pool.num_available() == 7
