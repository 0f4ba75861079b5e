from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.update.policy_loss import (
    LOG_RATIO_LIMIT,
    SurrogateOutput,
    cispo_surrogate,
    clipped_surrogate,
    dual_clipped_surrogate,
)

LOW, HIGH, DUAL = 0.2, 0.3, 3.0


def surrogate(ratio, advantage) -> SurrogateOutput:
    return clipped_surrogate(
        jnp.log(jnp.asarray(ratio, jnp.float32)),
        jnp.zeros(np.shape(ratio)),
        jnp.asarray(advantage, jnp.float32),
        clip_low=LOW,
        clip_high=HIGH,
    )


def gradient(ratio: float, advantage: float) -> float:
    """Returns the gradient of the loss with respect to the current logprob."""

    def loss(current):
        advantages = jnp.float32(advantage)
        return clipped_surrogate(current, jnp.float32(0), advantages, clip_low=LOW, clip_high=HIGH).loss

    return float(jax.grad(loss)(jnp.log(jnp.float32(ratio))))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.1, 2.0, -2.2, -2.2),
        (0.9, 2.0, -1.8, -1.8),
        (1.1, -2.0, 2.2, 2.2),
        (0.9, -2.0, 1.8, 1.8),
        (1.5, 2.0, -2.6, 0.0),
        (0.5, 2.0, -1.0, -1.0),
        (1.5, -2.0, 3.0, 3.0),
        (0.5, -2.0, 1.6, 0.0),
        (1.25, 2.0, -2.5, -2.5),
        (0.79, -2.0, 1.6, 0.0),
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_loss_and_gradient_in_every_region(ratio, advantage, loss, slope):
    assert float(surrogate(ratio, advantage).loss) == pytest.approx(loss, rel=1e-6)
    assert gradient(ratio, advantage) == pytest.approx(slope, rel=1e-6)


def test_the_two_clips_are_separate_and_only_cut_gradients_are_counted():
    ratio = jnp.array([0.79, 0.81, 1.29, 1.31, 0.79, 0.81, 1.29, 1.31])
    advantages = jnp.array([1.0] * 4 + [-1.0] * 4)
    result = surrogate(ratio, advantages)
    np.testing.assert_array_equal(result.clipped_high, [False] * 3 + [True] + [False] * 4)
    np.testing.assert_array_equal(result.clipped_low, [False] * 4 + [True] + [False] * 3)
    np.testing.assert_allclose(result.ratio, ratio, rtol=1e-6)


@pytest.mark.parametrize("difference", [-1e4, LOG_RATIO_LIMIT + 1])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_hopeless_ratios_stay_finite(difference, advantage):
    def loss(current):
        return clipped_surrogate(current, jnp.float32(0), jnp.float32(advantage), clip_low=LOW, clip_high=HIGH).loss

    value, slope = jax.value_and_grad(loss)(jnp.float32(difference))
    assert np.isfinite(value)
    assert slope == 0.0


def dual(ratio, advantage) -> SurrogateOutput:
    return dual_clipped_surrogate(
        jnp.log(jnp.asarray(ratio, jnp.float32)),
        jnp.zeros(np.shape(ratio)),
        jnp.asarray(advantage, jnp.float32),
        clip_low=LOW,
        clip_high=HIGH,
        dual_clip=DUAL,
    )


def dual_gradient(ratio: float, advantage: float) -> float:
    return float(jax.grad(lambda x: dual(jnp.exp(x), advantage).loss)(jnp.log(jnp.float32(ratio))))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (2.9, -2.0, 5.8, 5.8),  # below the second clip: as without it
        (3.1, -2.0, 6.0, 0.0),  # beyond it: -A c, and no pull
        (50.0, -0.5, 1.5, 0.0),
        (50.0, 2.0, -2.6, 0.0),  # advantaged: the first clip
        (0.5, -2.0, 1.6, 0.0),
        (0.5, 2.0, -1.0, -1.0),
        (50.0, 0.0, 0.0, 0.0),
    ],
)
def test_the_second_clip_bounds_what_a_disadvantaged_token_costs(ratio, advantage, loss, slope):
    assert float(dual(ratio, advantage).loss) == pytest.approx(loss, rel=1e-6)
    assert dual_gradient(ratio, advantage) == pytest.approx(slope, rel=1e-6)


