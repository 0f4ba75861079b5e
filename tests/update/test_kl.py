from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.update.kl import DIFFERENCE_LIMIT, KL_ESTIMATORS, k1, k2, k3

LOGPROB = st.floats(-15, 0, width=32)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        (k1, 0.5, 1.0),
        (k2, 0.125, 0.5),
        (k3, np.exp(-0.5) + 0.5 - 1, 1 - np.exp(-0.5)),
    ],
)
def test_values_and_gradients_by_hand_at_a_difference_of_one_half(estimator, value, slope):
    assert float(estimator(jnp.float32(-1.0), jnp.float32(-1.5))) == pytest.approx(value, rel=1e-6)
    assert float(jax.grad(estimator)(jnp.float32(-1.0), jnp.float32(-1.5))) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("name", ["k2", "k3"])
@given(policy=LOGPROB, reference=LOGPROB)
def test_k2_and_k3_are_never_negative(name, policy, reference):
    assert float(KL_ESTIMATORS[name](jnp.float32(policy), jnp.float32(reference))) >= 0.0


def test_k1_and_k3_average_to_the_kl_of_two_distributions():
    logits = np.random.default_rng(0).normal(size=(2, 11))
    policy, reference = jax.nn.log_softmax(jnp.asarray(logits, jnp.float32))
    kl = float(jnp.sum(jnp.exp(policy) * (policy - reference)))
    for estimator in (k1, k3):
        assert float(jnp.sum(jnp.exp(policy) * estimator(policy, reference))) == pytest.approx(kl, rel=1e-5)


@pytest.mark.parametrize("difference", [-1e4, DIFFERENCE_LIMIT + 1])
def test_k3_of_a_hopeless_token_is_finite_and_no_longer_pulls(difference):
    value, slope = jax.value_and_grad(k3)(jnp.float32(difference), jnp.float32(0))
    limited = np.clip(difference, -DIFFERENCE_LIMIT, DIFFERENCE_LIMIT)
    assert float(value) == pytest.approx(np.exp(-limited) + limited - 1, rel=1e-5)
    assert float(slope) == 0.0


def test_k3_keeps_the_digits_of_small_differences():
    # exp(-d) + d - 1 = d^2 / 2 - d^3 / 6 + ...; in plain float32 it would round to 0 or to an eps.
    d = 1e-3
    assert float(k3(jnp.float32(d), jnp.float32(0))) == pytest.approx(d**2 / 2 - d**3 / 6, rel=1e-3)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_host_arrays_give_host_arrays_of_the_same_estimates(name):
    rng = np.random.default_rng(1)
    policy, reference = -rng.exponential(2.0, (2, 50))
    on_host = KL_ESTIMATORS[name](policy, reference)
    assert isinstance(on_host, np.ndarray) and on_host.dtype == np.float64
    on_device = KL_ESTIMATORS[name](jnp.asarray(policy, jnp.float32), jnp.asarray(reference, jnp.float32))
    np.testing.assert_allclose(on_device, on_host, rtol=1e-5, atol=1e-6)


LOGITS, REFERENCE = np.random.default_rng(3).normal(size=(2, 7)).astype(np.float32)


def forward_kl(logits):
    policy, reference = jax.nn.log_softmax(logits), jax.nn.log_softmax(jnp.asarray(REFERENCE))
    return jnp.sum(jnp.exp(reference) * (reference - policy))


def reverse_kl(logits):
    policy, reference = jax.nn.log_softmax(logits), jax.nn.log_softmax(jnp.asarray(REFERENCE))
    return jnp.sum(jnp.exp(policy) * (policy - reference))


def expected_gradient(name: str, *, place: str):
    """Returns the exact expected gradient over all tokens: of the estimate as a loss, and of REINFORCE with it as a
    cost."""

    def loss(logits):
        policy, reference = jax.nn.log_softmax(logits), jax.nn.log_softmax(jnp.asarray(REFERENCE))
        drawn, estimates = jax.lax.stop_gradient(jnp.exp(policy)), KL_ESTIMATORS[name](policy, reference)
        in_reward = jax.lax.stop_gradient(estimates) * policy
        return jnp.sum(drawn * (estimates if place == "loss" else in_reward))

    return jax.grad(loss)(jnp.asarray(LOGITS))


@pytest.mark.parametrize(
    ("name", "place", "descends"),
    [
        ("k1", "reward", reverse_kl),
        ("k3", "reward", lambda logits: reverse_kl(logits) - forward_kl(logits)),
        ("k1", "loss", lambda logits: 0.0 * jnp.sum(logits)),
        ("k2", "loss", reverse_kl),
        ("k3", "loss", forward_kl),
    ],
)
def test_an_estimator_descends_what_the_table_of_its_place_says(name, place, descends):
    np.testing.assert_allclose(
        expected_gradient(name, place=place), jax.grad(descends)(jnp.asarray(LOGITS)), rtol=1e-4, atol=1e-6
    )
