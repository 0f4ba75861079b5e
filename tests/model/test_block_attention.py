"""Tests attention over packed rows, by XLA and by the kernels in Pallas' interpreter, against float64 oracles."""

import functools
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from jaxtyping import Array

from app.model.attention import blockwise
from app.model.attention.dense import DEFAULT_SCORE_MOD, ScoreMod, dot_product_attention
from app.model.attention.packed import make_block_pairs, packed_attention, platform_blocking
from app.model.attention.pairs import UNREACHABLE, Blocking, BlockPairs, PackedInputs, block_pairs
from app.model.kernels import gpu_attention, tpu_attention
from app.model.segment_layout import SegmentLayout, attention_mask
from tests.layouts import RULES, layout_of, seen, segments_of_rows
from tests.tiny import make_mesh

ROWS, TOKENS, QUERY_HEADS, KV_HEADS, HEAD = 2, 150, 6, 3, 5
"""Sizes with which a row has two whole CPU blocks and a part of a third."""
Inputs = tuple[Array, Array, Array, Array]


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
    """Computes the result in float64, and the gradients of sum(weights * result) in queries, keys and values."""
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


@pytest.mark.parametrize("rule", RULES)
def test_dense_attention_equals_a_float64_oracle(rule):
    visible = (np.random.default_rng(1).random((ROWS, 7, 7)) < 0.5) | np.eye(7, dtype=bool)
    attention = with_gradients(lambda q, k, v: dot_product_attention(q, k, v, jnp.asarray(visible), rule))
    assert_close(attention(*inputs(tokens=7)), oracle(*inputs(tokens=7), visible, rule))


@settings(max_examples=16)
@given(
    segments=segments_of_rows(num_rows=ROWS, num_tokens=TOKENS, longest=90), window=st.sampled_from([None, 1, 7, 40])
)
def test_packed_attention_over_random_rows_equals_a_float64_oracle(segments, window):
    rule = RULES[window == 7]
    layout = layout_of(segments, num_tokens=TOKENS)
    ours = packed(rule, windowed=window is not None)(*inputs(), layout, window or 0)
    assert_close(ours, oracle(*inputs(), seen(layout, window), rule))


SMALL_TOKENS, SIZE = 64, 16
IMPLEMENTATIONS = pytest.mark.parametrize(
    ("implementation", "at_once"),
    [(blockwise, 1), (blockwise, 5), (tpu_attention, 1), (gpu_attention, 1)],
    ids=["xla", "xla-five-pairs-at-once", "tpu", "gpu"],
)
SMALL = layout_of([[(20, (9, 14)), (6, (5,))], [(3, (30,))]], num_tokens=SMALL_TOKENS)
"""Rows with shared and unshared prompts; the second ends with whole blocks of padding."""


@functools.cache
def compiled(implementation: ModuleType, at_once: int, rule: ScoreMod) -> Any:
    blocking = Blocking(SIZE, at_once)

    def run(query, keys, values, weights, layout, window):
        pairs = block_pairs(layout, [5, window, UNREACHABLE], SIZE, with_padding=True)
        arguments = rule, blocking, PackedInputs(query, keys, values, layout, pairs, window)
        mixed, normalizer = implementation.attend(*arguments)
        return mixed, *implementation.attention_grads(*arguments, mixed, normalizer, weights)

    return jax.jit(run)


def at_tokens(implementation, at_once, arrays, layout, rule=RULES[1], window=None):
    """Returns the results and gradients at the tokens; they have no meaning on padding."""
    is_token = (layout.segment_ids != 0)[:, :, None, None]
    query, keys, values, weights = arrays
    weights, window_size = jnp.where(is_token, weights, 0.0), jnp.int32(window or UNREACHABLE)
    run = compiled(implementation, at_once, rule)
    mixed, *gradients = run(query, keys, values, weights, layout, window_size)
    return jnp.where(is_token, mixed, 0.0), *gradients


def exact(arrays, layout: SegmentLayout, rule=RULES[1], window: int | None = None):
    query, keys, values, weights = arrays
    weights = jnp.where((layout.segment_ids != 0)[:, :, None, None], weights, 0.0)
    return oracle(query, keys, values, weights, seen(layout, window), rule)


