"""Tests of which blocks rows get, with programs on the host whose caches hold the tokens themselves.

Every step compares all blocks that a row reads with its tokens, so that a block given to two rows is found at once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.model.decoder import DecoderDefinition
from app.records.sample import Prompt
from app.rollout.engine.block_pool import BlockPool
from app.rollout.engine.engine import SlotEngine
from app.rollout.engine.segment import NOT_FORCED, RowStatus, RowTable
from app.rollout.engine.shapes import SlotShapes, make_slot_shapes
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import SamplingRules, hash_uids
from app.rollout.scheduling.segment_limits import SegmentLimits
from app.rollout.sequence import RolloutSequence, SuspendedSequence
from tests.tiny import ODD, make_mesh

REQUEST = GenerationRequest(group_size=1, max_new_tokens=1, rules=SamplingRules(1.0), seed=0, policy_version=0)
MAX_SEGMENTS = 3000


class HostArray(np.ndarray):
    def copy_to_host_async(self) -> None:
        """Does nothing, because it is there."""


class HostPrograms:
    """The programs of slots on numpy arrays [devices, blocks, tokens of a block]."""

    truncates = False

    def __init__(self, shapes: SlotShapes, rows: Sequence[RolloutSequence], lengths: Sequence[int], num_shards: int):
        self.shapes, self.num_shards = shapes, num_shards
        assert shapes.block_size is not None and shapes.num_blocks is not None
        self.block_size, self.num_blocks = shapes.block_size, shapes.num_blocks
        self.blocks_per_sample = self.table_width = self.blocks_for(shapes.max_length)
        self.preempts = True
        self._known: dict[tuple[int, ...], list[int]] = {}
        for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            low, high = hash_uids([row.prompt.uid])[0].view(np.int32)
            drawn = [1000 * (number + 1) + i for i in range(length)]
            self._known[int(low), int(high), row.sample_index] = [*row.prompt.token_ids.tolist(), *drawn]

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    blocks_for_row = blocks_for

    def compile(self, **_: bool) -> None:
        """Does nothing."""

    def __getitem__(self, name: tuple[Any, ...]) -> Callable[..., Any]:
        return getattr(self, f"_{name[0]}")

    def _open(self) -> np.ndarray:
        return np.zeros((self.num_shards, self.num_blocks, self.block_size), int)

    def _prefill(self, _: Any, pool: np.ndarray, ids: np.ndarray, lengths: np.ndarray, targets: np.ndarray) -> Any:
        by_device = zip(pool, *(np.split(x, self.num_shards) for x in (ids, lengths, targets)), strict=True)
        for blocks, *rows in by_device:
            written = [place for place in rows[2].reshape(-1) if place < self.num_blocks]
            assert len(set(written)) == len(written), "a block is written twice, in any order"
            for row, length, places in zip(*rows, strict=True):
                tokens = np.zeros(len(places) * self.block_size, int)
                tokens[:length] = row[:length]
                for place, part in zip(places, tokens.reshape(-1, self.block_size), strict=True):
                    if place < self.num_blocks:
                        blocks[place] = part
        return pool, None

    def _copy(self, pool: np.ndarray, sources: np.ndarray, targets: np.ndarray, counts: np.ndarray) -> np.ndarray:
        pairs = zip(pool, *(np.split(x, self.num_shards) for x in (sources, targets)), counts, strict=True)
        for blocks, froms, tos, count in pairs:
            for source, target in zip(froms[:count], tos[:count], strict=True):
                blocks[target] = 0 if source < 0 else blocks[source]
        return pool

    def _take(self, pool: np.ndarray, places: np.ndarray) -> np.ndarray:
        row = np.zeros((self.blocks_per_sample, self.block_size), int)
        for blocks, own in zip(pool, np.split(places, self.num_shards), strict=True):
            row[own >= 0] = blocks[own[own >= 0]]
        return row

    def _put(self, pool: np.ndarray, row: np.ndarray, places: np.ndarray) -> np.ndarray:
        for blocks, own in zip(pool, np.split(places, self.num_shards), strict=True):
            blocks[own[own < self.num_blocks]] = row[own < self.num_blocks]
        return pool

    def _decode(
        self, _: Any, pool: np.ndarray, table: np.ndarray, blocks: np.ndarray, forced: np.ndarray, limits: Any, *__: Any
    ) -> Any:
        rows, num_rows = RowTable(*table.copy()), len(blocks)
        drawn = np.zeros((3, self.shapes.segment_max, num_rows), np.int32)
        start, steps = np.sum(rows.remaining > 0), 0
        while True:
            active = np.sum(rows.remaining > 0)
            enough = 0 < limits[1] <= start - active
            if steps == limits[0] or enough or active <= limits[2]:
                break
            for i in np.flatnonzero(rows.remaining).tolist():
                drawn[0, steps, i] = self._step(pool[i // (num_rows // self.num_shards)], rows, blocks[i], i)
                assert steps >= len(forced) or forced[steps, i] in (NOT_FORCED, drawn[0, steps, i])
            steps += 1
        ended = rows.remaining == 0
        status = RowStatus(rows.token, rows.length, rows.remaining, ended, 0 * ended, np.full(num_rows, steps))
        return pool, np.stack(status).astype(np.int32).view(HostArray), drawn.view(HostArray)

    def _step(self, pool: np.ndarray, rows: RowTable, blocks: np.ndarray, i: int) -> int:
        tokens = self._known[int(rows.uid_hash_low[i]), int(rows.uid_hash_high[i]), int(rows.sample_index[i])]
        position = rows.length[i] - 1
        assert rows.token[i] == tokens[position] and blocks[position // self.block_size] > 0
        pool[blocks[position // self.block_size], position % self.block_size] = rows.token[i]
        seen = pool[blocks[: self.blocks_for(position + 1)]].reshape(-1)[: position + 1]
        assert seen.tolist() == tokens[: position + 1], "a row reads what is not its own"
        rows.length[i] += 1
        rows.remaining[i] -= 1
        if rows.length[i] == len(tokens):
            rows.remaining[i] = 0
            return tokens[-1]
        rows.token[i] = tokens[rows.length[i] - 1]
        return rows.token[i]


def assert_accounts_balance(engine: SlotEngine) -> None:
    """Asserts that every block is free or held by exactly the rows and prompts that have it."""
    for device in engine.scheduler.devices:
        held: Counter[int] = Counter()
        for slot in device.slots:
            held.update(slot.blocks)
        for blocks in device.pool._prompts.values():
            held.update(blocks)
        assert +device.pool._holders == held
        assert sorted([*device.pool._free, *held]) == list(range(1, device.pool.num_blocks))


@given(data=st.data())
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("exact", [True, False])
def test_whatever_happens_every_row_reads_its_own_tokens_and_every_block_comes_back(
    exact: bool, data: st.DataObject
) -> None:
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
    )._replace(block_size=draw(st.sampled_from([2, 4])))
    assert shapes.block_size is not None
    per_row = -(-shapes.max_length // shapes.block_size)
    shapes = shapes._replace(num_blocks=per_row + 2 + draw(st.integers(0, 2 * per_row)))
    prompts = [
        Prompt(f"prompt-{i}", np.arange(1, n + 1, dtype=np.int32) + 100 * i, "", None) for i, n in enumerate(lengths)
    ]
    rows = [RolloutSequence(prompt, i, max_new, noise_step=0) for prompt in prompts for i in range(draw(small) + 1)]
    ends = [draw(st.integers(1, max_new)) for _ in rows]
    programs: Any = HostPrograms(shapes, rows, ends, num_shards)
    definition, dtype = DecoderDefinition.create(ODD), np.dtype("float32")
    engine = SlotEngine(definition, make_mesh(), shapes, eos_ids=(), dtype=dtype, exact=exact, programs=programs)
    weights: Any = (1,)
    engine.open(weights, REQUEST, suspends=True)
    waiting: deque[RolloutSequence | SuspendedSequence] = deque(rows)
    for _ in range(MAX_SEGMENTS):
        if not waiting and not engine.active_rows:
            break
        if draw(small) == 0:
            engine.load_weights(weights, policy_version=0)
        if waiting and draw(small):
            engine.prefill([prompts[i] for i in draw(st.sets(st.integers(0, len(prompts) - 1), max_size=4))])
        engine.admit([waiting.popleft() for _ in range(min(len(waiting), engine.num_free_slots))])
        engine.start_segment(SegmentLimits(draw(st.integers(1, 9)), draw(small)))
        segment = engine.finish_segment()
        assert_accounts_balance(engine)
        if draw(small) == 0 and engine.active_rows:
            segment.collect()
            for suspended in [engine.suspend(engine.active_rows[0])]:
                waiting.append(suspended if draw(st.booleans()) else suspended._replace(cache=None))
            assert_accounts_balance(engine)
        segment.collect()
    assert [row.num_tokens for row in rows] == ends
    assert all(len(row.token_ids) == row.num_tokens for row in rows)
    engine.close()


def test_blocks_of_a_row_that_broke_and_of_its_prompt_are_overwritten_before_others_get_them() -> None:
    pool = BlockPool(8)
    prompt = pool.allocate(2)
    pool.keep_prompt(b"prompt", prompt)
    pool.share(prompt[:1])
    row = [prompt[0], *pool.allocate(1)]
    pool.share(prompt[:1])
    sibling = [prompt[0], *pool.allocate(1)]
    pool.spoil(row, b"prompt")
    assert not pool.has_prompt(b"prompt")
    pool.release(row)
    # The block that a sibling still reads follows when it is free.
    assert set(pool.take_spoilt()) == {prompt[1], row[1]}
    pool.release(sibling)
    assert pool.take_spoilt() == [prompt[0]] and pool.num_available() == 7


def test_blocks_that_only_parked_rows_and_a_prompt_to_be_dropped_hold_are_available() -> None:
    pool = BlockPool(8)
    prompt = pool.allocate(2)
    pool.keep_prompt(b"prompt", prompt)
    rows = [[*prompt, *pool.allocate(1)] for _ in range(3)]
    pool.share(prompt * 3)
    assert (pool.num_available(), pool.num_available(rows[:2]), pool.num_available(rows)) == (2, 4, 7)
    assert pool.num_available(rows, keeping=b"prompt") == 5