def test_only_gradients_that_the_second_clip_cut_are_counted_as_such():
    ratio, advantages = jnp.array([2.9, 3.1, 2.9, 3.1, 0.5]), jnp.array([1.0, 1.0, -1.0, -1.0, -1.0])
    result = dual(ratio, advantages)
    np.testing.assert_array_equal(result.clipped_dual, [False, False, False, True, False])
    np.testing.assert_array_equal(result.clipped_high, [True, True, False, False, False])
    np.testing.assert_array_equal(result.clipped_low, [False] * 4 + [True])
    assert not surrogate(ratio, advantages).clipped_dual.any()


def cispo(log_ratio, logprob, advantage, *, low: float = 10.0) -> SurrogateOutput:
    arguments = (jnp.asarray(x, jnp.float32) for x in (log_ratio, logprob, advantage))
    return cispo_surrogate(*arguments, clip_low=low, clip_high=HIGH)


@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "weight"),
    [
        (1.1, 2.0, 10.0, 1.1),
        (5.0, 2.0, 10.0, 1.3),  # beyond the bound: the gradient stays, its weight does not grow
        (5.0, -2.0, 10.0, 1.3),
        (0.1, -2.0, 10.0, 0.1),  # no lower bound
        (0.1, 2.0, 0.2, 0.8),
    ],
)
def test_cispo_keeps_the_gradient_of_every_token_and_bounds_its_weight(ratio, advantage, low, weight):
    def loss(logprob):
        # The proximal logprob moves with it: only the logprob itself may have a gradient.
        return cispo(jnp.log(ratio) + 3.0 * (logprob + 0.7), logprob, advantage, low=low).loss

    value, slope = jax.value_and_grad(loss)(-0.7)
    assert float(value) == pytest.approx(0.7 * weight * advantage, rel=1e-6)
    assert float(slope) == pytest.approx(-weight * advantage, rel=1e-6)


def test_cispo_counts_the_weights_that_it_bounded_whatever_the_advantage():
    result = cispo(jnp.log(jnp.array([0.5, 1.0, 1.4, 1.4])), jnp.zeros(4), jnp.array([1.0, 1.0, 1.0, -1.0]), low=0.2)
    np.testing.assert_array_equal(result.clipped_low, [True, False, False, False])
    np.testing.assert_array_equal(result.clipped_high, [False, False, True, True])
    assert not result.clipped_dual.any()


@given(st.floats(-30, 30, width=32), st.floats(-100, 100, width=32))
def test_both_surrogates_equal_a_float64_oracle(log_ratio, advantage):
    ratio = np.exp(np.clip(np.float64(log_ratio), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    once = max(-advantage * ratio, -advantage * min(max(ratio, 1 - LOW), 1 + HIGH))
    twice = min(once, -advantage * DUAL) if advantage < 0 else once
    arguments = (jnp.float32(log_ratio), jnp.float32(0), jnp.float32(advantage))
    clips = {"clip_low": LOW, "clip_high": HIGH}
    assert float(clipped_surrogate(*arguments, **clips).loss) == pytest.approx(once, rel=1e-5, abs=1e-20)
    ours = dual_clipped_surrogate(*arguments, **clips, dual_clip=DUAL)
    assert float(ours.loss) == pytest.approx(twice, rel=1e-5, abs=1e-20)
    assert abs(float(ours.loss)) <= max(DUAL, 1 + HIGH) * abs(advantage) * (1 + 1e-6)
