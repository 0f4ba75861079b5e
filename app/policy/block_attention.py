"""Attention over long packed rows: block by block, and only over blocks that see something of each other.

A row's [T, T] scores are never held, neither forward nor backward, and nothing is computed for blocks that only
foreign segments, sibling completions, the future or what lies beyond a window would fill.

Source: Dao et al. 2022, FlashAttention, algorithms 1 and 4; here as one loop over pairs of blocks.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from app.mesh.axis_rules import on_each_device
from app.policy.row_layout import BlockPairs, RowLayout, visible
from app.policy.score_rule import MASKED, ScoreRule, soft_capped

# Query heads are split over devices only where the key heads that they share are.
QUERY = ("rows", "tokens", "kv_heads", "head")
KEYS = ("rows", "kv_heads", "tokens", "head")
NORMALIZER = ("rows", "tokens", "kv_heads", "head")
ROWS = ("rows", "tokens")
INPUTS = (QUERY, KEYS, KEYS, RowLayout(ROWS, ROWS, ROWS), BlockPairs(ROWS, ROWS, ROWS), ())


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def block_attention(
    query: Float[Array, "R T Q H"],
    keys: Float[Array, "R K T H"],
    values: Float[Array, "R K T H"],
    layout: RowLayout,
    pairs: BlockPairs,
    window: Int32[Array, ""],
    rule: ScoreRule,
    size: int,
) -> Float[Array, "R T Q H"]:
    """softmax(cap(scale q k^T)) v over the visible keys; 0 on padding.

    Args:
        pairs: `block_pairs` of these rows, for this window among others.
        size: tokens of a block; T is a multiple of it.
    """
    return _forward(query, keys, values, layout, pairs, window, rule, size)[0]


def _forward(*args: Any) -> tuple[Array, tuple]:
    *inputs, rule, size = args
    mix = on_each_device(functools.partial(_mixed, rule, size), inputs=INPUTS, outputs=(QUERY, NORMALIZER))
    mixed, normalizer = mix(*inputs)
    return mixed, (*inputs, mixed, normalizer)


def _backward(rule: ScoreRule, size: int, kept: tuple, by_mixed: Array) -> tuple:
    gradients = on_each_device(
        functools.partial(_gradients, rule, size),
        inputs=(*INPUTS, QUERY, NORMALIZER, QUERY),
        outputs=(QUERY, KEYS, KEYS),
    )
    return *gradients(*kept, by_mixed), None, None, None


block_attention.defvjp(_forward, _backward)


class Blocks(NamedTuple):
    """What the loops read, by number of the block. The G query heads that share a key head stand one below another,
    so that the scores of a pair are one product per key head.
    """

    query: Float[Array, "blocks K G*size H"]
    keys: Float[Array, "blocks K size H"]
    values: Float[Array, "blocks K size H"]
    layout: RowLayout
    window: Int32[Array, ""]

    @classmethod
    def of(cls, query: Array, keys: Array, values: Array, layout: RowLayout, window: Array, *, size: int) -> Blocks:
        num_kv_heads = keys.shape[1]
        return cls(
            _query_blocks(query, num_kv_heads, size),
            _key_blocks(keys, size),
            _key_blocks(values, size),
            RowLayout(*(x.reshape(-1, size) for x in layout)),
            window,
        )


class Scores(NamedTuple):
    """Of one pair of blocks; float32."""

    scaled_query: Float32[Array, "K G*size H"]
    keys: Float32[Array, "K size H"]
    values: Float32[Array, "K size H"]
    scores: Float32[Array, "K G*size size"]
    """Soft-capped, MASKED where not visible."""
    slope: Float32[Array, "K G*size size"] | None
    """Of the soft cap; None without one."""


def _scores(blocks: Blocks, query_block: Array, key_block: Array, rule: ScoreRule) -> Scores:
    query = blocks.query[query_block].astype(jnp.float32) * (rule.scale or blocks.query.shape[-1] ** -0.5)
    keys, values = blocks.keys[key_block].astype(jnp.float32), blocks.values[key_block].astype(jnp.float32)
    scores = soft_capped(jnp.einsum("kmh,knh->kmn", query, keys), rule.soft_cap)
    slope = None if rule.soft_cap is None else 1 - jnp.square(scores / rule.soft_cap)
    size = keys.shape[1]
    of_queries, of_keys = (RowLayout(*(x[block] for x in blocks.layout)) for block in (query_block, key_block))
    seen = visible(of_queries, of_keys, (query_block - key_block) * size, blocks.window)
    by_head = scores.reshape(keys.shape[0], -1, size, size)
    return Scores(query, keys, values, jnp.where(seen, by_head, MASKED).reshape(scores.shape), slope)


def _num_seen(pairs: BlockPairs, window: Array) -> Array:
    """They stand in front."""
    return jnp.sum(pairs.distance < window)


def _mixed(
    rule: ScoreRule,
    size: int,
    query: Array,
    keys: Array,
    values: Array,
    layout: RowLayout,
    pairs: BlockPairs,
    window: Array,
) -> tuple[Array, Array]:
    """What `block_attention` gives, and the log of each softmax's normalizer."""
    blocks = Blocks.of(query, keys, values, layout, window, size=size)
    query_blocks, key_blocks = pairs.query_block.ravel(), pairs.key_block.ravel()

    def add(i: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        query_block = query_blocks[i]
        scores = _scores(blocks, query_block, key_blocks[i], rule)
        mixed, highest, total = (x[query_block] for x in sums)
        now_highest = jnp.maximum(highest, scores.scores.max(axis=-1))
        # Where nothing was visible yet, the highest score is itself MASKED.
        weights = jnp.where(scores.scores > MASKED, jnp.exp(scores.scores - now_highest[..., None]), 0.0)
        shrink = jnp.exp(highest - now_highest)
        mixed = mixed * shrink[..., None] + jnp.einsum("kmn,knh->kmh", weights, scores.values)
        total = total * shrink + weights.sum(axis=-1)
        return tuple(x.at[query_block].set(new) for x, new in zip(sums, (mixed, now_highest, total), strict=True))

    shape = blocks.query.shape
    none = jnp.zeros(shape, jnp.float32), jnp.full(shape[:-1], MASKED), jnp.zeros(shape[:-1], jnp.float32)
    mixed, highest, total = jax.lax.fori_loop(0, _num_seen(pairs, window), add, none)
    total = jnp.where(total > 0, total, 1.0)
    normalizer = (highest + jnp.log(total)).reshape(query.shape[0], -1, *highest.shape[1:])
    return _query_rows(mixed / total[..., None], query), normalizer


def _gradients(
    rule: ScoreRule,
    size: int,
    query: Array,
    keys: Array,
    values: Array,
    layout: RowLayout,
    pairs: BlockPairs,
    window: Array,
    mixed: Array,
    normalizer: Array,
    by_mixed: Array,
) -> tuple[Array, Array, Array]:
    """Gradients by query, keys and values. The scores are computed again, pair by pair."""
    blocks = Blocks.of(query, keys, values, layout, window, size=size)
    query_blocks, key_blocks = pairs.query_block.ravel(), pairs.key_block.ravel()
    scale = rule.scale or query.shape[-1] ** -0.5
    by_mixed = _query_blocks(by_mixed, keys.shape[1], size).astype(jnp.float32)
    pull = jnp.sum(by_mixed * _query_blocks(mixed, keys.shape[1], size).astype(jnp.float32), axis=-1)
    normalizer = normalizer.reshape(pull.shape)

    def add(i: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        query_block, key_block = query_blocks[i], key_blocks[i]
        scores = _scores(blocks, query_block, key_block, rule)
        seen = scores.scores > MASKED
        weights = jnp.where(seen, jnp.exp(scores.scores - normalizer[query_block][..., None]), 0.0)
        by_output = by_mixed[query_block]
        by_weights = jnp.einsum("kmh,knh->kmn", by_output, scores.values)
        by_scores = weights * (by_weights - pull[query_block][..., None])
        by_scores = by_scores if scores.slope is None else by_scores * scores.slope
        by_query, by_keys, by_values = sums
        return (
            by_query.at[query_block].add(jnp.einsum("kmn,knh->kmh", by_scores, scores.keys)),
            by_keys.at[key_block].add(jnp.einsum("kmn,kmh->knh", by_scores, scores.scaled_query)),
            by_values.at[key_block].add(jnp.einsum("kmn,kmh->knh", weights, by_output)),
        )

    none = tuple(jnp.zeros(x.shape, jnp.float32) for x in blocks[:3])
    by_query, by_keys, by_values = jax.lax.fori_loop(0, _num_seen(pairs, window), add, none)
    return _query_rows(by_query * scale, query), _key_rows(by_keys, keys), _key_rows(by_values, values)


def _query_blocks(x: Float[Array, "R T Q H"], num_kv_heads: int, size: int) -> Float[Array, "blocks K G*size H"]:
    grouped = x.reshape(-1, size, num_kv_heads, x.shape[2] // num_kv_heads, x.shape[3])
    return grouped.transpose(0, 2, 3, 1, 4).reshape(grouped.shape[0], num_kv_heads, -1, x.shape[3])


def _query_rows(x: Float[Array, "blocks K G*size H"], like: Float[Array, "R T Q H"]) -> Float[Array, "R T Q H"]:
    num_blocks, num_kv_heads, _, head_dim = x.shape
    grouped = x.reshape(num_blocks, num_kv_heads, like.shape[2] // num_kv_heads, -1, head_dim)
    return grouped.transpose(0, 3, 1, 2, 4).reshape(like.shape).astype(like.dtype)


def _key_blocks(x: Float[Array, "R K T H"], size: int) -> Float[Array, "blocks K size H"]:
    rows, num_kv_heads, _, head_dim = x.shape
    return x.reshape(rows, num_kv_heads, -1, size, head_dim).swapaxes(1, 2).reshape(-1, num_kv_heads, size, head_dim)


def _key_rows(x: Float[Array, "blocks K size H"], like: Float[Array, "R K T H"]) -> Float[Array, "R K T H"]:
    return x.reshape(like.shape[0], -1, *x.shape[1:]).swapaxes(1, 2).reshape(like.shape).astype(like.dtype)
