"""Tests of the TPU and GPU kernels in Pallas' interpreter, compared with dense attention in float64."""

from __future__ import annotations

import functools
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.model.attention.dense import DEFAULT_SCORE_MOD
from app.model.attention.pairs import UNREACHABLE, Blocking, PackedInputs, block_pairs
from app.model.kernels import gpu_attention, tpu_attention
from app.model.segment_layout import SegmentLayout
from tests.layouts import layout_of, seen, segments_of_rows
from tests.model.test_block_attention import RULES, assert_close, inputs, oracle

pytestmark = pytest.mark.usefixtures("interpreted")

TOKENS, SIZE = 64, 16
BLOCKING = Blocking(SIZE, 1, kernel="tpu")
KERNELS = [tpu_attention, gpu_attention]
on_each_platform = pytest.mark.parametrize("kernels", KERNELS, ids=["tpu", "gpu"])
SHARED = layout_of([[(20, (9, 14)), (6, (5,))], [(3, (30,))]], num_tokens=TOKENS)
"""Rows with shared and unshared prompts; the second ends with whole blocks of padding."""


@functools.cache
def compiled(kernels: ModuleType, rule):
    def run(query, keys, values, weights, layout, window):
        pairs = block_pairs(layout, [5, window, UNREACHABLE], SIZE, with_padding=True)
        arguments = rule, BLOCKING, PackedInputs(query, keys, values, layout, pairs, window)
        mixed, normalizer = kernels.attend(*arguments)
        return mixed, *kernels.attention_grads(*arguments, mixed, normalizer, weights)

    return jax.jit(run)


def kernel(kernels: ModuleType, arrays, layout: SegmentLayout, rule=DEFAULT_SCORE_MOD, window: int | None = None):
    """Returns the results and gradients at the tokens; they have no meaning on padding."""
    is_token = (layout.segment_ids != 0)[:, :, None, None]
    query, keys, values, weights = arrays
    window_size = jnp.int32(UNREACHABLE if window is None else window)
    mixed, *gradients = compiled(kernels, rule)(
        query, keys, values, jnp.where(is_token, weights, 0.0), layout, window_size
    )
    return jnp.where(is_token, mixed, 0.0), *gradients


def exact(arrays, layout: SegmentLayout, rule=DEFAULT_SCORE_MOD, window: int | None = None):
    query, keys, values, weights = arrays
    weights = jnp.where((layout.segment_ids != 0)[:, :, None, None], weights, 0.0)
    return oracle(query, keys, values, weights, seen(layout, window), rule)


@on_each_platform
@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=8)
@given(
    segments=segments_of_rows(num_rows=2, num_tokens=TOKENS, longest=40),
    window=st.sampled_from([None, 1, 7, SIZE, 40]),
)
def test_values_and_gradients_equal_a_float64_oracle_for_random_rows(kernels, rule, segments, window):
    layout, arrays = layout_of(segments, num_tokens=TOKENS), inputs(tokens=TOKENS)
    assert_close(kernel(kernels, arrays, layout, rule, window), exact(arrays, layout, rule, window))


@on_each_platform
@pytest.mark.parametrize("query_heads, kv_heads", [(4, 4), (7, 1)])
def test_query_heads_share_key_heads(kernels, query_heads, kv_heads):
    arrays = inputs(tokens=TOKENS, query_heads=query_heads, kv_heads=kv_heads)
    assert_close(kernel(kernels, arrays, SHARED), exact(arrays, SHARED))


@on_each_platform
def test_operands_in_bfloat16_are_summed_in_float32(kernels):
    arrays = [x.astype(jnp.bfloat16) for x in inputs(tokens=TOKENS)]
    ours = kernel(kernels, arrays, SHARED)
    assert {x.dtype for x in ours[1:]} == {jnp.dtype(jnp.bfloat16)}
    rounded = [x.astype(jnp.float32) for x in arrays]
    assert_close([x.astype(jnp.float32) for x in ours], exact(rounded, SHARED), tolerance=2e-2)


@on_each_platform
def test_padding_is_finite_whatever_stands_there_and_changes_nothing(kernels):
    arrays = inputs(tokens=TOKENS)
    padding = (SHARED.segment_ids == 0)[:, :, None, None]
    by_key = padding.swapaxes(1, 2)
    filled = [jnp.where(mask, 1e3, x) for mask, x in zip((padding, by_key, by_key, padding), arrays, strict=True)]
    pairs = block_pairs(SHARED, [None], SIZE, with_padding=True)
    query, keys, values, _ = filled
    filled_inputs = PackedInputs(query, keys, values, SHARED, pairs, jnp.int32(UNREACHABLE))
    mixed, _ = kernels.attend(DEFAULT_SCORE_MOD, BLOCKING, filled_inputs)
    assert np.isfinite(mixed).all()
    assert_close(kernel(kernels, filled, SHARED), kernel(kernels, arrays, SHARED), tolerance=0)


@pytest.mark.parametrize("window", [None, 20, 5])
def test_the_pairs_of_a_query_block_follow_one_another_and_every_block_has_one(window):
    pairs = block_pairs(SHARED, [20, None, 5], SIZE, with_padding=True)
    *blocks, num_pairs = pairs.inside(jnp.int32(UNREACHABLE if window is None else window))
    # Nothing that the window shows is left out, and nothing else but blocks with themselves is there.
    visible = seen(SHARED, window).reshape(2, TOKENS // SIZE, SIZE, TOKENS // SIZE, SIZE).any(axis=(2, 4))
    expected = np.argwhere(visible | np.eye(TOKENS // SIZE, dtype=bool))
    in_device = expected[:, :1] * TOKENS // SIZE + expected[:, 1:]
    np.testing.assert_array_equal(np.stack(blocks, axis=1)[:num_pairs], in_device)


@on_each_platform
def test_a_layer_computes_only_the_pairs_inside_its_own_window(kernels):
    layout, window = layout_of([[(TOKENS, ())]], num_tokens=TOKENS), 7
    query, keys, values, weights = inputs(rows=1, tokens=TOKENS)
    # A pair with these values is not finite even where the window hides all of them.
    values = values.at[:, :, : 2 * SIZE].set(np.nan)
    mixed, query_grad, *_ = compiled(kernels, DEFAULT_SCORE_MOD)(query, keys, values, weights, layout, window)
    for by_query in (mixed, query_grad):
        is_finite = np.isfinite(by_query).reshape(TOKENS // SIZE, -1).all(axis=1)
        # A block sees itself and, through the window of its first token, the block before it.
        assert is_finite.tolist() == [False, False, False, True]
