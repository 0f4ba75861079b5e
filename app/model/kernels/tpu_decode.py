"""Attention of one new token per row over its cache, as a Pallas kernel for TPUs that reads only blocks with tokens.

A grid step is one block of one row's cache. The blocks of a row are consecutive, so its sums stay on the chip until the
last one, when the new key and value are written in place. Operands keep their dtype; scores, softmax and sums are
float32.

Source: Dao et al. 2022, FlashAttention, algorithm 1; over blocks of a cache: Kwon et al. 2023, PagedAttention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int32

from app.model.attention.dense import MASK_VALUE, ScoreMod, apply_soft_cap
from app.model.kernels.pair_scores import pair_scores, product
from app.model.kv_cache import LayerCache, cache_block_bytes

OTHER_BYTES = 8 * 2**20
"""On-chip memory for everything except blocks of keys and values. Keep it small: memory that the kernel reserves but
does not use cannot hold weights that the compiler prefetches."""
TILE = 16
"""Tokens that are written together: the number of bfloat16 rows in a memory tile."""


def attend(
    score_mod: ScoreMod,
    window: int | None,
    block_size: int,
    query: Float[Array, "B 1 Q H"],
    new: LayerCache,
    cache: LayerCache,
    positions: Int32[Array, "B"],
    active: Bool[Array, "B"],
    tables: Int32[Array, "B M"],
) -> tuple[Float[Array, "B 1 Q H"], LayerCache]:
    """Returns one device's attention output, 0 for inactive rows, and its cache with the new tokens.

    Args:
        block_size: number of tokens in a block, a multiple of `TILE`.
        new: key and value of the new token, at `positions`.
        active: rows whose caches are read and written.
        tables: indices of each row's blocks in the cache [N, K, T, H], where T is `block_size`. A device without active
            rows writes into its first row's block.
    """
    num_rows, has_scales = len(query), cache.key_scales is not None
    _, num_kv_heads, length_of_block, head_dim = cache.keys.shape
    assert block_size == length_of_block and block_size % TILE == 0, (block_size, length_of_block)
    width = tables.shape[1]
    # The position of a stopped row with a full cache may be just beyond its last block.
    positions = jnp.minimum(positions, width * block_size - 1)
    # Visit a row even if none is active, because a grid needs at least one step.
    visited = active.at[0].set(active[0] | ~jnp.any(active))
    rows, blocks, num_pairs = _live_blocks(positions, visited, window, block_size, width)
    # A memory tile has twice as many rows of codes.
    tile_size = min(2 * TILE if has_scales else TILE, block_size)
    assert block_size % tile_size == 0, (block_size, tile_size)
    tiles = positions % block_size // tile_size
    scalars = [rows, blocks, positions, tiles, positions // block_size, tables.reshape(-1)]
    block_at, tile_at = _index_maps(width)
    by_head = query.reshape(num_rows, num_kv_heads, query.shape[2] // num_kv_heads, head_dim)
    of_row = lambda *sizes: pl.BlockSpec((None, num_kv_heads, *sizes), lambda p, rows, *_: (rows[p], 0, 0, 0))  # noqa: E731
    by_row, of_token = of_row(*by_head.shape[2:]), of_row(1, head_dim)
    block = pl.BlockSpec((None, num_kv_heads, block_size, head_dim), block_at)
    tile = pl.BlockSpec((None, num_kv_heads, tile_size, head_dim), tile_at)
    in_specs, out_specs = [by_row, of_token, of_token, block, block], [by_row, tile, tile]
    if has_scales:
        # Scales are copied in whole blocks, because a head's scales are consecutive.
        scales = pl.BlockSpec((None, num_kv_heads, block_size), lambda *grid_step: block_at(*grid_step)[:3])
        of_block = pl.BlockSpec((None, num_kv_heads, block_size), lambda *grid_step: (tile_at(*grid_step)[0], 0, 0))
        of_token = pl.BlockSpec((None, num_kv_heads, 1), lambda p, rows, *_: (rows[p], 0, 0))
        in_specs[3:3], out_specs[3:3] = [of_token] * 2, [of_block] * 2
        in_specs += [scales] * 2
    arrays = jax.tree.leaves(cache)
    first = len(scalars) + 1 + len(arrays)
    vmem_bytes = cache_block_bytes(num_kv_heads, head_dim, block_size, query.dtype) + OTHER_BYTES
    statistic = pltpu.VMEM((*by_head.shape[1:3], 1), jnp.float32)
    mixed, *extended = pl.pallas_call(
        functools.partial(_kernel, score_mod, score_mod.scale_for(head_dim), window, len(scalars)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(num_pairs,),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=[statistic, statistic, pltpu.VMEM(by_head.shape[1:], jnp.float32)],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (by_head, *arrays)],
        input_output_aliases={first + i: 1 + i for i in range(len(arrays))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem_bytes),
        name="attention_decode",
    )(*scalars, by_head, *jax.tree.leaves(new), *arrays)
    return jnp.where(active[:, None, None, None], mixed.reshape(query.shape), 0), LayerCache(*extended)


def _index_maps(blocks_per_row: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns two index maps: one for a grid step's block of the cache, one for the tile with the new token.

    Both get the kernel's prefetched scalars. `own` is the index, within a row, of the block with the new token.
    """

    def block_at(grid_step: Array, rows: Any, blocks: Any, positions: Any, tiles: Any, own: Any, tables: Any) -> Any:
        return tables[rows[grid_step] * blocks_per_row + blocks[grid_step]], 0, 0, 0

    def tile_at(grid_step: Array, rows: Any, blocks: Any, positions: Any, tiles: Any, own: Any, tables: Any) -> Any:
        row = rows[grid_step]
        return tables[row * blocks_per_row + own[row]], 0, tiles[row], 0

    return block_at, tile_at