@IMPLEMENTATIONS
@pytest.mark.usefixtures("interpreted")
@settings(max_examples=6)
@given(
    segments=segments_of_rows(num_rows=2, num_tokens=SMALL_TOKENS, longest=40),
    window=st.sampled_from([None, 1, 7, SIZE, 40]),
)
def test_each_attention_implementation_equals_a_float64_oracle(implementation, at_once, segments, window):
    rule, layout, arrays = RULES[1], layout_of(segments, num_tokens=SMALL_TOKENS), inputs(tokens=SMALL_TOKENS)
    ours = at_tokens(implementation, at_once, arrays, layout, rule, window)
    assert_close(ours, exact(arrays, layout, rule, window))


@IMPLEMENTATIONS
@pytest.mark.usefixtures("interpreted")
def test_bfloat16_attention_with_seven_query_heads_per_key_head_equals_an_oracle(implementation, at_once):
    arrays = [x.astype(jnp.bfloat16) for x in inputs(tokens=SMALL_TOKENS, query_heads=7, kv_heads=1)]
    ours = at_tokens(implementation, at_once, arrays, SMALL, DEFAULT_SCORE_MOD)
    assert {x.dtype for x in ours[1:]} == {jnp.dtype(jnp.bfloat16)}
    # Operands are rounded, but sums are not.
    ours, rounded = ([x.astype(jnp.float32) for x in both] for both in (ours, arrays))
    assert_close(ours, exact(rounded, SMALL, DEFAULT_SCORE_MOD), tolerance=2e-2)


@IMPLEMENTATIONS
@pytest.mark.usefixtures("interpreted")
def test_attention_is_finite_on_padding_and_ignores_it(implementation, at_once):
    arrays = inputs(tokens=SMALL_TOKENS)
    padding = (SMALL.segment_ids == 0)[:, :, None, None]
    by_key = padding.swapaxes(1, 2)
    filled = [jnp.where(mask, 1e3, x) for mask, x in zip((padding, by_key, by_key, padding), arrays, strict=True)]
    run = compiled(implementation, at_once, RULES[1])
    assert np.isfinite(run(*filled, SMALL, jnp.int32(UNREACHABLE))[0]).all()
    ours, expected = (at_tokens(implementation, at_once, x, SMALL) for x in (filled, arrays))
    assert_close(ours, expected, tolerance=0)


@pytest.mark.parametrize("implementation", [blockwise, tpu_attention, gpu_attention], ids=["xla", "tpu", "gpu"])
@pytest.mark.usefixtures("interpreted")
def test_only_block_pairs_inside_the_window_are_computed(implementation):
    layout, window = layout_of([[(SMALL_TOKENS, ())]] * 2, num_tokens=SMALL_TOKENS), 7
    query, keys, values, weights = inputs(tokens=SMALL_TOKENS)
    # With these values, a computed pair is not finite even where the window masks all of it.
    values = values.at[:, :, : 2 * SIZE].set(np.nan)
    run = compiled(implementation, 1, RULES[1])
    for by_query in run(query, keys, values, weights, layout, jnp.int32(window))[:2]:
        is_finite = np.isfinite(by_query).reshape(2, SMALL_TOKENS // SIZE, -1).all(axis=(0, 2))
        # A block sees itself and, through the window of its first token, the block before it.
        assert is_finite.tolist() == [False, False, False, True]


TWO_SEGMENTS = layout_of([[(70, (20, 30)), (10, (5,))], [(3, (60,)), (40, (4,))]], num_tokens=TOKENS)


def test_attention_is_bitwise_independent_of_padding_and_other_completions():
    *arrays, weights = inputs()
    segment_ids, branch_ids, _ = map(np.asarray, TWO_SEGMENTS)
    run = packed(DEFAULT_SCORE_MOD, windowed=False)
    before, by_query, by_keys, by_values = run(*arrays, weights, TWO_SEGMENTS, 0)
    for x in (before, by_query, by_keys.swapaxes(1, 2), by_values.swapaxes(1, 2)):
        np.testing.assert_array_equal(x[segment_ids == 0], 0.0)
    for changed in (segment_ids == 2, (segment_ids == 1) & (branch_ids == 1)):
        others = [x.swapaxes(1, 2) if x.shape[1] == KV_HEADS else x for x in arrays]
        query, *keys = [jnp.where(changed[..., None, None], 9.0 - x, x) for x in others]
        after, *_ = run(query, *(x.swapaxes(1, 2) for x in keys), weights, TWO_SEGMENTS, 0)
        assert not np.array_equal(after[changed], before[changed])
        np.testing.assert_array_equal(after[~changed], before[~changed])


def scanned(query, keys, values, layout):
    """Applies two layers as the decoder does, which computes the block pairs once."""
    windows = jnp.array([UNREACHABLE, 30], jnp.int32)
    blocking = platform_blocking(layout.segment_ids.shape[1], 64, jnp.float32, group_size=1)
    pairs = make_block_pairs(layout, [None, 30], blocking)

    def layer(query, window):
        return packed_attention(query, keys, values, layout, window=window, pairs=pairs), None

    return jax.lax.scan(jax.checkpoint(layer), query, windows)[0]


def test_attention_on_a_mesh_equals_attention_on_one_device():
    rows = [[(70, (20, 30)), (10, (5,))], [], [(3, (60,)), (40, (4,))], [(60, (90,))]]
    arrays, layout = inputs(rows=4, query_heads=4, kv_heads=2), layout_of(rows, num_tokens=TOKENS)
    run = jax.jit(with_gradients(scanned))
    expected = run(*arrays, layout)
    with jax.set_mesh(make_mesh((2, 2, 2))):
        rows, heads = ("dp", "fsdp"), "tp"
        specs = PartitionSpec(rows, None, heads), *[PartitionSpec(rows, heads)] * 2, PartitionSpec(rows, None, heads)
        placed = [jax.device_put(x, spec) for x, spec in zip(arrays, specs, strict=True)]
        placed.append(jax.tree.map(lambda x: jax.device_put(x, PartitionSpec(rows)), layout))
        text = str(run.lower(*placed).compile().as_text())
        ours = run(*placed)
    assert not re.findall(r"all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter", text)
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(np.abs(b).max()))


