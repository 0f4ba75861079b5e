"""Tests of intervals and tests against hand-computed values and slow oracles, and without data."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from app.report.confidence_intervals import (
    clustered_share_interval,
    mean_interval,
    sign_test,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("share", "count", "low", "high"),
    [
        (0.8, 10, 0.4902, 0.9433),
        (0.0, 10, 0.0, 0.2775),
        (1.0, 10, 0.7225, 1.0),
        (0.5, 1000, 0.4691, 0.5309),
    ],
)
def test_the_interval_of_a_share_is_wilsons(share: float, count: int, low: float, high: float) -> None:
    assert wilson_interval(share, count) == pytest.approx((low, high), abs=1e-4)
    for bound in wilson_interval(share, count):
        # What defines it: the true shares that the observed one lies 1.96 of their standard errors away from.
        if 0 < bound < 1:
            assert abs(share - bound) == pytest.approx(1.959964 * np.sqrt(bound * (1 - bound) / count), abs=1e-7)


def test_shares_of_nothing_and_all_have_wilsons_interval() -> None:
    shares = np.array([1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    assert clustered_share_interval(shares, num_samples=1) == pytest.approx(wilson_interval(0.8, 10))
    assert clustered_share_interval(np.ones(10), num_samples=1) == pytest.approx(wilson_interval(1.0, 10))


def test_samples_that_are_alike_count_once_and_those_that_differ_count_all() -> None:
    alike = np.repeat([1.0, 0.0], 20)
    assert clustered_share_interval(alike, num_samples=8) == pytest.approx(wilson_interval(0.5, 40))
    # A half of each prompt's: the prompts tell nothing apart, so the samples are all there is.
    assert clustered_share_interval(np.full(40, 0.5), num_samples=8) == pytest.approx(wilson_interval(0.5, 320))
    assert clustered_share_interval(np.ones(40), num_samples=8) == pytest.approx(wilson_interval(1.0, 40))


def test_the_interval_of_shares_holds_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(1000):
        # Prompts differ in how hard they are; over all of them two in three samples are right.
        shares = rng.binomial(4, rng.beta(2, 1, size=60)) / 4
        low, high = clustered_share_interval(shares, num_samples=4) or (0.0, 0.0)
        hits += low <= 2 / 3 <= high
    assert 0.93 <= hits / 1000 <= 0.97


def test_one_prompt_and_equal_values_have_no_interval() -> None:
    assert clustered_share_interval(np.array([0.5]), num_samples=8) is None
    assert mean_interval(np.array([3.0])) is None and mean_interval(np.zeros(100)) is None


def test_the_interval_of_a_mean_is_students() -> None:
    # By hand: mean 2, deviation 1, error 1/sqrt(3), t = 4.302653.
    assert mean_interval(np.array([1.0, 2.0, 3.0])) == pytest.approx(
        (2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3))
    )


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (1, 0), (5, 5), (9, 2), (2, 9), (6, 0)])
def test_the_sign_test_counts_all_ways_in_which_coins_may_fall(better: int, worse: int) -> None:
    falls = [sum(coins) for coins in product((0, 1), repeat=better + worse)]
    uneven = abs(better - worse)
    expected = np.mean([abs(2 * heads - better - worse) >= uneven for heads in falls])
    assert sign_test(better, worse) == pytest.approx(expected)
