"""Tests the curriculum, which draws prompts by their pass rates."""

import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.prompts.curriculum import FLOOR, PassRateOrder

RATES = [0.0, 0.5, 1.0, 0.25, 0.9]
NAMES = [f"p{i}" for i in range(len(RATES))]


def make_order(num_rows=5, seed=0, ends=(), shares=(1.0,)):
    rows = np.split(np.arange(num_rows), ends)
    return PassRateOrder(seed, [f"p{i}" for i in range(num_rows)], rows, shares)


def with_rates(order, rates):
    order.observe(zip(NAMES, rates, strict=False))
    return order


def draw_freely(order, position, count):
    """Draws a round as if no earlier round were pending."""
    rows = order.row_indices(position, count)
    order.observe((f"p{row}", None) for row in rows)
    return rows.tolist()


def test_prompts_are_drawn_in_proportion_to_p_times_1_minus_p_plus_a_floor():
    order = with_rates(make_order(6), RATES)
    weights = np.array([p * (1 - p) + FLOOR for p in [*RATES, 0.5]])
    assert weights.tolist() == pytest.approx([0.02, 0.27, 0.02, 0.2075, 0.11, 0.27])
    num = 5_000
    first = Counter(draw_freely(order, position, 2)[0] for position in range(num))
    expected = weights / weights.sum()
    for row, share in enumerate(expected):
        assert abs(first[row] / num - share) < 4 * math.sqrt(share * (1 - share) / num)


def test_the_second_prompt_of_a_round_is_drawn_from_the_remaining_prompts_by_weight():
    order = with_rates(make_order(3), RATES)
    weights = np.array([FLOOR, 0.25 + FLOOR, FLOOR])
    pairs = Counter(tuple(draw_freely(order, position, 2)) for position in range(5_000))
    for (first, second), count in pairs.items():
        left = weights.sum() - weights[first]
        share = weights[first] / weights.sum() * weights[second] / left
        assert abs(count / 5_000 - share) < 4 * math.sqrt(share / 5_000)
    assert len(pairs) == 6


def test_curriculum_keeps_the_share_of_each_source_of_a_mixture():
    """Two prompts that are always solved make up two thirds, because they are a source of weight 2."""
    order = make_order(6, ends=[2], shares=[2.0, 1.0])
    order.observe([("p0", 1.0), ("p1", 1.0), ("p2", 0.5), ("p3", 0.0)])
    first = Counter(draw_freely(order, position, 1)[0] for position in range(10_000))
    assert first[0] + first[1] == pytest.approx(6667, abs=200)
    assert first[2] / first[3] == pytest.approx((0.25 + FLOOR) / FLOOR, rel=0.4)


def test_a_pass_rate_moves_halfway_to_each_new_observation():
    order = make_order(2)
    for observed, expected in [(None, {}), (0.75, 0.75), (0.25, 0.5), (1.0, 0.75), (None, 0.75), (0.0, 0.375)]:
        order.observe([("p1", observed), ("gone", 1.0)])
        assert order.pass_rates == ({"p1": expected} if expected else {})


@given(st.integers(0, 2**31 - 1), st.lists(st.floats(0, 1), min_size=5, max_size=5), st.integers(0, 10**12))
def test_restored_pass_rates_draw_the_same_prompts(seed, rates, position):
    order = with_rates(make_order(50, seed), rates)
    with_rates(order, rates[::-1])
    restored = make_order(50, seed)
    restored.observe(json.loads(json.dumps(order.pass_rates)).items())
    assert restored.pass_rates == order.pass_rates
    assert restored.row_indices(position, 20).tolist() == order.row_indices(position, 20).tolist()
    assert restored.metrics() == order.metrics()


def test_pending_prompts_are_drawn_again_only_if_no_others_are_left():
    order = with_rates(make_order(10), [0.5] * 5)
    rounds = [order.row_indices(4 * number, 4).tolist() for number in range(3)]
    assert len({*rounds[0], *rounds[1]}) == 8
    assert set(rounds[2][:2]) == set(range(10)) - {*rounds[0], *rounds[1]} and len(set(rounds[2])) == 4
    order.observe((f"p{row}", 0.5) for row in range(10))
    assert order.row_indices(12, 10).tolist() != list(range(10))


def test_curriculum_metrics_are_over_the_seen_prompts():
    order = make_order(8)
    assert order.metrics()["data/seen_fraction"] == 0 and np.isnan(order.metrics()["data/pass_rate_mean"])
    assert with_rates(order, [0.0, 0.1, 0.9, 1.0, 0.95]).metrics() == pytest.approx({
        "data/seen_fraction": 5 / 8,
        "data/pass_rate_mean": 0.59,
        "data/pass_rate_low_fraction": 0.2,
        "data/pass_rate_middle_fraction": 0.4,
        "data/pass_rate_high_fraction": 0.4,
    })  # fmt: skip