def _live_blocks(
    positions: Int32[Array, "B"],
    visited: Bool[Array, "B"],
    window: int | None,
    block_size: int,
    blocks_per_row: int,
) -> tuple[Int32[Array, "pairs"], Int32[Array, "pairs"], Int32[Array, ""]]:
    """Returns the row and the index of each block with visible earlier tokens, and the number of these blocks.

    Blocks are in order, and every visited row has at least one.
    """
    last = jnp.maximum(positions - 1, 0) // block_size
    first = jnp.zeros_like(last) if window is None else jnp.maximum(positions - window + 1, 0) // block_size
    first = jnp.minimum(first, last)
    ends = jnp.cumsum(jnp.where(visited, last - first + 1, 0))
    pair = jnp.arange(len(positions) * blocks_per_row)
    rows = jnp.minimum(jnp.searchsorted(ends, pair, side="right", method="compare_all"), len(positions) - 1)
    before = jnp.concatenate([jnp.zeros(1, ends.dtype), ends])
    blocks = jnp.minimum(pair - before[rows] + first[rows], blocks_per_row - 1)
    return rows.astype(jnp.int32), blocks.astype(jnp.int32), ends[-1]


def _kernel(score_mod: ScoreMod, scale: float, window: int | None, num_scalars: int, *refs: Any) -> None:
    rows, blocks, positions = refs[:3]
    query, *arrays = refs[num_scalars:-3]
    highest, total, sums = refs[-3:]
    # In this order: the new token's arrays, the cache, and the written tiles.
    size = len(arrays) // 3
    new, cache, mixed, written = arrays[:size], arrays[size : 2 * size], arrays[2 * size], arrays[2 * size + 1 :]
    (key, value, *new_scales), (keys, values, *scales), (key_tile, value_tile, *scale_blocks) = new, cache, written
    grid_step, last_step = pl.program_id(0), pl.num_programs(0) - 1
    row, block = rows[grid_step], blocks[grid_step]
    position = positions[row]
    num_kv_heads, block_size, _ = keys.shape

    # Starts with the new token, which sees itself and is not yet in the cache.
    @pl.when((grid_step == 0) | (rows[jnp.maximum(grid_step - 1, 0)] != row))
    def _() -> None:
        own_key, own_value = (x[...].astype(jnp.float32) for x in (key, value))
        if scales:
            own_key, own_value = (x * y[...][:, :, None] for x, y in zip((own_key, own_value), new_scales, strict=True))
        own = query[...].astype(jnp.float32) * own_key
        highest[...] = apply_soft_cap(jnp.sum(own, axis=2, keepdims=True) * scale, score_mod.soft_cap)
        total[...] = jnp.ones_like(total)
        sums[...] = jnp.broadcast_to(own_value, sums.shape)

    token = block * block_size + jax.lax.broadcasted_iota(jnp.int32, (1, block_size), 1)
    visible = token < position
    if window is not None:
        visible &= token > position - window
    for head in range(num_kv_heads):
        old_keys, old_values = (x[head].astype(query.dtype) for x in (keys, values))
        key_scales, value_scales = (x[pl.ds(head, 1), :] for x in scales) if scales else (None, None)
        scores = jnp.where(visible, pair_scores(score_mod, scale, query[head], old_keys, key_scales), MASK_VALUE)
        new_highest = jnp.maximum(highest[head], jnp.max(scores, axis=1, keepdims=True))
        shrink, weights = jnp.exp(highest[head] - new_highest), jnp.exp(scores - new_highest)
        highest[head] = new_highest
        total[head] = total[head] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        mixing = weights if value_scales is None else weights * value_scales
        sums[head] = sums[head] * shrink + product(mixing.astype(old_values.dtype), old_values, (1, 0))

    @pl.when((grid_step == last_step) | (rows[jnp.minimum(grid_step + 1, last_step)] != row))
    def _() -> None:
        mixed[...] = (sums[...] / total[...]).astype(mixed.dtype)
        # Earlier tokens of the new token's tile are in this block. Later entries are overwritten before they are read.
        size = key_tile.shape[1]
        start = pl.multiple_of(position % block_size // size * size, size)
        is_old = jax.lax.broadcasted_iota(jnp.int32, (1, size, 1), 1) < position % size
        for tile, old, added in ((key_tile, keys, key), (value_tile, values, value)):
            tile[...] = jnp.where(is_old, old[:, pl.ds(start, size), :], added[...])
        before = jax.lax.broadcasted_iota(jnp.int32, (1, block_size), 1) < position % block_size
        for scale_block, old, added in zip(scale_blocks, scales, new_scales, strict=True):
            scale_block[...] = jnp.where(before, old[...], added[...])
