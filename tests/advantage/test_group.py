from __future__ import annotations

from functools import partial
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
    rloo_advantages,
    task_rewards,
    zero_variance_fraction,
)
from app.update.kl import KL_ESTIMATORS, k1
from tests.tiny import make_sample

GRADED = st.lists(st.tuples(st.floats(-100, 100), st.integers(-3, 3)), min_size=1, max_size=30)
"""Strategy for rewards with group ids: groups of any size, in any order."""


def advantages(rewards, group_ids) -> np.ndarray:
    return grpo_advantages(np.asarray(rewards, np.float64), np.asarray(group_ids))


def arrays(graded: list[tuple[float, int]]) -> tuple[np.ndarray, np.ndarray]:
    rewards, group_ids = zip(*graded, strict=True)
    return np.asarray(rewards, np.float64), np.asarray(group_ids)


def test_two_groups_of_three_match_the_published_numbers():
    rewards = [0.57450044, 0.09968603, 0.7419659, 0.8941783, 0.59656656, 0.45325184]
    expected = [0.307498, -1.117636, 0.810138, 1.094526, -0.228671, -0.865855]
    np.testing.assert_allclose(advantages(rewards, [0, 0, 0, 1, 1, 1]), expected, atol=1e-5)


@pytest.mark.parametrize("estimator", GROUP_ADVANTAGES.values(), ids=GROUP_ADVANTAGES)
@pytest.mark.parametrize("reward", [0.1, -1e6 / 3])
@pytest.mark.parametrize("size", [1, 2, 7])
def test_equal_rewards_give_exactly_zero(estimator, reward, size):
    assert np.all(estimator(np.full(size, reward), np.zeros(size, int)) == 0.0)


@pytest.mark.parametrize("estimator", GROUP_ADVANTAGES.values(), ids=GROUP_ADVANTAGES)
def test_no_samples_have_no_advantages(estimator):
    assert estimator(np.zeros(0), np.zeros(0, int)).shape == (0,)
    assert assign_group_advantages([], advantages=estimator) == []


@given(GRADED)
def test_advantages_equal_a_slow_oracle_in_float64(graded):
    rewards, group_ids = arrays(graded)
    for reward, group, advantage in zip(rewards, group_ids, advantages(rewards, group_ids), strict=True):
        siblings = [r for r, g in graded if g == group]
        deviation = stdev(siblings) if len(siblings) > 1 else 0.0
        assert advantage == pytest.approx((reward - fmean(siblings)) / (deviation + 1e-6), rel=1e-6, abs=1e-6)


@given(GRADED)
def test_the_others_are_related_as_their_papers_say(graded):
    rewards, group_ids = arrays(graded)
    without_deviation, leave_one_out = dr_grpo_advantages(rewards, group_ids), rloo_advantages(rewards, group_ids)
    for i, (reward, group) in enumerate(graded):
        siblings = [r for r, g in graded if g == group]
        others = [r for j, (r, g) in enumerate(graded) if g == group and j != i]
        assert without_deviation[i] == pytest.approx(reward - fmean(siblings), rel=1e-9, abs=1e-9)
        assert leave_one_out[i] == pytest.approx(reward - fmean(others) if others else 0.0, rel=1e-9, abs=1e-9)


def test_zero_variance_groups_are_counted_as_a_share_of_groups():
    rewards, group_ids = np.array([1.0, 1.0, 0.0, 1.0, 5.0]), np.array([3, 3, 8, 8, 9])
    assert zero_variance_fraction(rewards, group_ids) == pytest.approx(2 / 3)
    assert zero_variance_fraction(np.zeros(0), np.zeros(0, int)) == 0.0


def test_credit_lies_on_every_token_that_the_policy_wrote_and_on_no_other():
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


def test_the_penalty_is_summed_over_the_tokens_that_the_policy_wrote():
    samples = [
        scored([-1.0, -2.0, -3.0], [-1.5, -9.0, -2.0], reward=1.0, loss_mask=np.array([True, False, True])),
        scored([-1.0], [-3.0], reward=0.5, sample_index=1),
        scored([], [], reward=0.25, sample_index=2),
    ]
    # 0.5 - 1.0 over the first and the third token; 2.0.
    ours = kl_penalized_rewards(samples, kl_estimator=k1, beta=0.1)
    np.testing.assert_allclose(ours, [1.0 + 0.05, 0.5 - 0.2, 0.25], rtol=1e-6)


def test_samples_are_compared_by_their_penalised_rewards_and_keep_the_reward_they_got():
    samples = [scored([-1.0], [-2.0], reward=1.0), scored([-2.0], [-1.0], reward=1.0, sample_index=1)]
    rewards = partial(kl_penalized_rewards, kl_estimator=k1, beta=0.25)
    with_advantages = assign_group_advantages(samples, advantages=rloo_advantages, rewards=rewards)
    # 0.75 and 1.25.
    assert [np.asarray(s.advantages).tolist() for s in with_advantages] == [[-0.5], [0.5]]
    assert [s.reward for s in with_advantages] == [1.0, 1.0]
    unpenalised = assign_group_advantages(samples, advantages=rloo_advantages)
    assert [np.asarray(s.advantages).tolist() for s in unpenalised] == [[0.0], [0.0]]


@pytest.mark.parametrize("estimator", KL_ESTIMATORS.values(), ids=KL_ESTIMATORS)
def test_a_policy_that_is_still_the_reference_pays_exactly_nothing(estimator):
    logprobs = -np.random.default_rng(0).exponential(2.0, 40)
    samples = [scored(logprobs, logprobs, reward=0.1)]
    assert kl_penalized_rewards(samples, kl_estimator=estimator, beta=0.5) == task_rewards(samples)
