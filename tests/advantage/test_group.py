from math import comb
from statistics import fmean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.advantage.group import (
    GROUP_ADVANTAGES,
    assign_group_advantages,
    dr_grpo_advantages,
    grpo_advantages,
    kl_penalized_rewards,
    maxrl_advantages,
    rloo_advantages,
    task_rewards,
    zero_variance_fraction,
)
from app.update.kl import KL_ESTIMATORS, k1
from tests.tiny import make_sample

GRADED = st.lists(st.tuples(st.floats(-100, 100), st.integers(-3, 3)), min_size=1, max_size=30)
"""Strategy that draws rewards with group ids: groups of any size, in any order."""


def test_grpo_advantages_equal_the_published_numbers():
    rewards = np.array([0.57450044, 0.09968603, 0.7419659, 0.8941783, 0.59656656, 0.45325184])
    expected = [0.307498, -1.117636, 0.810138, 1.094526, -0.228671, -0.865855]
    np.testing.assert_allclose(grpo_advantages(rewards, np.array([0, 0, 0, 1, 1, 1])), expected, atol=1e-5)


@pytest.mark.parametrize("estimator", GROUP_ADVANTAGES.values(), ids=GROUP_ADVANTAGES)
def test_equal_rewards_give_advantages_of_exactly_zero(estimator):
    for reward, size in ((0.1, 1), (0.1, 7), (-1e6 / 3, 2), (-1e6 / 3, 7)):
        assert np.all(estimator(np.full(size, reward), np.zeros(size, int)) == 0.0)
    assert estimator(np.zeros(0), np.zeros(0, int)).shape == (0,)
    assert assign_group_advantages([], advantages=estimator) == []


@given(GRADED)
def test_group_estimators_equal_the_formulas_of_their_papers_in_float64(graded):
    rewards, group_ids = (np.asarray(x) for x in zip(*graded, strict=True))
    grpo, without_deviation, leave_one_out = (
        estimator(rewards, group_ids) for estimator in (grpo_advantages, dr_grpo_advantages, rloo_advantages)
    )
    for i, (reward, group) in enumerate(graded):
        siblings = [r for r, g in graded if g == group]
        others = [r for j, (r, g) in enumerate(graded) if g == group and j != i]
        deviation = stdev(siblings) if others else 0.0
        assert grpo[i] == pytest.approx((reward - fmean(siblings)) / (deviation + 1e-6), rel=1e-6, abs=1e-6)
        assert without_deviation[i] == pytest.approx(reward - fmean(siblings), rel=1e-9, abs=1e-9)
        assert leave_one_out[i] == pytest.approx(reward - fmean(others) if others else 0.0, rel=1e-9, abs=1e-9)


def test_maxrl_divides_centered_rewards_by_the_success_rate():
    rewards, groups = np.array([1.0, 0, 0, 0, 1, 1, 0, 1, 0, 0]), np.array([5, 5, 5, 5, 2, 2, 2, 2, 7, 7])
    expected = [3, -1, -1, -1, 1 / 3, 1 / 3, -1, 1 / 3, 0, 0]
    np.testing.assert_allclose(maxrl_advantages(rewards, groups), expected, rtol=1e-15)
    assert maxrl_advantages(np.array([0.5, 0.0]), np.array([0, 0])).tolist() == [1, -1]


@pytest.mark.parametrize("size", [2, 5, 16])
@pytest.mark.parametrize("p", [0.01, 0.3, 0.9])
def test_maxrl_expected_gradient_is_the_truncated_log_success_rate(size, p):
    """Averages A dlog(probability)/dp over all possible groups of samples with success probability p."""
    expected_slope = 0.0
    for num_right in range(size + 1):
        rewards = np.array([1.0] * num_right + [0.0] * (size - num_right))
        slopes = np.where(rewards == 1, 1 / p, -1 / (1 - p))
        probability = comb(size, num_right) * p**num_right * (1 - p) ** (size - num_right)
        expected_slope += probability * np.mean(maxrl_advantages(rewards, np.zeros(size, int)) * slopes)
    # The slope of -sum_k (1 - p)^k / k.
    assert expected_slope == pytest.approx(sum((1 - p) ** (k - 1) for k in range(1, size)), rel=1e-12)


def test_zero_variance_fraction_counts_groups_with_equal_rewards_but_ignores_single_samples():
    rewards, group_ids = np.array([1.0, 1.0, 0.0, 1.0, 5.0]), np.array([3, 3, 8, 8, 9])
    assert zero_variance_fraction(rewards, group_ids) == 0.5
    assert np.isnan(zero_variance_fraction(rewards[4:], group_ids[4:]))


def test_every_unmasked_token_gets_the_advantage_of_its_sample():
    samples = [
        make_sample([5, 6, 7], reward=1.0, loss_mask=np.array([True, False, True])),
        make_sample([5], reward=0.0, sample_index=1),
    ]
    with_advantages = assign_group_advantages(samples, advantages=grpo_advantages)
    advantage = np.float32(0.5 / (0.5**0.5 + 1e-6))
    np.testing.assert_array_equal(with_advantages[0].advantages, [advantage, 0, advantage])
    np.testing.assert_array_equal(with_advantages[1].advantages, [-advantage])
    assert np.asarray(with_advantages[0].advantages).dtype == np.float32
    assert samples[0].advantages is None


def scored(policy, reference, **fields):
    policy, reference = np.asarray(policy, np.float32), np.asarray(reference, np.float32)
    return make_sample(np.zeros(len(policy)), policy_logprobs=policy, reference_logprobs=reference, **fields)


def test_the_kl_penalty_is_summed_over_unmasked_tokens():
    samples = [
        scored([-1.0, -2.0, -3.0], [-1.5, -9.0, -2.0], reward=1.0, loss_mask=np.array([True, False, True])),
        scored([-1.0], [-3.0], reward=0.5, sample_index=1),
        scored([], [], reward=0.25, sample_index=2),
    ]
    # The first sample's KL is 0.5 - 1.0 over its first and third token; the second's is 2.0.
    ours = kl_penalized_rewards(samples, kl_estimator=k1, beta=0.1)
    np.testing.assert_allclose(ours, [1.0 + 0.05, 0.5 - 0.2, 0.25], rtol=1e-6)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS.values(), ids=KL_ESTIMATORS)
def test_kl_penalty_of_equal_logprobs_is_exactly_zero(estimator):
    logprobs = -np.random.default_rng(0).exponential(2.0, 40)
    samples = [scored(logprobs, logprobs, reward=0.1)]
    assert kl_penalized_rewards(samples, kl_estimator=estimator, beta=0.5) == task_rewards(samples)
