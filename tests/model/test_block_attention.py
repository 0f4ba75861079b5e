"""Tests of attention over rows of several blocks, compared with dense attention in float64."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Array

from app.model.attention.blockwise import block_attention
from app.model.attention.dense import DEFAULT_SCORE_MOD, ScoreMod
from app.model.attention.packed import make_block_pairs, packed_attention, platform_blocking
from app.model.attention.pairs import UNREACHABLE, Blocking, PackedInputs, block_pairs
from app.model.segment_layout import SegmentLayout
from tests.layouts import layout_of, seen, segments_of_rows
from tests.tiny import make_mesh

ROWS, TOKENS, QUERY_HEADS, KV_HEADS, HEAD = 2, 150, 6, 3, 5
"""Rows of two whole blocks and a part of one, for the blocks of a CPU."""
Inputs = tuple[Array, Array, Array, Array]
RULES = [DEFAULT_SCORE_MOD, ScoreMod(0.4, 0.6)]


def inputs(rows=ROWS, tokens=TOKENS, query_heads=QUERY_HEADS, kv_heads=KV_HEADS, seed=0) -> Inputs:
    """Returns queries, keys, values, and the weight of each result in a loss."""
    rng = np.random.default_rng(seed)
    shapes = [
        (rows, tokens, query_heads, HEAD),
        *[(rows, kv_heads, tokens, HEAD)] * 2,
        (rows, tokens, query_heads, HEAD),
    ]
    query, keys, values, weights = (jnp.asarray(rng.normal(size=shape).astype(np.float32)) for shape in shapes)
    return query, keys, values, weights


def oracle(query, keys, values, weights, visible, rule: ScoreMod) -> tuple[np.ndarray, ...]:
    """Computes the result and the gradients of sum(weights * result) with respect to queries, keys and values in
    float64."""
    query, keys, values, weights = (np.asarray(x, np.float64) for x in (query, keys, values, weights))
    rows, tokens, _, head = query.shape
    kv_heads = keys.shape[1]
    scale = rule.scale or head**-0.5
    by_group = lambda x: x.reshape(rows, tokens, kv_heads, -1, head)  # noqa: E731
    q, w, see = by_group(query), by_group(weights), visible[:, None, None]
    raw = np.einsum("rtkgh,rksh->rkgts", q, keys) * scale
    scores = rule.soft_cap * np.tanh(raw / rule.soft_cap) if rule.soft_cap else raw
    exps = np.where(see, np.exp(scores - scores.max(axis=-1, keepdims=True)), 0.0)
    p = exps / np.maximum(exps.sum(axis=-1, keepdims=True), 1e-300)
    by_p = np.einsum("rtkgh,rksh->rkgts", w, values)
    by_raw = p * (by_p - (p * by_p).sum(axis=-1, keepdims=True)) * scale
    by_raw = by_raw * (1 - (scores / rule.soft_cap) ** 2) if rule.soft_cap else by_raw
    return (
        np.einsum("rkgts,rksh->rtkgh", p, values).reshape(query.shape),
        np.einsum("rkgts,rksh->rtkgh", by_raw, keys).reshape(query.shape),
        np.einsum("rkgts,rtkgh->rksh", by_raw, q),
        np.einsum("rkgts,rtkgh->rksh", p, w),
    )


def assert_close(ours, exact, tolerance=1e-5) -> None:
    for a, b in zip(ours, exact, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, float(np.abs(b).max())))


def with_gradients(attention: Callable[..., Any]) -> Callable[..., tuple[Array, ...]]:
    """Returns (queries, keys, values, weights, ...) -> the result and the gradients of sum(weights * result)."""

    def run(query, keys, values, weights, *rest):
        mixed, pull = jax.vjp(lambda *x: attention(*x, *rest), query, keys, values)
        return mixed, *pull(weights)

    return run


@functools.cache
def packed(rule: ScoreMod, *, windowed: bool) -> Any:
    def attention(query, keys, values, layout, window):
        return packed_attention(query, keys, values, layout, window=window if windowed else None, score_mod=rule)

    return jax.jit(with_gradients(attention))


@functools.cache
def in_small_blocks(rule: ScoreMod, blocking: Blocking) -> Any:
    def attention(query, keys, values, layout, window):
        pairs = block_pairs(layout, [window], blocking.block_size)
        return block_attention(PackedInputs(query, keys, values, layout, pairs, window), rule, blocking)

    return jax.jit(with_gradients(attention))


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=12)
@given(
    segments=segments_of_rows(num_rows=ROWS, num_tokens=TOKENS, longest=90), window=st.sampled_from([None, 1, 7, 40])
)
def test_values_and_gradients_equal_a_float64_oracle_for_random_rows(rule, segments, window):
    layout = layout_of(segments, num_tokens=TOKENS)
    ours = packed(rule, windowed=window is not None)(*inputs(), layout, window or 0)
    assert_close(ours, oracle(*inputs(), seen(layout, window), rule))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("blocking", [Blocking(8, 1), Blocking(8, 5)], ids=str)
@settings(max_examples=12)
@given(
    segments=segments_of_rows(num_rows=3, num_tokens=40, longest=30), window=st.sampled_from([1, 7, 30, UNREACHABLE])
)
def test_pairs_one_by_one_or_several_at_once_equal_a_float64_oracle(rule, blocking, segments, window):
    layout = layout_of(segments, num_tokens=40)
    arrays = inputs(rows=3, tokens=40)
    ours = in_small_blocks(rule, blocking)(*arrays, layout, window)
    assert_close(ours, oracle(*arrays, seen(layout, window), rule))


TWO_SEGMENTS = layout_of([[(70, (20, 30)), (10, (5,))], [(3, (60,)), (40, (4,))]], num_tokens=TOKENS)


def test_padding_gets_zeros_and_gives_no_gradient():
    *arrays, weights = inputs()
    padding = np.asarray(TWO_SEGMENTS.segment_ids) == 0
    mixed, by_query, by_keys, by_values = packed(DEFAULT_SCORE_MOD, windowed=False)(*arrays, weights, TWO_SEGMENTS, 0)
    for x in (mixed, by_query, by_keys.swapaxes(1, 2), by_values.swapaxes(1, 2)):
        np.testing.assert_array_equal(x[padding], 0.0)
    # Whatever stands there.
    leftover = [
        arrays[0].at[padding].set(1e3),
        *(x.swapaxes(1, 2).at[padding].set(-1e3).swapaxes(1, 2) for x in arrays[1:]),
    ]
    again, *_ = packed(DEFAULT_SCORE_MOD, windowed=False)(*leftover, weights, TWO_SEGMENTS, 0)
    np.testing.assert_array_equal(again, mixed)


def test_no_bit_of_a_segment_depends_on_another_nor_one_of_a_completion_on_its_sibling():
    *arrays, weights = inputs()
    segment_ids, branch_ids, _ = map(np.asarray, TWO_SEGMENTS)
    before, *_ = packed(DEFAULT_SCORE_MOD, windowed=False)(*arrays, weights, TWO_SEGMENTS, 0)
    for changed in (segment_ids == 2, (segment_ids == 1) & (branch_ids == 1)):
        others = [x.swapaxes(1, 2) if x.shape[1] == KV_HEADS else x for x in arrays]
        query, *keys = [jnp.where(changed[..., None, None], 9.0 - x, x) for x in others]
        after, *_ = packed(DEFAULT_SCORE_MOD, windowed=False)(
            query, *(x.swapaxes(1, 2) for x in keys), weights, TWO_SEGMENTS, 0
        )
        assert not np.array_equal(after[changed], before[changed])
        np.testing.assert_array_equal(after[~changed], before[~changed])


def four_rows(kv_heads: int) -> tuple[Inputs, SegmentLayout]:
    rows = [[(70, (20, 30)), (10, (5,))], [], [(3, (60,)), (40, (4,))], [(60, (90,))]]
    return inputs(rows=4, query_heads=2 * kv_heads, kv_heads=kv_heads), layout_of(rows, num_tokens=TOKENS)


def scanned(query, keys, values, layout):
    """Applies two layers as the decoder does, which computes the block pairs once."""
    windows = jnp.array([UNREACHABLE, 30], jnp.int32)
    blocking = platform_blocking(layout.segment_ids.shape[1], 64, jnp.float32, group_size=1)
    pairs = make_block_pairs(layout, [None, 30], blocking)

    def layer(query, window):
        return packed_attention(query, keys, values, layout, window=window, pairs=pairs), None

    return jax.lax.scan(jax.checkpoint(layer), query, windows)[0]


@pytest.mark.parametrize(
    ("shape", "kv_heads", "num_rows"),
    [((2, 2, 2), 2, 4), ((2, 2, 2), 3, 4), ((4, 1, 2), 2, 4), ((1, 4, 2), 2, 3)],
    ids=["split-heads", "whole-heads", "data-parallel", "rows-that-do-not-divide"],
)
def test_any_mesh_gives_what_one_device_gives(shape, kv_heads, num_rows):
    arrays, layout = jax.tree.map(lambda x: x[:num_rows], four_rows(kv_heads))
    run = jax.jit(with_gradients(scanned))
    expected = run(*arrays, layout)
    with jax.set_mesh(make_mesh(shape)):
        ours = run(*arrays, layout)
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(np.abs(b).max()))


def test_no_device_waits_for_another():
    arrays, layout = four_rows(kv_heads=2)
    mesh = make_mesh((2, 2, 2))
    with jax.set_mesh(mesh):
        dims = jax.sharding.PartitionSpec
        rows, heads = dims(("dp", "fsdp")), dims(("dp", "fsdp"), None, "tp")
        keys = dims(("dp", "fsdp"), "tp")
        placed = [jax.device_put(x, s) for x, s in zip(arrays, (heads, keys, keys, heads), strict=True)]
        layout = jax.tree.map(lambda x: jax.device_put(x, rows), layout)
        text = jax.jit(with_gradients(scanned)).lower(*placed, layout).compile().as_text()
    assert not re.findall(r"all-reduce|all-gather|all-to-all|collective|reduce-scatter", str(text))


def test_no_array_of_all_scores_stands_in_the_program():
    tokens = 4 * 64 + 3
    arrays, layout = inputs(tokens=tokens), layout_of([[(200, (30,))]] * ROWS, num_tokens=tokens)
    text = str(packed(DEFAULT_SCORE_MOD, windowed=False).lower(*arrays, layout, 0).compile().as_text())
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\w\[([\d,]+)\]", text)}
    assert not [dims for dims in shapes if sum(size >= tokens for size in dims) > 1]
