"""Attention of one new token per row over a pool of blocks, in plain XLA: the oracle of the kernels.

A pool [N, K, T, H] holds the keys or the values of one layer. Tokens j T to (j + 1) T - 1 of row b are in the block
`tables[b, j]`, and rows may share blocks that are full.

Source: Kwon et al. 2023, PagedAttention; sums over blocks as in Dao et al. 2022, FlashAttention, algorithm 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from app.mesh.axis_rules import current_device
from app.model.attention.dense import MASK_VALUE, ScoreMod, apply_soft_cap
from app.model.kv_cache import LayerCache, write_tokens


def attend(
    score_mod: ScoreMod,
    window: int | None,
    query: Float[Array, "B 1 Q H"],
    new: LayerCache,
    pool: LayerCache,
    positions: Int32[Array, "B"],
    active: Bool[Array, "B"],
    tables: Int32[Array, "B M"],
) -> tuple[Float[Array, "B 1 Q H"], LayerCache]:
    """Returns one device's attention, meaningless for rows that are not active, and its pool with the new tokens.

    Only blocks up to the longest active row are read, so that a row's result depends on no other row's length: what
    is masked adds exactly 0.

    Args:
        new: of the new token, at `positions`. Only active rows are written.
    """
    _, num_kv_heads, block_size, head_dim = pool.keys.shape
    num_rows = query.shape[0]
    last = jnp.where(active, positions, 0) // block_size
    pool = write_tokens(new, pool, positions, active, tables)
    grouped = query.reshape(num_rows, num_kv_heads, query.shape[2] // num_kv_heads, head_dim)
    scale = score_mod.scale_for(head_dim)
    # XLA on CPU multiplies no bfloat16 arrays into float32 ones.
    operand = jnp.float32 if current_device()[0] == "cpu" else query.dtype

    def factors(scales: Array | None, blocks: Array) -> Array | float:
        return 1.0 if scales is None else scales[blocks][:, :, None]

    def add_block(j: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest, total, mixed = sums
        blocks = jax.lax.dynamic_index_in_dim(tables, j, axis=1, keepdims=False)
        token = j * block_size + jnp.arange(block_size)
        visible = token <= positions[:, None]
        if window is not None:
            visible &= token > positions[:, None] - window
        product = {"preferred_element_type": jnp.float32}
        scores = jnp.einsum("bkgh,bkth->bkgt", grouped.astype(operand), pool.keys[blocks].astype(operand), **product)
        scores = apply_soft_cap(scores * scale * factors(pool.key_scales, blocks), score_mod.soft_cap)
        scores = jnp.where(visible[:, None, None], scores, MASK_VALUE)
        new_highest = jnp.maximum(highest, jnp.max(scores, axis=-1, keepdims=True))
        shrink, weights = jnp.exp(highest - new_highest), jnp.exp(scores - new_highest)
        mixing = (weights * factors(pool.value_scales, blocks)).astype(operand)
        added = jnp.einsum("bkgt,bkth->bkgh", mixing, pool.values[blocks].astype(operand), **product)
        return new_highest, total * shrink + jnp.sum(weights, axis=-1, keepdims=True), mixed * shrink + added

    first = jnp.int32(0)
    if window is not None:
        seen = jnp.where(active, jnp.maximum(positions - window + 1, 0), jnp.iinfo(jnp.int32).max)
        first = jnp.minimum(jnp.min(seen) // block_size, jnp.max(last))
    statistic = jnp.zeros((*grouped.shape[:3], 1), jnp.float32)
    start = statistic + MASK_VALUE, statistic, jnp.zeros(grouped.shape, jnp.float32)
    _, total, mixed = jax.lax.fori_loop(first, jnp.max(last) + 1, add_block, start)
    return (mixed / total).reshape(query.shape).astype(query.dtype), pool
