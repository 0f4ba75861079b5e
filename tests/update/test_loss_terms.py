"""Tests surrogates, KL estimators and aggregations against hand-computed and float64 values."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.update.kl import DIFFERENCE_LIMIT, KL_ESTIMATORS, k1, k2, k3
from app.update.loss_aggregation import StepTotals, aggregations
from app.update.policy_loss import (
    LOG_RATIO_LIMIT,
    SurrogateFn,
    SurrogateOutput,
    cispo_surrogate,
    clipped_surrogate,
    dual_clipped_surrogate,
)
from tests.tiny import make_sample

LOW, HIGH, DUAL_CLIP = 0.2, 0.3, 3.0
CLIPPED = partial(clipped_surrogate, clip_low=LOW, clip_high=HIGH)
DUAL = partial(dual_clipped_surrogate, clip_low=LOW, clip_high=HIGH, dual_clip=DUAL_CLIP)


def of_tokens(surrogate: SurrogateFn, ratios: list[float], advantages: list[float]) -> SurrogateOutput:
    return surrogate(jnp.log(jnp.float32(ratios)), jnp.zeros(len(ratios)), jnp.float32(advantages))


@pytest.mark.parametrize(
    ("surrogate", "ratio", "advantage", "loss", "slope"),
    [
        (CLIPPED, 1.1, 2.0, -2.2, -2.2),
        (CLIPPED, 1.5, 2.0, -2.6, 0.0),
        (CLIPPED, 1.5, -2.0, 3.0, 3.0),
        (CLIPPED, 0.5, -2.0, 1.6, 0.0),
        (DUAL, 2.9, -2.0, 5.8, 5.8),  # the ratio is below the second clip, which has no effect
        (DUAL, 3.1, -2.0, 6.0, 0.0),  # the ratio is above the second clip: the loss is -A c, without gradient
        (DUAL, 50.0, 2.0, -2.6, 0.0),  # with a positive advantage, only the first clip applies
        (DUAL, 0.5, 2.0, -1.0, -1.0),
    ],
)
def test_surrogate_loss_and_gradient_are_correct_in_every_clip_region(surrogate, ratio, advantage, loss, slope):
    def of_logprob(current):
        return surrogate(current, jnp.float32(0), jnp.float32(advantage)).loss

    assert jax.value_and_grad(of_logprob)(jnp.log(jnp.float32(ratio))) == pytest.approx((loss, slope), rel=1e-6)


def test_each_clip_fraction_counts_the_gradients_that_the_clip_removed():
    ratios = [0.79, 0.81, 1.29, 1.31, 3.1, 0.79, 0.81, 1.31, 2.9, 3.1]
    once, twice = (of_tokens(surrogate, ratios, [1.0] * 5 + [-1.0] * 5) for surrogate in (CLIPPED, DUAL))
    for result in (once, twice):
        assert np.flatnonzero(result.clipped_high).tolist() == [3, 4]
        assert np.flatnonzero(result.clipped_low).tolist() == [5]
        np.testing.assert_allclose(result.ratio, ratios, rtol=1e-6)
    assert np.flatnonzero(twice.clipped_dual).tolist() == [9]
    assert not once.clipped_dual.any()


@pytest.mark.parametrize(("difference", "advantage"), [(-1e4, -1.0), (LOG_RATIO_LIMIT + 1, 1.0)])
def test_surrogates_of_extreme_ratios_are_finite_and_have_no_gradient(difference, advantage):
    def loss(current):
        return CLIPPED(current, jnp.float32(0), jnp.float32(advantage)).loss

    value, slope = jax.value_and_grad(loss)(jnp.float32(difference))
    assert np.isfinite(value)
    assert slope == 0.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "weight"),
    [
        (1.1, 2.0, 10.0, 1.1),
        (5.0, 2.0, 10.0, 1.3),  # above the bound, the gradient remains, but its weight does not grow
        (5.0, -2.0, 10.0, 1.3),
        (0.1, -2.0, 10.0, 0.1),  # there is no lower bound
        (0.1, 2.0, 0.2, 0.8),
    ],
)
def test_cispo_keeps_every_gradient_and_bounds_its_weight(ratio, advantage, low, weight):
    def loss(logprob):
        # The log ratio depends on the logprob too, but only the logprob itself may have a gradient.
        log_ratio = jnp.log(ratio) + 3.0 * (logprob + 0.7)
        return cispo_surrogate(log_ratio, logprob, jnp.float32(advantage), clip_low=low, clip_high=HIGH).loss

    expected = 0.7 * weight * advantage, -weight * advantage
    assert jax.value_and_grad(loss)(-0.7) == pytest.approx(expected, rel=1e-6)


def test_cispo_counts_bounded_weights_for_either_sign_of_the_advantage():
    cispo = partial(cispo_surrogate, clip_low=0.2, clip_high=HIGH)
    result = of_tokens(cispo, [0.5, 1.0, 1.4, 1.4], [1.0, 1.0, 1.0, -1.0])
    np.testing.assert_array_equal(result.clipped_low, [True, False, False, False])
    np.testing.assert_array_equal(result.clipped_high, [False, False, True, True])
    assert not result.clipped_dual.any()


@pytest.mark.parametrize(
    ("estimator", "value", "slope"), [(k1, 0.5, 1.0), (k2, 0.125, 0.5), (k3, np.exp(-0.5) + 0.5 - 1, 1 - np.exp(-0.5))]
)
def test_kl_estimators_have_the_hand_computed_values_and_gradients(estimator, value, slope):
    assert float(estimator(jnp.float32(-1.0), jnp.float32(-1.5))) == pytest.approx(value, rel=1e-6)
    assert float(jax.grad(estimator)(jnp.float32(-1.0), jnp.float32(-1.5))) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("difference", [-1e4, DIFFERENCE_LIMIT + 1])
def test_k3_of_an_extreme_difference_is_finite_without_gradient(difference):
    value, slope = jax.value_and_grad(k3)(jnp.float32(difference), jnp.float32(0))
    limited = np.clip(difference, -DIFFERENCE_LIMIT, DIFFERENCE_LIMIT)
    assert float(value) == pytest.approx(np.exp(-limited) + limited - 1, rel=1e-5)
    assert float(slope) == 0.0


def test_k3_is_precise_for_small_differences():
    # exp(-d) + d - 1 = d^2 / 2 - d^3 / 6 + ...; in plain float32 the result would be rounded to 0 or to an epsilon.
    d = 1e-3
    assert float(k3(jnp.float32(d), jnp.float32(0))) == pytest.approx(d**2 / 2 - d**3 / 6, rel=1e-3)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_kl_estimates_on_host_and_device_are_equal(name):
    rng = np.random.default_rng(1)
    policy, reference = -rng.exponential(2.0, (2, 50))
    on_host = KL_ESTIMATORS[name](policy, reference)
    assert isinstance(on_host, np.ndarray) and on_host.dtype == np.float64
    on_device = KL_ESTIMATORS[name](jnp.asarray(policy, jnp.float32), jnp.asarray(reference, jnp.float32))
    np.testing.assert_allclose(on_device, on_host, rtol=1e-5, atol=1e-6)


LONGEST = 4
AGGREGATIONS = aggregations(max_new_tokens=LONGEST)


def aggregate(name: str, losses, masks) -> float:
    samples = [make_sample(np.zeros(len(mask)), loss_mask=np.asarray(mask, bool)) for mask in masks]
    totals = StepTotals.from_samples(samples)
    return sum(float(AGGREGATIONS[name](s, totals) @ np.asarray(row)) for s, row in zip(samples, losses, strict=True))


TWO = [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]], [[1, 1, 0], [1, 1, 1]]
# The second sample has no token in the loss, so it is not counted as a sequence.
EMPTY = [[1.0, 3.0], [7.0, 7.0]], [[1, 1], [0, 0]]
# A long sample outweighs short ones only in aggregations that weight by the number of tokens.
LONG = [[1.0] * 10, *[[0.0] * 2] * 3], [[1] * 10, *[[1] * 2] * 3]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token-mean", ((0.1 + 0.2 + 0.4 + 0.5 + 0.6) / 5, 2.0, 0.625)),
        ("sequence-mean-token-mean", ((0.3 / 2 + 1.5 / 3) / 2, 2.0, 0.25)),
        ("sequence-mean-token-sum", ((0.3 + 1.5) / 2, 4.0, 2.5)),
        ("constant-length", ((0.3 / 4 + 1.5 / 4) / 2, 1.0, 0.625)),
    ],
)
def test_loss_aggregations_equal_hand_computed_values(name, expected):
    assert [aggregate(name, *case) for case in (TWO, EMPTY, LONG)] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", AGGREGATIONS)
@given(masks=st.lists(st.lists(st.booleans(), max_size=6), max_size=6))
def test_aggregation_weights_are_positive_exactly_where_the_mask_is_true(name, masks):
    samples = [make_sample(np.zeros(len(mask)), loss_mask=np.asarray(mask, bool)) for mask in masks]
    totals = StepTotals.from_samples(samples)
    for sample in samples:
        weights = AGGREGATIONS[name](sample, totals)
        assert weights.dtype == np.float32
        np.testing.assert_array_equal(weights > 0, sample.mask)
