"""Attention, behind functions, so that a backend's kernel can take their place.

All scores, softmax and accumulation are float32: in bfloat16 the logits of long rows lose the
digits that decide the softmax.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

QUERY_BLOCK = 1024
"""Longer rows attend block by block: scores of one block of queries are alive at a time."""

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)
"""Finite, so that a row with nothing to see gets a harmless uniform softmax instead of NaN."""


class ScoreRule(NamedTuple):
    """How q k^T becomes the scores of the softmax."""

    scale: float | None = None
    """1 / sqrt(H) when None."""
    soft_cap: float | None = None
    """See `soft_capped`."""


PLAIN = ScoreRule()


def rotate(x: Float[Array, "R T heads H"], angles: Float[Array, "R T half"]) -> Float[Array, "R T heads H"]:
    """Rotary position embedding, halves convention: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin).

    Source: Su et al. 2021, RoFormer, eq. 34, with dims paired (i, i + H/2).
    """
    cos, sin = jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


def soft_capped(x: Float[Array, "*dims"], cap: float | None) -> Float[Array, "*dims"]:
    """Cap tanh(x / cap): close to x while it is small, never beyond the cap. x itself when there is none."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def attend(
    query: Float[Array, "R T Q H"],
    keys: Float[Array, "R K S H"],
    values: Float[Array, "R K S H"],
    visible: Bool[Array, "R T S"],
    rule: ScoreRule = PLAIN,
) -> Float[Array, "R T Q H"]:
    """softmax(cap(scale q k^T)) v over the visible keys; Q / K query heads share a key head.

    Source: Vaswani et al. 2017; grouped queries: Ainslie et al. 2023; soft caps: Riviere et al. 2024 (Gemma 2).
    """
    rows, num_tokens, num_query_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    grouped = query.reshape(rows, num_tokens, num_kv_heads, num_query_heads // num_kv_heads, head_dim)
    scores = jnp.einsum("rtkgh,rksh->rkgts", grouped, keys, preferred_element_type=jnp.float32)
    scores = soft_capped(scores * (rule.scale or head_dim**-0.5), rule.soft_cap)
    scores = jnp.where(visible[:, None, None], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    # Accumulated in float32 without asking; asking would also make the result float32, and that product of
    # bfloat16 is one that XLA on CPU refuses to run when there are several rows and key heads.
    mixed = jnp.einsum("rkgts,rksh->rtkgh", weights, values)
    return mixed.reshape(query.shape).astype(query.dtype)


def packed_attention(
    query: Float[Array, "R T Q H"],
    keys: Float[Array, "R K T H"],
    values: Float[Array, "R K T H"],
    segment_ids: Int32[Array, "R T"],
    *,
    window: int | Int32[Array, ""] | None = None,
    rule: ScoreRule = PLAIN,
) -> Float[Array, "R T Q H"]:
    """Causal attention inside each segment of a packed row. Segment 0 is padding and sees nothing.

    Args:
        window: how many tokens a token sees, itself included; all before it when None. Inside a segment the
            distance along the row is that of the positions.
    """
    num_tokens = query.shape[1]

    def block(query: Array, first: Array | int) -> Array:
        at = first + jnp.arange(query.shape[1])
        own = jax.lax.dynamic_slice_in_dim(segment_ids, first, query.shape[1], axis=1)
        causal = at[:, None] >= jnp.arange(num_tokens)[None, :]
        if window is not None:
            causal &= at[:, None] - jnp.arange(num_tokens)[None, :] < window
        visible = causal & (own[:, :, None] == segment_ids[:, None, :]) & (own[:, :, None] != 0)
        return attend(query, keys, values, visible, rule)

    if num_tokens <= QUERY_BLOCK:
        return block(query, 0)
    # The rung 1536, for one, is no multiple of QUERY_BLOCK.
    size = math.gcd(num_tokens, QUERY_BLOCK)
    blocks = jnp.moveaxis(query.reshape(query.shape[0], -1, size, *query.shape[2:]), 1, 0)
    firsts = jnp.arange(blocks.shape[0]) * size
    mixed = jax.lax.map(lambda args: jax.checkpoint(block)(*args), (blocks, firsts))
    return jnp.moveaxis(mixed, 0, 1).reshape(query.shape)


def cached_attention(
    query: Float[Array, "B 1 Q H"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S H"],
    positions: Int32[Array, "B"],
    *,
    window: int | None = None,
    rule: ScoreRule = PLAIN,
) -> Float[Array, "B 1 Q H"]:
    """One new token per slot, at `positions`, over the cache entries up to and including its own.

    Args:
        window: how many of them it sees, its own included; all when None.
    """
    slots = jnp.arange(keys.shape[2])[None, :]
    visible = slots <= positions[:, None]
    if window is not None:
        visible &= slots > positions[:, None] - window
    return attend(query, keys, values, visible[:, None, :], rule)
