"""Tests that the windows of a long file are split into micro-batches of equal shapes."""

from __future__ import annotations

import numpy as np
import pytest

from app.batching.micro_batch_plan import MicroBatch, RowShape, SequenceLengths, TokenBudget
from app.batching.micro_batcher import EqualShapeBatcher, FixedRowBatcher, PackedRowBatcher, token_count_cost


def lengths(totals: list[int]) -> SequenceLengths:
    """Returns lengths of prompts of two tokens, all different."""
    return SequenceLengths(np.full(len(totals), 2), np.asarray(totals) - 2, np.arange(len(totals)))


def test_a_trimmed_tail_gets_empty_rows_on_each_device() -> None:
    cut = EqualShapeBatcher(FixedRowBatcher(2, trim_tail=True))
    plan = cut.plan(lengths([5] * 6), num_devices=2)
    shape = RowShape(16, 4)
    assert plan.micro_batches == (
        MicroBatch((((0,),), ((1,),), ((2,),), ((3,),)), shape),
        MicroBatch((((4,),), (), ((5,),), ()), shape),
    )


def test_a_short_row_becomes_a_full_one() -> None:
    budget = TokenBudget(64, row_length=32, share_prompts=False, balance=True)
    for num_samples in range(9, 60):
        own = PackedRowBatcher(budget, token_count_cost).plan(lengths([7] * num_samples), num_devices=1)
        plan = EqualShapeBatcher(PackedRowBatcher(budget, token_count_cost)).plan(
            lengths([7] * num_samples), num_devices=1
        )
        held = [sorted(i for row in one.rows for segment in row for i in segment) for one in plan.micro_batches]
        assert held == [sorted(i for row in one.rows for segment in row for i in segment) for one in own.micro_batches]
        assert {(len(one.rows), one.shape) for one in plan.micro_batches} == {(2, RowShape(32, 32))}


def test_a_lone_micro_batch_stays_as_it_is() -> None:
    cut = FixedRowBatcher(8, trim_tail=True)
    assert EqualShapeBatcher(cut).plan(lengths([5]), num_devices=2) == cut.plan(lengths([5]), num_devices=2)


@pytest.mark.parametrize("totals", [[3], [16, 9, 3]])
def test_fixed_rows_can_be_told_their_shape(totals: list[int]) -> None:
    shape = RowShape(48, 24)
    plan = FixedRowBatcher(2, trim_tail=False, shape=shape).plan(lengths(totals), num_devices=1)
    assert {one.shape for one in plan.micro_batches} == {shape}
