from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.model.architecture import Architecture
from app.model.decode_weights import DecodeConversion
from app.model.decoder import DecoderDefinition
from app.model.prefill_and_decode import decode_step, prefill
from app.model.segment_layout import single_segment_layout
from tests.tiny import BIASED, MIXTURE, ODD, SWITCHED, make_mesh, random_params

ARCHITECTURES = pytest.mark.parametrize(
    "architecture", [ODD, BIASED, SWITCHED, MIXTURE], ids=["tied", "untied-biases", "every-switch", "experts"]
)
FLOAT32 = jnp.dtype("float32")
LENGTHS = np.array([1, 5, 4])
"""Lengths of the prompts; every row is decoded up to 9 tokens."""


class Compiled:
    """The compiled decoder of one architecture."""

    def __init__(self, architecture: Architecture):
        definition = DecoderDefinition.create(architecture)
        self.params = random_params(definition)
        self.weights = DecodeConversion(definition, make_mesh(), FLOAT32)(self.params)
        self.prefill = jax.jit(functools.partial(prefill, definition))
        self.decode_step = jax.jit(functools.partial(decode_step, definition))
        self.hidden = jax.jit(lambda *rows: definition.bind(self.params).hidden(*rows, dtype=FLOAT32))


compiled = functools.cache(Compiled)


@functools.cache
def token_ids(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, ODD.vocab_size, (3, 9)).astype(np.int32)


def right_padded(size: int, filler: int = 0) -> np.ndarray:
    """Returns the prompts, padded on the right with `filler`."""
    rows = np.full((3, size), filler, np.int32)
    for row, length in enumerate(LENGTHS):
        rows[row, :length] = token_ids()[row, :length]
    return rows


def whole_rows(model: Compiled) -> np.ndarray:
    return np.asarray(model.hidden(token_ids(), single_segment_layout(np.ones((3, 9), bool))))


def grown(cache, size: int, filler: float = 0.0):
    """Returns the cache with `size` tokens, whose new entries are arbitrary."""
    pad = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, size - x.shape[2]), (0, 0)), constant_values=filler)  # noqa: E731
    return jax.tree.map(pad, cache)


@ARCHITECTURES
def test_prefill_and_decode_equal_one_forward_pass(architecture):
    model = compiled(architecture)
    expected = whole_rows(model)
    hidden, cache, _ = model.prefill(model.weights, right_padded(6), LENGTHS)
    np.testing.assert_allclose(hidden, expected[np.arange(3), LENGTHS - 1], atol=2e-5)
    cache = grown(cache, 12, filler=100.0)
    for step in range(9 - LENGTHS.max()):
        positions = LENGTHS + step
        hidden, cache, _ = model.decode_step(
            *(model.weights, cache, token_ids()[np.arange(3), positions], positions.astype(np.int32), np.ones(3, bool)),
            np.arange(3, dtype=np.int32)[:, None],
        )
        np.testing.assert_allclose(hidden, expected[np.arange(3), positions], atol=2e-5)


@ARCHITECTURES
@pytest.mark.parametrize(("size", "filler"), [(11, 7)])
def test_what_lies_behind_a_prompt_does_not_matter(architecture, size, filler):
    model = compiled(architecture)
    plain, plain_cache, _ = model.prefill(model.weights, right_padded(6), LENGTHS)
    other, other_cache, _ = model.prefill(model.weights, right_padded(size, filler), LENGTHS)
    np.testing.assert_allclose(other, plain, atol=1e-6)
    for row, length in enumerate(LENGTHS):
        head = lambda x, row=row, length=length: x[row, :, :length]  # noqa: E731
        close = functools.partial(np.testing.assert_allclose, atol=1e-6)
        jax.tree.map(close, jax.tree.map(head, other_cache), jax.tree.map(head, plain_cache))


def test_a_prompt_of_no_tokens_is_finite_padding():
    model = compiled(ODD)
    hidden, cache, _ = model.prefill(model.weights, right_padded(6), np.zeros(3, np.int32))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((hidden, cache)))


def test_decoding_weights_are_one_array_per_layer_in_the_compute_type():
    definition = DecoderDefinition.create(ODD)
    params = random_params(definition)
    weights = DecodeConversion(definition, make_mesh(), jnp.dtype("bfloat16"))(params)
    assert len(weights.blocks) == ODD.num_layers
    assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {jnp.dtype("bfloat16")}
    for layer, block in enumerate(weights.blocks):
        np.testing.assert_array_equal(
            block["down"]["kernel"], params["blocks"]["down"]["kernel"][layer].astype(jnp.bfloat16)
        )
    # The stacked blocks are not held twice.
    assert sum(leaf.size for leaf in jax.tree.leaves(weights)) == definition.num_parameters
