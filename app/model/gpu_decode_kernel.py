"""Attention of one new token per row over blocks of a pool, as a Pallas kernel for GPUs, compiled by Triton.

One program computes the query heads of one key head of one row: it loops over the row's blocks, and its sums stay in
registers. Operands keep their type, scores, softmax and sums are float32.

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

from app.model.attention_kernel import pair_scores, product
from app.model.paged_attention import write_tokens
from app.model.score_mod import MASK_VALUE, ScoreMod

MIN_QUERIES = 16
"""The smallest number of rows of a product on tensor cores."""


def attend(
    score_mod: ScoreMod,
    window: int | None,
    chunk_size: int,
    query: Float[Array, "B 1 Q H"],
    key: Float[Array, "B K 1 H"],
    value: Float[Array, "B K 1 H"],
    keys: Float[Array, "N K T H"],
    values: Float[Array, "N K T H"],
    positions: Int32[Array, "B"],
    active: Bool[Array, "B"],
    tables: Int32[Array, "B M"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B 1 Q H"], Float[Array, "N K T H"], Float[Array, "N K T H"]]:
    """Returns one device's attention, 0 for rows that are not active, and its pools with the new tokens.

    Args:
        chunk_size: tokens that are read at once, which divide a block.
        key: of the new token, at `positions`; so is `value`. Only active rows are written.
    """
    keys, values = write_tokens(key, value, keys, values, positions, active, tables)
    num_rows, num_kv_heads, group = len(query), keys.shape[1], query.shape[2] // keys.shape[1]
    padded = max(MIN_QUERIES, 2 ** (group - 1).bit_length())
    grouped = query.reshape(num_rows, num_kv_heads, group, -1)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, padded - group), (0, 0)))
    block = pl.BlockSpec((None, None, padded, query.shape[-1]), lambda row, head: (row, head, 0, 0))
    mixed = pl.pallas_call(
        functools.partial(_kernel, score_mod, score_mod.scale_for(query.shape[-1]), window, chunk_size),
        grid=(num_rows, num_kv_heads),
        in_specs=[block, *[pl.BlockSpec()] * 4],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(grouped.shape, query.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        name="attention_decode",
        interpret=interpret,
    )(grouped, keys, values, jnp.where(active, positions, -1), tables)
    return mixed[:, :, :group].reshape(query.shape), keys, values


def _kernel(score_mod: ScoreMod, scale: float, window: int | None, chunk_size: int, *refs: Any) -> None:
    query, keys, values, positions, tables, mixed = refs
    row, head = pl.program_id(0), pl.program_id(1)
    position, chunks_per_block = positions[row], keys.shape[2] // chunk_size
    own = query[...]

    def add(chunk: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest, total, mixed = sums
        place = tables[row, _divide(chunk, chunks_per_block)]
        tokens = pl.ds(jax.lax.rem(chunk, jnp.int32(chunks_per_block)) * chunk_size, chunk_size)
        token = chunk * chunk_size + jnp.arange(chunk_size, dtype=jnp.int32)
        visible = token <= position
        if window is not None:
            visible &= token > position - window
        scores = pair_scores(score_mod, scale, own, keys[place, head, tokens, :])
        scores = jnp.where(visible[None, :], scores, MASK_VALUE)
        new_highest = jnp.maximum(highest, jnp.max(scores, axis=1))
        shrink, weights = jnp.exp(highest - new_highest), jnp.exp(scores - new_highest[:, None])
        added = product(weights.astype(values.dtype), values[place, head, tokens, :], (1, 0))
        return new_highest, total * shrink + jnp.sum(weights, axis=1), mixed * shrink[:, None] + added

    first = 0 if window is None else _divide(jnp.maximum(position - window + 1, 0), chunk_size)
    rows = own.shape[0]
    none = jnp.full(rows, MASK_VALUE, jnp.float32), jnp.zeros(rows, jnp.float32), jnp.zeros(own.shape, jnp.float32)
    # A row that is not active is at -1 and has no chunks.
    _, total, sums = jax.lax.fori_loop(first, _divide(position + chunk_size, chunk_size), add, none)
    mixed[...] = (sums / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[:, None]).astype(mixed.dtype)


def _divide(x: Array, divisor: int) -> Array:
    """Returns a quotient of numbers that are not negative, without the case of negative ones, which Triton refuses."""
    return jax.lax.div(x, jnp.int32(divisor))
