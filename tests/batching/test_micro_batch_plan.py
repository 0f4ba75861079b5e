from dataclasses import replace

import numpy as np
import pytest

from app.batching.micro_batch_plan import (
    MicroBatchPlan,
    RowShape,
    SequenceCost,
    SequenceLengths,
    TokenBudget,
    choose_row_length,
    plan_fixed_rows,
    plan_token_budget,
)
from app.batching.micro_batch_shapes import candidate_shapes
from app.batching.packing_stats import packing_stats
from tests.batching.plans import (
    check_plan,
    computed_tokens,
    device_work,
    flops,
    group,
    joined,
    laid_out_tokens,
    lone,
    make_budget,
    members,
    per_token,
    random_case,
    tokens_of,
)


def planned(host: SequenceLengths, budget: TokenBudget, num_devices: int = 1) -> MicroBatchPlan:
    plan = plan_token_budget(host, budget, flops, num_devices=num_devices)
    check_plan(plan, host, budget, num_devices)
    return plan


def rows_of(plan: MicroBatchPlan) -> set[frozenset]:
    """Returns the sets of samples that share a row, independent of the row's position."""
    return {frozenset(members([row])) for m in plan.micro_batches for row in m.rows if row}


@pytest.mark.parametrize(
    ("quota", "longest", "expected"),
    [
        (4096, 1024, 2048),
        (4096, 1025, 4096),
        (16384, 512 + 1024, 4096),
        (64, 5, 64),
        (4096, 5, 256),
        (1000, 800, 896),
        (1000, 240, 500 // 128 * 128),
    ],
)
def test_row_length_fits_two_longest_samples_in_whole_blocks_within_the_quota(quota, longest, expected):
    assert choose_row_length(quota, longest) == expected


@pytest.mark.parametrize(
    ("count", "rows_per_device", "num_devices", "trim_tail", "expected"),
    [
        (5, 2, 1, True, [2, 2, 1]),
        (5, None, 1, False, [5]),
        (9, 2, 4, True, [8, 4]),
        (9, 2, 4, False, [8, 8]),
        (9, None, 4, True, [12]),
        (0, 2, 2, True, [2]),
    ],
)
def test_fixed_micro_batches_fill_whole_devices(count, rows_per_device, num_devices, trim_tail, expected):
    plan = plan_fixed_rows(
        lone(*[4] * count), rows_per_device=rows_per_device, num_devices=num_devices, trim_tail=trim_tail
    )
    assert [len(m.rows) for m in plan.micro_batches] == expected
    assert [i for m in plan.micro_batches for i in members(m.rows)] == list(range(count))
    assert all(len(row) <= 1 for m in plan.micro_batches for row in m.rows)
    # Every row holds the longest sample and the longest completion.
    longest = joined(lone(23, prompt=20), lone(10, prompt=1))
    plan = plan_fixed_rows(longest, rows_per_device=1, num_devices=num_devices, trim_tail=trim_tail)
    assert {m.shape for m in plan.micro_batches} == {RowShape(24, 12)}


def test_plan_parts_of_all_hosts_make_up_the_whole_plan():
    plan = plan_token_budget(lone(*range(100, 164)), make_budget(1024), flops, num_devices=8)
    parts = [plan.part(host, 4).micro_batches for host in range(4)]
    for number, whole in enumerate(plan.micro_batches):
        own = [part[number] for part in parts]
        assert tuple(row for one in own for row in one.rows) == whole.rows
        assert {(len(one.rows), one.shape) for one in own} == {(len(whole.rows) // 4, whole.shape)}


@pytest.mark.parametrize("num_hosts", [1, 8])
def test_plan_over_hosts_fills_rows_and_balances_flops_over_devices(num_hosts):
    fills, imbalances = [], []

    def cost(lengths: np.ndarray) -> np.ndarray:
        """Attention costs as much as the rest at 8,000 tokens, as in SmolLM2-135M."""
        return 8000 * lengths + lengths**2

    for seed in range(5):
        rng = np.random.default_rng(seed)
        hosts = [
            joined(*(group(150, *np.clip(rng.lognormal(mean, 0.8, 8), 1, 1600).astype(int)) for _ in range(8)))
            for mean in rng.normal(6.2, 0.2, num_hosts)
        ]
        budget = make_budget(16384, share_prompts=True)
        plan = plan_token_budget(joined(*hosts), budget, cost, num_devices=8 * num_hosts)
        stats = packing_stats(plan, joined(*hosts), cost, num_devices=8 * num_hosts)
        fills.append(stats["fill"])
        imbalances.append(stats["flops_imbalance"])
    assert np.mean(fills) > 0.95
    assert np.mean(imbalances) < 1.06 and max(imbalances) < 1.08


def test_samples_are_packed_into_rows_that_fill_the_quota():
    plan = planned(lone(6, 3, 4, 7), make_budget(10))
    assert rows_of(plan) == {frozenset({0, 2}), frozenset({1, 3})}
    plan = planned(lone(4, 10, 6), make_budget(10))
    assert rows_of(plan) == {frozenset({1}), frozenset({0, 2})}
    # Two samples of 40 would leave 20 tokens empty; 40 + 30 + 30 fills the row.
    plan = planned(lone(*[40] * 6, *[30] * 12), make_budget(100))
    assert [m.shape.num_tokens for m in plan.micro_batches] == [100] * 6


def test_samples_too_long_for_quota_or_row_are_refused():
    with pytest.raises(ValueError, match="4097 tokens, more than max_tokens_per_device = 4096"):
        choose_row_length(4096, 4097)
    with pytest.raises(ValueError, match="sample 2 has 4097 tokens, too many for max_tokens_per_device = 4096"):
        plan_token_budget(lone(5, 5, 4097), make_budget(4096), flops, num_devices=1)
    with pytest.raises(ValueError, match=r"sample 0 has 3000 .* = 4096, which .* of 2048"):
        plan_token_budget(lone(3000), make_budget(4096, 1000), flops, num_devices=1)


def test_few_samples_make_one_micro_batch_of_a_small_shape():
    for count in (0, 1, 3):
        budget = make_budget(1024, 512, share_prompts=True)
        assert planned(lone(*[300] * count), budget, num_devices=4).num_micro_batches == 1
    plan = planned(lone(100, 90), make_budget(4096))
    assert [(len(m.rows), m.shape.num_tokens) for m in plan.micro_batches] == [(1, 256)]
    assert computed_tokens(planned(lone(), make_budget(4096))) == 256


def test_only_the_last_micro_batch_may_have_a_smaller_shape():
    seen = set()
    for seed in range(30):
        lengths = np.random.default_rng(seed).integers(1, 1000, 40)
        plan = planned(lone(*lengths), make_budget(4096, 1000), num_devices=2)
        *full, tail = plan.micro_batches
        assert {(len(m.rows), m.shape.num_tokens) for m in full} <= {(4, 2048)}
        seen.add((len(tail.rows), tail.shape.num_tokens))
    assert seen <= {(2 * shape.rows_per_device, shape.row_length) for shape in candidate_shapes(4096, 2048)}
    assert 2 < len(seen) < 24


@pytest.mark.parametrize("balance", [False, True])
def test_a_shared_prompt_occurs_once_per_row(balance):
    host = group(100, 64, 64, 64, 64)
    shared = planned(host, make_budget(1024, share_prompts=True, balance=balance))
    assert laid_out_tokens(shared, host) == 356
    assert [row for m in shared.micro_batches for row in m.rows] == [((0, 1, 2, 3),)]
    assert laid_out_tokens(planned(host, make_budget(1024, balance=balance)), host) == 656


def test_groups_are_split_only_if_that_saves_a_row():
    host = group(10, *[30] * 6)
    plan = planned(host, make_budget(100, share_prompts=True))
    assert sorted(tokens_of(row, host) for m in plan.micro_batches for row in m.rows) == [100, 100]
    # Three groups of 60 in rows of 100: whole, each needs a row; split, two rows are enough.
    host = joined(*[group(10, *[10] * 5)] * 3)
    plan = planned(host, make_budget(100, share_prompts=True))
    assert plan.num_micro_batches == 2
    assert laid_out_tokens(plan, host) == 190 <= computed_tokens(plan) <= 200
    # Groups are not split if that saves nothing.
    plan = planned(joined(*[group(50, *[10] * 5)] * 3), make_budget(100, share_prompts=True))
    segments = {segment for m in plan.micro_batches for row in m.rows for segment in row}
    assert segments == {tuple(range(first, first + 5)) for first in (0, 5, 10)}


def test_random_plans_contain_every_sample_once_within_the_quota():
    for seed in range(150):
        lengths, budget, num_devices = random_case(seed)
        off, on, again = (
            plan_token_budget(lengths, replace(budget, balance=balance), flops, num_devices=num_devices)
            for balance in (False, True, True)
        )
        for plan in (off, on):
            check_plan(plan, lengths, budget, num_devices)
        assert on == again and off.num_micro_batches == on.num_micro_batches


def test_balancing_evens_out_the_cost_of_devices():
    rng = np.random.default_rng(0)
    host = lone(*np.clip(rng.lognormal(6.2, 1, 256), 2, 4096).astype(int))

    def imbalance(budget: TokenBudget, work: SequenceCost) -> float:
        plan = plan_token_budget(host, budget, work, num_devices=4)
        of_device = device_work(plan, host, 4).sum(axis=0)
        return of_device.max() / of_device.mean()

    assert imbalance(make_budget(4096), flops) < 1.01
    assert imbalance(make_budget(4096), per_token) > 1.02
    assert imbalance(make_budget(4096, balance=False), flops) > 1.02


def test_rows_of_similar_cost_are_in_the_same_micro_batch():
    # All eight rows are full: half of them with one long sample, half with many short ones.
    host = lone(*[1000] * 4, *[100] * 40)
    work = device_work(planned(host, make_budget(1000, balance=True), num_devices=4), host, 4)
    assert [(w.min(), w.max()) for w in work] == [(2_000_000, 2_000_000), (1_100_000, 1_100_000)]
