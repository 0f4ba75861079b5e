"""Paged attention of one new token per row, as a Pallas kernel for GPUs, compiled by Triton.

One program computes the query heads of one key head of one row: it loops over the row's blocks, and its sums stay in
registers. Operands keep their dtype; scores, softmax and sums are float32.

Source: Kwon et al. 2023, PagedAttention, section 4.3; Dao et al. 2022, FlashAttention, algorithm 1.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int32

from app.model.attention.dense import MASK_VALUE, ScoreMod
from app.model.kernels.pair_scores import pair_scores, product
from app.model.kv_cache import LayerCache, write_tokens

MIN_QUERIES = 16
"""The smallest number of rows of a matmul on tensor cores."""


def attend(
    score_mod: ScoreMod,
    window: int | None,
    chunk_size: int,
    query: Float[Array, "B 1 Q H"],
    new: LayerCache,
    pool: LayerCache,
    positions: Int32[Array, "B"],
    active: Bool[Array, "B"],
    tables: Int32[Array, "B M"],
) -> tuple[Float[Array, "B 1 Q H"], LayerCache]:
    """Returns one device's attention output, 0 for inactive rows, and its pool with the new tokens.

    Args:
        chunk_size: number of tokens read at once; must divide the block size.
        new: key and value of the new token, at `positions`. Only active rows are written.
    """
    pool = write_tokens(new, pool, positions, active, tables)
    arrays = query[:, 0], *jax.tree.leaves(pool), jnp.where(active, positions, -1), tables
    num_rows, _, num_heads, head_dim = query.shape
    mixed = pl.pallas_call(
        functools.partial(_kernel, score_mod, score_mod.scale_for(head_dim), window, chunk_size),
        grid=(num_rows, pool.keys.shape[1]),
        in_specs=[pl.BlockSpec()] * len(arrays),
        out_specs=pl.BlockSpec(),
        out_shape=jax.ShapeDtypeStruct((num_rows, num_heads, head_dim), query.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        name="attention_decode",
    )(*arrays)
    return mixed[:, None], pool


def _kernel(score_mod: ScoreMod, scale: float, window: int | None, chunk_size: int, *refs: Any) -> None:
    query, keys, values, *scales, positions, tables, mixed = refs
    row, head = pl.program_id(0), pl.program_id(1)
    position, chunks_per_block = positions[row], keys.shape[2] // chunk_size
    group = query.shape[1] // keys.shape[1]
    num_queries = max(MIN_QUERIES, 2 ** (group - 1).bit_length())
    heads = row, pl.ds(head * group, num_queries), slice(None)
    is_own = jnp.broadcast_to(jnp.arange(num_queries)[:, None] < group, (num_queries, query.shape[2]))
    own = triton.load(query.at[heads], mask=is_own, other=0)

    def add(chunk: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest, total, mixed = sums
        place = tables[row, _divide(chunk, chunks_per_block)]
        tokens = pl.ds(jax.lax.rem(chunk, jnp.int32(chunks_per_block)) * chunk_size, chunk_size)
        token = chunk * chunk_size + jnp.arange(chunk_size, dtype=jnp.int32)
        visible = token <= position
        if window is not None:
            visible &= token > position - window
        key_scales, value_scales = (x[place, head, tokens][None, :] for x in scales) if scales else (None, None)
        scores = pair_scores(score_mod, scale, own, keys[place, head, tokens, :].astype(own.dtype), key_scales)
        scores = jnp.where(visible[None, :], scores, MASK_VALUE)
        new_highest = jnp.maximum(highest, jnp.max(scores, axis=1))
        shrink, weights = jnp.exp(highest - new_highest), jnp.exp(scores - new_highest[:, None])
        mixing = weights if value_scales is None else weights * value_scales
        added = product(mixing.astype(own.dtype), values[place, head, tokens, :].astype(own.dtype), (1, 0))
        return new_highest, total * shrink + jnp.sum(weights, axis=1), mixed * shrink[:, None] + added

    first = 0 if window is None else _divide(jnp.maximum(position - window + 1, 0), chunk_size)
    statistic = jnp.zeros(num_queries, jnp.float32)
    none = statistic + MASK_VALUE, statistic, jnp.zeros(own.shape, jnp.float32)
    # An inactive row has position -1 and no chunks.
    _, total, sums = jax.lax.fori_loop(first, _divide(position + chunk_size, chunk_size), add, none)
    result = (sums / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[:, None]).astype(mixed.dtype)
    triton.store(mixed.at[heads], result, mask=is_own)


def _divide(x: Array, divisor: int) -> Array:
    """Returns x // divisor for non-negative numbers, without JAX's code for negative numbers, which Triton rejects."""
    return jax.lax.div(x, jnp.int32(divisor))
