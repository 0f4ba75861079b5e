"""Tests rotary frequencies and rotations against hand-computed numbers and transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from app.model.architecture import RopeConfig
from app.model.io.families import architecture_from_config
from app.model.layers import apply_rope, rope_frequencies
from tests.model.reference import LLAMA3, SIZES

# Of the wavelengths 6.28, 62.8, 628, ..., the second lies between original/high = 25 and original/low = 100, and
# this part of its frequency is not scaled.
KEPT = (100 * 0.1 / (2 * np.pi) - 1) / 3
BLENDED = (1 - KEPT) * 0.1 / 8 + KEPT * 0.1


@pytest.mark.parametrize(
    ("rope", "by_hand"),
    [
        (RopeConfig(10_000.0), [1, 0.1, 0.01, 0.001]),
        (RopeConfig(10_000.0, "linear", 4.0), [0.25, 0.025, 0.0025, 0.00025]),
        (RopeConfig(10_000.0, "llama3", 8.0, 1.0, 4.0, 100), [1, BLENDED, 0.01 / 8, 0.001 / 8]),
    ],
    ids=["default", "linear", "llama3"],
)
def test_rope_frequencies_equal_hand_computed_numbers(rope, by_hand):
    np.testing.assert_allclose(rope_frequencies(rope, 8), by_hand, rtol=1e-6)


@pytest.mark.parametrize(
    ("rope", "head_dim"),
    [
        ({"rope_type": "linear", "factor": 3.0}, 10),
        ({**LLAMA3, "original_max_position_embeddings": 8192}, 10),
        ({**LLAMA3, "original_max_position_embeddings": 8192}, 128),
    ],
)
def test_rope_frequencies_equal_transformers(rope, head_dim):
    pytest.importorskip("torch", reason="transformers computes its frequencies with torch")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(**SIZES | {"head_dim": head_dim}, rope_parameters={**rope, "rope_theta": 5e5})
    expected, attention_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device=None)
    ours = architecture_from_config(config.to_dict() | {"architectures": None})
    frequencies = rope_frequencies(ours.rope, ours.head_dim)
    assert (attention_factor, frequencies.dtype) == (1.0, np.float32)
    np.testing.assert_allclose(frequencies, expected.numpy(), rtol=3e-7)


def turns_of(angles):
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)])


def test_rotation_by_a_quarter_turn_equals_a_hand_computed_vector():
    x = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    angles = turns_of(jnp.array([np.pi / 2, 0.0]).reshape(1, 1, 2))
    np.testing.assert_allclose(apply_rope(x, angles).ravel(), [-3.0, 2.0, 1.0, 4.0], atol=1e-6)


def test_gradients_of_a_rotary_embedding_equal_finite_differences():
    rng = np.random.default_rng(0)
    x, weights = (jnp.asarray(rng.normal(size=(1, 3, 2, 4)), jnp.float32) for _ in range(2))
    angles = turns_of(jnp.asarray(rng.normal(size=(1, 3, 2)), jnp.float32))
    check_grads(lambda x: jnp.vdot(apply_rope(x, angles), weights), (x,), order=1, modes=["rev"], rtol=1e-3)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_tpu_rotates_by_an_exact_matmul(monkeypatch, dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 3, 4, 6)), dtype)
    angles = turns_of(jnp.asarray(rng.normal(size=(2, 3, 3)), jnp.float32))
    elsewhere = apply_rope(x, angles)
    monkeypatch.setattr("app.model.layers.current_device", lambda: ("tpu", "TPU v5 lite"))
    assert "dot_general" in str(jax.make_jaxpr(apply_rope)(x, angles))
    np.testing.assert_array_equal(apply_rope(x, angles), elsewhere)


@settings(max_examples=25)
@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500))
def test_scores_of_rotated_vectors_depend_only_on_distance(first, second, shift):
    query, key = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 6)).astype(np.float32)
    frequencies = np.array([1.0, 0.1, 0.01], np.float32)
    turned = lambda x, position: apply_rope(x, turns_of(position * frequencies[None, None]))  # noqa: E731
    score = lambda a, b: float(jnp.vdot(turned(query, a), turned(key, b)))  # noqa: E731
    assert score(first + shift, second + shift) == pytest.approx(score(first, second), abs=5e-4)
