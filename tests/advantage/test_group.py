from __future__ import annotations

from statistics import fmean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.advantage.group import credit_by_group, group_moments, grpo_advantages, zero_variance_fraction
from tests.tiny import make_sample

GRADED = st.lists(st.tuples(st.floats(-100, 100), st.integers(-3, 3)), min_size=1, max_size=30)
"""Rewards, each with a group id: groups of any size, in any order."""


def advantages(rewards, group_ids) -> np.ndarray:
    return grpo_advantages(np.asarray(rewards, np.float64), np.asarray(group_ids))


def arrays(graded: list[tuple[float, int]]) -> tuple[np.ndarray, np.ndarray]:
    rewards, group_ids = zip(*graded, strict=True)
    return np.asarray(rewards, np.float64), np.asarray(group_ids)


def test_two_groups_of_three_match_the_published_numbers():
    rewards = [0.57450044, 0.09968603, 0.7419659, 0.8941783, 0.59656656, 0.45325184]
    expected = [0.307498, -1.117636, 0.810138, 1.094526, -0.228671, -0.865855]
    np.testing.assert_allclose(advantages(rewards, [0, 0, 0, 1, 1, 1]), expected, atol=1e-5)


def test_the_deviation_has_one_degree_of_freedom_less():
    # 0 and 1: mean 1/2, variance (1/4 + 1/4) / (2 - 1) = 1/2.
    np.testing.assert_allclose(advantages([0.0, 1.0], [0, 0]), np.array([-0.5, 0.5]) / (0.5**0.5 + 1e-6), rtol=1e-12)


def test_groups_of_uneven_size_are_compared_only_with_themselves():
    # 1 2 3: mean 2, deviation 1. 10 20: mean 15, deviation sqrt(50).
    expected = [-1, 0, 1, -5 / 50**0.5, 5 / 50**0.5]
    np.testing.assert_allclose(advantages([1, 2, 3, 10, 20], [0, 0, 0, 1, 1]), expected, atol=2e-6)


def test_a_group_of_one_has_advantage_zero():
    assert advantages([7.5, 0.0, 1.0], [4, 5, 5])[0] == 0.0


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -1e6 / 3])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_equal_rewards_give_exactly_zero(reward, size):
    assert np.all(advantages([reward] * size, [0] * size) == 0.0)


def test_members_of_a_group_need_not_stand_together_nor_ids_start_at_zero():
    together = advantages([1, 2, 3, 10, 20], [0, 0, 0, 1, 1])
    apart = advantages([10, 1, 2, 20, 3], [900, -7, -7, 900, -7])
    np.testing.assert_allclose(apart, together[[3, 0, 1, 4, 2]], rtol=1e-12)


@given(GRADED)
def test_advantages_equal_a_slow_oracle_in_float64(graded):
    rewards, group_ids = arrays(graded)
    for reward, group, advantage in zip(rewards, group_ids, advantages(rewards, group_ids), strict=True):
        siblings = [r for r, g in graded if g == group]
        deviation = stdev(siblings) if len(siblings) > 1 else 0.0
        assert advantage == pytest.approx((reward - fmean(siblings)) / (deviation + 1e-6), rel=1e-6, abs=1e-6)


@given(GRADED, st.randoms())
def test_shuffling_samples_shuffles_their_advantages(graded, random):
    order = list(range(len(graded)))
    random.shuffle(order)
    rewards, group_ids = arrays(graded)
    np.testing.assert_allclose(
        advantages(rewards[order], group_ids[order]), advantages(rewards, group_ids)[order], atol=1e-6
    )


@given(GRADED)
def test_advantages_of_every_group_sum_to_zero(graded):
    rewards, group_ids = arrays(graded)
    credit = advantages(rewards, group_ids)
    assert np.abs([credit[group_ids == group].sum() for group in np.unique(group_ids)]).max() < 1e-6


def test_moments_stand_beside_every_member():
    means, deviations = group_moments(np.array([1.0, 5.0, 3.0]), np.array([2, 0, 2]))
    np.testing.assert_allclose(means, [2, 5, 2])
    np.testing.assert_allclose(deviations, [2**0.5, 0, 2**0.5])


def test_zero_variance_groups_are_counted_as_a_share_of_groups():
    rewards, group_ids = np.array([1.0, 1.0, 0.0, 1.0, 5.0]), np.array([3, 3, 8, 8, 9])
    assert zero_variance_fraction(rewards, group_ids) == pytest.approx(2 / 3)
    assert zero_variance_fraction(np.zeros(0), np.zeros(0, int)) == 0.0


def test_credit_lies_on_every_token_that_the_policy_wrote_and_on_no_other():
    samples = [
        make_sample([5, 6, 7], reward=1.0, loss_mask=np.array([True, False, True])),
        make_sample([5], reward=0.0, sample_index=1),
    ]
    credited = credit_by_group(samples)
    advantage = np.float32(0.5 / (0.5**0.5 + 1e-6))
    np.testing.assert_array_equal(credited[0].advantages, [advantage, 0, advantage])
    np.testing.assert_array_equal(credited[1].advantages, [-advantage])
    assert np.asarray(credited[0].advantages).dtype == np.float32
    assert samples[0].advantages is None
