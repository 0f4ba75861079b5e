from __future__ import annotations

import numpy as np

from app.batching.micro_batch_plan import MicroBatch, MicroBatchPlan, RowShape, plan_token_budget
from app.batching.packing_stats import packing_stats
from tests.batching.plans import flops, group, joined, lone, per_token, random_case

LONG_ROWS = RowShape(10, 10)


def figures(plan, lengths, *, work=per_token, num_devices: int = 1) -> dict[str, float]:
    return packing_stats(plan, lengths, work, num_devices=num_devices)


def test_figures_by_hand():
    plan = MicroBatchPlan(
        (MicroBatch((((0, 1),), ((2,),)), LONG_ROWS), MicroBatch(((), ((3,),)), RowShape(2, 2))),
    )
    assert figures(plan, joined(group(2, 3, 4), lone(7, 1)), num_devices=2) == {
        "real_tokens": 9 + 7 + 1,
        "computed_tokens": 24,
        "fill": 17 / 24,
        "num_micro_batches": 2,
        "num_rows": 4,
        "num_dummy_rows": 1,
        "dummy_fraction": 1 / 4,
        # Tokens: a shared prompt is worked on once.
        "flops_imbalance": 9 / 8.5,
        "seqlen_min": 8,
        "seqlen_max": 11,
        "seqlen_mean": 9.5,
        "seqlen_minmax_diff": 3,
        "seqlen_balanced_min": 8,
        "seqlen_balanced_max": 11,
    }


def test_token_sums_of_verl():
    # github.com/verl-project/verl: 8..1 over two ranks: 26 and 10 in order, 18 and 18 dealt.
    host = lone(*range(8, 0, -1))
    plan = MicroBatchPlan((MicroBatch((((0,), (3,)), ((5,), (6,)), ((1,), (2,)), ((4,), (7,))), RowShape(15, 15)),))
    found = figures(plan, host, num_devices=2)
    assert [found[f"seqlen_{name}"] for name in ("min", "max", "minmax_diff", "mean")] == [10, 26, 16, 18.0]
    assert [found[f"seqlen_balanced_{name}"] for name in ("min", "max")] == [18, 18]


def test_work_is_that_of_the_fullest_device_over_the_mean():
    host = lone(3, 1)
    plan = MicroBatchPlan((MicroBatch((((0,),), ((1,),)), LONG_ROWS),))
    assert figures(plan, host, num_devices=2)["flops_imbalance"] == 1.5
    assert figures(plan, host, work=np.square, num_devices=2)["flops_imbalance"] == 9 / 5


def test_figures_of_no_samples():
    found = figures(MicroBatchPlan((MicroBatch(((),), LONG_ROWS),)), lone())
    assert found["fill"] == 0.0
    assert found["dummy_fraction"] == 1.0
    assert found["flops_imbalance"] == 1.0


def test_fill_and_imbalance_of_random_plans_are_ratios():
    for seed in range(200):
        lengths, budget, num_devices = random_case(seed)
        plan = plan_token_budget(lengths, budget, flops, num_devices=num_devices)
        found = figures(plan, lengths, work=flops, num_devices=num_devices)
        assert 0 <= found["fill"] <= 1 <= found["flops_imbalance"]
