"""Tests advantages whose reward functions are compared by themselves, by hand and against float64."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.advantage.group import GROUP_ADVANTAGES, grpo_advantages
from app.advantage.reward_parts import RewardParts
from app.records.sample import Sample
from tests.tiny import make_sample

EPSILON = 1e-6
WEIGHTS = {"right": 2.0, "short": -0.5, "polite": 1.0}
GRADED = st.lists(
    st.tuples(*[st.none() | st.integers(-40, 40).map(lambda x: x / 4)] * 3, st.integers(0, 3)), min_size=1, max_size=20
)
"""Strategy that draws samples: the value of each function, None if it abstained, and the group."""


def graded_samples(graded: list[tuple]) -> list[Sample]:
    return [
        make_sample(
            [3, 4],
            group_id=group,
            sample_index=i,
            reward=0.0,
            rewards={name: x for name, x in zip(WEIGHTS, values, strict=True) if x is not None},
        )
        for i, (*values, group) in enumerate(graded)
    ]


def advantages_of(samples: list[Sample], parts: RewardParts) -> np.ndarray:
    return np.array([np.asarray(s.advantages)[0] for s in parts.assign(samples)])


def oracle(graded: list[tuple]) -> np.ndarray:
    """Computes GDPO's equations 4 to 6 in float64, sample by sample."""
    summed = []
    for *values, group in graded:
        total = 0.0
        for place, weight in enumerate(WEIGHTS.values()):
            siblings = [one[place] for one in graded if one[3] == group and one[place] is not None]
            if values[place] is not None and len(siblings) > 1:
                total += weight * (values[place] - np.mean(siblings)) / (np.std(siblings, ddof=1) + EPSILON)
        summed.append(total)
    deviation = np.std(summed, ddof=1) if len(summed) > 1 else 0.0
    return (np.array(summed) - np.mean(summed)) / (deviation + EPSILON)


@given(GRADED)
def test_advantages_equal_the_gdpo_equations_in_float64_in_any_sample_order(graded: list[tuple]) -> None:
    parts, samples = RewardParts(WEIGHTS, grpo_advantages), graded_samples(graded)
    ours, expected = advantages_of(samples, parts), oracle(graded)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(advantages_of(samples[::-1], parts)[::-1], ours, rtol=1e-6, atol=1e-7)


def test_rewards_with_equal_sums_get_different_advantages() -> None:
    """Figure 2 of the paper: two rewards of 0 and 1, in pairs whose sums are 0 and 1, and 0 and 2."""
    graded = [(0.0, None, 0.0, 0), (0.0, None, 1.0, 0), (0.0, None, 0.0, 1), (1.0, None, 1.0, 1)]
    parts = RewardParts({"right": 1.0, "polite": 1.0}, grpo_advantages)
    apart = 1 / np.sqrt(2)
    by_part = [[0, 0, -apart, apart], [-apart, apart, -apart, apart]]
    np.testing.assert_allclose(parts.advantages_of(graded_samples(graded)), by_part, rtol=1e-5)
    deviation = np.sqrt((2 * apart**2 + 2 * (2 * apart) ** 2) / 3)
    expected = np.array([-apart, apart, -2 * apart, 2 * apart]) / deviation
    np.testing.assert_allclose(advantages_of(graded_samples(graded), parts), expected, rtol=1e-5)


def test_abstention_zeroes_only_the_advantage_from_the_abstaining_reward_function() -> None:
    graded = [(1.0, 5.0, 0.0, 0), (0.0, None, 1.0, 0), (0.0, 9.0, 2.0, 0)]
    parts = RewardParts(WEIGHTS, grpo_advantages)
    right, short, polite = parts.advantages_of(graded_samples(graded))
    whole = parts.advantages_of(graded_samples([(1.0, 5.0, 0.0, 0), (0.0, 7.0, 1.0, 0), (0.0, 9.0, 2.0, 0)]))
    np.testing.assert_array_equal([right, polite], whole[[0, 2]])
    np.testing.assert_allclose(short, [0.5 / np.sqrt(2), 0, -0.5 / np.sqrt(2)], rtol=1e-6)


@pytest.mark.parametrize("estimator", GROUP_ADVANTAGES.values(), ids=GROUP_ADVANTAGES)
def test_groups_with_equal_rewards_get_zero_advantages_from_every_estimator(estimator) -> None:
    parts = RewardParts(WEIGHTS, estimator)
    graded = [(0.1, 0.3, None, group) for group in (0, 0, 0, 1)]
    assert advantages_of(graded_samples(graded), parts).tolist() == [0.0] * 4
    assert parts.assign([]) == []
    # Rewards of other groups do not change such a group either.
    mixed = advantages_of(graded_samples([*graded, (1.0, 0.0, 1.0, 2), (0.0, 0.0, 1.0, 2)]), parts)
    assert mixed[:4].tolist() == [0.0] * 4 and mixed[4] == -mixed[5] > 0


def test_masked_samples_do_not_affect_the_standard_deviation_of_a_step() -> None:
    graded = [(1.0, 0.0, 0.0, 0), (0.0, 0.0, 0.0, 0), (5.0, 9.0, 0.0, 1), (0.0, 0.0, 4.0, 1)]
    samples, parts = graded_samples(graded), RewardParts(WEIGHTS, grpo_advantages)
    masked = [replace(s, loss_mask=np.zeros(2, bool)) if s.group_id else s for s in samples]
    np.testing.assert_array_equal(advantages_of(masked, parts)[:2], advantages_of(samples[:2], parts))
    assert abs(advantages_of(samples, parts)[0]) != abs(advantages_of(samples[:2], parts)[0])


def test_metrics_of_each_reward_function_equal_hand_computed_values() -> None:
    graded = [(1.0, 3.0, None, 0), (0.0, 3.0, None, 0), (1.0, 3.0, 2.0, 1), (1.0, 5.0, None, 1)]
    metrics = RewardParts(WEIGHTS, grpo_advantages).metrics(graded_samples(graded))
    assert np.isnan(metrics.pop("reward/polite/zero_variance_fraction"))
    # A pair of different rewards counts its weight times the square root of two; the weights are 2 and 0.5.
    assert metrics == pytest.approx(
        {
            **{"reward/right/zero_variance_fraction": 0.5, "reward/short/zero_variance_fraction": 0.5},
            **{"advantage/right/share": 0.8, "advantage/short/share": 0.2, "advantage/polite/share": 0.0},
        },
        rel=1e-5,
    )
    assert all(np.isnan(value) for value in RewardParts(WEIGHTS, grpo_advantages).metrics([]).values())