def test_attention_never_materializes_all_scores():
    tokens = 4 * 64 + 3
    arrays, layout = inputs(tokens=tokens), layout_of([[(200, (30,))]] * ROWS, num_tokens=tokens)
    text = str(packed(DEFAULT_SCORE_MOD, windowed=False).lower(*arrays, layout, 0).compile().as_text())
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\w\[([\d,]+)\]", text)}
    assert not [dims for dims in shapes if sum(size >= tokens for size in dims) > 1]


BLOCK = 4


@settings(max_examples=40)
@given(segments_of_rows(num_rows=2, num_tokens=14, longest=6), st.sampled_from([None, 1, 2, 5]))
def test_attention_mask_equals_the_rule_for_each_pair_of_tokens(rows, window):
    layout = layout_of(rows, num_tokens=14)
    np.testing.assert_array_equal(attention_mask(layout, layout, 0, window), seen(layout, window))


@functools.cache
def pairs_function(windows: tuple[int | None, ...], *, with_padding: bool):
    return jax.jit(lambda layout: block_pairs(layout, windows, BLOCK, with_padding=with_padding))


def visited(pairs: BlockPairs, window: int | None) -> list[tuple[int, int]]:
    """Returns the part of the list that a layer with this window reads."""
    *blocks, num = pairs.inside(jnp.int32(UNREACHABLE if window is None else window))
    return list(zip(*(x[:num].tolist() for x in blocks), strict=True))


def needed(layout: SegmentLayout, window: int | None, *, with_padding: bool) -> list[tuple[int, int]]:
    """Returns the pairs of blocks with a visible entry, in order; with padding, also of each block with itself."""
    entries = seen(layout, window)
    rows, num_tokens, _ = entries.shape
    blocks = num_tokens // BLOCK
    some = entries.reshape(rows, blocks, BLOCK, blocks, BLOCK).any(axis=(2, 4))
    some |= with_padding & np.eye(blocks, dtype=bool)
    return [(row * blocks + query, row * blocks + key) for row, query, key in np.argwhere(some).tolist()]


@pytest.mark.parametrize(("windows", "with_padding"), [((2, 7, None), False), ((3, None), True)])
@settings(max_examples=40)
@given(rows=segments_of_rows(num_rows=2, num_tokens=5 * BLOCK, longest=12))
def test_only_block_pairs_with_visible_entries_are_visited(windows, with_padding, rows):
    layout = layout_of(rows, num_tokens=5 * BLOCK)
    pairs = pairs_function(windows, with_padding=with_padding)(layout)
    for window in windows:
        assert visited(pairs, window) == needed(layout, window, with_padding=with_padding)
