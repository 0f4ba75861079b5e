"""Tests the ways to split samples into micro-batches, and their statistics."""

import numpy as np
import pytest

from app.batching.micro_batch_plan import MicroBatch, MicroBatchPlan, RowShape, TokenBudget
from app.batching.micro_batcher import (
    EqualShapeBatcher,
    FixedRowBatcher,
    PackedRowBatcher,
    sequence_lengths,
    token_count_cost,
)
from app.batching.packing_stats import packing_stats
from app.batching.token_batch import pack_tokens, unpack_per_token
from tests.batching.plans import flops, group, joined, lone, make_budget, members, per_token
from tests.tiny import make_mesh, make_sample, random_samples


def test_samples_with_equal_prompts_have_equal_prompt_keys():
    samples = [
        make_sample([0] * 3, prompt_ids=[1, 2], group_id=0),
        make_sample([0], prompt_ids=[1, 3], group_id=1),
        make_sample([], prompt_ids=[1, 2], group_id=2),
    ]
    lengths = sequence_lengths(samples)
    assert lengths.prompts.tolist() == [2, 2, 2]
    assert lengths.completions.tolist() == [3, 1, 0]
    first, other, again = lengths.prompt_keys.tolist()
    assert first == again != other
    assert lengths.totals.tolist() == [5, 3, 2]


@pytest.mark.parametrize("mesh_shape", [(1, 1, 1), (2, 2, 2)])
def test_packed_rows_fill_the_data_axes_of_the_mesh(mesh_shape):
    samples = random_samples(8, 4, vocab_size=97)
    cut = PackedRowBatcher(make_budget(64, 16, share_prompts=True), flops)(samples, make_mesh(mesh_shape))
    devices = mesh_shape[0] * mesh_shape[1]
    assert all(len(m.rows) % devices == 0 for m in cut.local_plan.micro_batches)
    assert sorted(members([row for m in cut.local_plan.micro_batches for row in m.rows])) == list(range(32))
    found = cut.packing_stats()
    assert found["computed_tokens"] == sum(len(m.rows) * m.shape.num_tokens for m in cut.local_plan.micro_batches)
    packed = [pack_tokens(samples, m) for m in cut.local_plan.micro_batches]
    assert found["real_tokens"] == sum(int((p.layout.segment_ids > 0).sum()) for p in packed)
    for sample, values in zip(
        samples, unpack_per_token([p.targets for p in packed], samples, cut.local_plan), strict=True
    ):
        np.testing.assert_array_equal(values, sample.completion_ids)


@pytest.mark.parametrize("rows", [FixedRowBatcher(2, trim_tail=True), PackedRowBatcher(make_budget(64), flops)])
def test_an_empty_batch_becomes_one_micro_batch_of_padding(rows):
    cut = rows([], make_mesh((2, 1, 1)))
    assert len(cut.local_plan.micro_batches) == 1
    assert cut.packing_stats()["dummy_fraction"] == 1.0


def test_equal_shape_batcher_pads_a_trimmed_tail_on_each_device() -> None:
    cut = EqualShapeBatcher(FixedRowBatcher(2, trim_tail=True))
    plan = cut.plan(lone(*[5] * 6, prompt=2), num_devices=2)
    shape = RowShape(16, 4)
    assert plan.micro_batches == (
        MicroBatch((((0,),), ((1,),), ((2,),), ((3,),)), shape),
        MicroBatch((((4,),), (), ((5,),), ()), shape),
    )


def test_equal_shape_batcher_pads_all_micro_batches_to_the_largest_shape() -> None:
    batcher = PackedRowBatcher(TokenBudget(64, 32, share_prompts=False, balance=True), token_count_cost)
    for num_samples in range(9, 60, 5):
        lengths = lone(*[7] * num_samples, prompt=2)
        own, plan = (one.plan(lengths, num_devices=1) for one in (batcher, EqualShapeBatcher(batcher)))
        assert [sorted(members(one.rows)) for one in plan.micro_batches] == [
            sorted(members(one.rows)) for one in own.micro_batches
        ]
        assert {(len(one.rows), one.shape) for one in plan.micro_batches} == {(2, RowShape(32, 32))}

    lone_one = FixedRowBatcher(8, trim_tail=True)
    assert EqualShapeBatcher(lone_one).plan(lone(5), num_devices=2) == lone_one.plan(lone(5), num_devices=2)


def test_fixed_row_batcher_uses_a_given_row_shape() -> None:
    shape = RowShape(48, 24)
    plan = FixedRowBatcher(2, trim_tail=False, shape=shape).plan(lone(16, 9, 3, prompt=2), num_devices=1)
    assert [one.shape for one in plan.micro_batches] == [shape, shape]


def test_packing_statistics_equal_hand_computed_values():
    plan = MicroBatchPlan(
        (MicroBatch((((0, 1),), ((2,),)), RowShape(10, 10)), MicroBatch(((), ((3,),)), RowShape(2, 2)))
    )
    lengths = joined(group(2, 3, 4), lone(7, 1))
    # With squared lengths as the cost, a shared prompt is counted once.
    by_square = packing_stats(plan, lengths, np.square, num_devices=2)["flops_imbalance"]
    assert by_square == pytest.approx((4 + 21 + 32) / ((4 + 21 + 32 + 49 + 1) / 2))
    assert packing_stats(plan, lengths, per_token, num_devices=2) == {
        "real_tokens": 9 + 7 + 1,
        "computed_tokens": 24,
        "fill": 17 / 24,
        "num_micro_batches": 2,
        "num_rows": 4,
        "num_dummy_rows": 1,
        "dummy_fraction": 1 / 4,
        "flops_imbalance": 9 / 8.5,
        "seqlen_min": 8,
        "seqlen_max": 11,
        "seqlen_mean": 9.5,
        "seqlen_minmax_diff": 3,
        "seqlen_balanced_min": 8,
        "seqlen_balanced_max": 11,
    }


def test_sequence_length_statistics_equal_those_of_verl():
    # In github.com/verl-project/verl, lengths 8 to 1 over two ranks are 26 and 10 in order, 18 and 18 balanced.
    host = lone(*range(8, 0, -1))
    plan = MicroBatchPlan((MicroBatch((((0,), (3,)), ((5,), (6,)), ((1,), (2,)), ((4,), (7,))), RowShape(15, 15)),))
    found = packing_stats(plan, host, per_token, num_devices=2)
    assert [found[f"seqlen_{name}"] for name in ("min", "max", "minmax_diff", "mean")] == [10, 26, 16, 18.0]
    assert [found[f"seqlen_balanced_{name}"] for name in ("min", "max")] == [18, 18]
