from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads

from app.model.attention.dense import DEFAULT_SCORE_MOD, ScoreMod, dot_product_attention
from app.model.layers import apply_rope


def random_qkv(rows=2, tokens=7, query_heads=6, kv_heads=2, head=4, seed=0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape).astype(np.float32))  # noqa: E731
    return (
        normal(rows, tokens, query_heads, head),
        normal(rows, kv_heads, tokens, head),
        normal(rows, kv_heads, tokens, head),
    )


def slow_attention(query, keys, values, visible, rule=DEFAULT_SCORE_MOD) -> np.ndarray:
    """Computes attention in float64, one query head and one token at a time."""
    scale = rule.scale or query.shape[3] ** -0.5
    query, keys, values = (np.asarray(x, np.float64) for x in (query, keys, values))
    mixed = np.zeros(query.shape)
    sharing = query.shape[2] // keys.shape[1]
    for row, token, head in np.ndindex(query.shape[:3]):
        seen = np.flatnonzero(visible[row, token])
        scores = keys[row, head // sharing, seen] @ query[row, token, head] * scale
        scores = rule.soft_cap * np.tanh(scores / rule.soft_cap) if rule.soft_cap else scores
        weights = np.exp(scores - scores.max())
        mixed[row, token, head] = weights @ values[row, head // sharing, seen] / weights.sum()
    return mixed


def turns_of(angles):
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)])


def test_a_quarter_turn_moves_the_first_half_into_the_second():
    x = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    angles = turns_of(jnp.array([np.pi / 2, 0.0]).reshape(1, 1, 2))
    np.testing.assert_allclose(apply_rope(x, angles).ravel(), [-3.0, 2.0, 1.0, 4.0], atol=1e-6)


def test_gradients_of_a_rotation_equal_finite_differences():
    rng = np.random.default_rng(0)
    x, weights = (jnp.asarray(rng.normal(size=(1, 3, 2, 4)), jnp.float32) for _ in range(2))
    angles = turns_of(jnp.asarray(rng.normal(size=(1, 3, 2)), jnp.float32))
    check_grads(lambda x: jnp.vdot(apply_rope(x, angles), weights), (x,), order=1, modes=["rev"], rtol=1e-3)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_on_a_tpu_halves_are_exchanged_by_a_product_that_is_exact(monkeypatch, dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 3, 4, 6)), dtype)
    angles = turns_of(jnp.asarray(rng.normal(size=(2, 3, 3)), jnp.float32))
    elsewhere = apply_rope(x, angles)
    monkeypatch.setattr("app.model.layers.current_device", lambda: ("tpu", "TPU v5 lite"))
    assert "dot_general" in str(jax.make_jaxpr(apply_rope)(x, angles))
    np.testing.assert_array_equal(apply_rope(x, angles), elsewhere)


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500))
def test_scores_of_rotated_vectors_depend_on_distance_alone(first, second, shift):
    frequencies = np.array([1.0, 0.1, 0.01], np.float32)
    query, key, _ = random_qkv(rows=1, tokens=1, query_heads=1, kv_heads=1, head=6)
    turned = lambda x, position: apply_rope(x, turns_of(position * frequencies[None, None]))  # noqa: E731
    score = lambda a, b: float(jnp.vdot(turned(query, a), turned(key, b)))  # noqa: E731
    assert score(first + shift, second + shift) == pytest.approx(score(first, second), abs=5e-4)


@pytest.mark.parametrize("rule", [DEFAULT_SCORE_MOD, ScoreMod(scale=2.0), ScoreMod(soft_cap=0.7), ScoreMod(0.4, 0.3)])
def test_grouped_queries_equal_a_slow_oracle_under_every_rule(rule):
    query, keys, values = random_qkv()
    visible = np.random.default_rng(1).random((2, 7, 7)) < 0.5
    visible |= np.eye(7, dtype=bool)
    expected = slow_attention(query, keys, values, visible, rule)
    np.testing.assert_allclose(
        dot_product_attention(query, keys, values, jnp.asarray(visible), rule), expected, atol=1e-5
    )
