"""Attention of one new token per row over a pool of KV blocks, by the platform's kernel or in plain XLA.

A pool [N, K, T, H] contains the keys or the values of one layer, in N blocks of T tokens. Tokens j T to (j + 1) T - 1
of row b are in the block `tables[b, j]`; rows may share full blocks.

Source: Kwon et al. 2023, PagedAttention; sums over blocks as in Dao et al. 2022, FlashAttention, algorithm 1.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32

from app.mesh.axis_rules import current_device, shard_map_by_dims
from app.mesh.chips import kernel_bytes
from app.model.architecture import Architecture
from app.model.attention.blockwise import KEY_DIMS, QUERY_DIMS
from app.model.attention.dense import ATTENTION_SCOPE, DEFAULT_SCORE_MOD, MASK_VALUE, ScoreMod, apply_soft_cap
from app.model.attention.packed import GPU_BLOCK_SIZE
from app.model.kernels.triton_backend import has_triton
from app.model.kv_cache import LayerCache, cache_block_bytes, cache_dims, to_codes, write_tokens

DECODE_BLOCK_SIZES = (512, 256, 128, 64, 32, 16)
"""Numbers of tokens that the TPU's decode kernel may read at once; it uses the largest that fits on the chip."""
BLOCKS_PER_ROW_MIN = 16
"""Minimum number of blocks for the longest row if blocks are scarce; `BLOCK_SIZE_MIN` takes precedence."""
BLOCK_SIZE_MAX = 512
"""Maximum number of tokens in a KV block."""
BLOCK_SIZE_MIN = {"tpu": 256, "gpu": 64}
"""Maps a platform to the minimum number of tokens in a KV block. TPU v4 and v6e read 512 nearly as quickly as 256."""


def decode_block_size(architecture: Architecture, cache_length: int, dtype: DTypeLike) -> int | None:
    """Returns the number of tokens that the current mesh's decode kernel reads at once; None without a kernel.

    Args:
        cache_length: number of tokens in a KV block, the largest possible result.
    """
    platform, kind = current_device()
    if platform == "gpu" and architecture.attention_implementation != "xla":
        # Triton needs powers of two, and multiplies float32 arrays in registers, which are too small for them.
        fits = architecture.head_dim & (architecture.head_dim - 1) == 0 and jnp.dtype(dtype) != jnp.float32
        return min(cache_length, GPU_BLOCK_SIZE) if fits and has_triton() else None
    if platform != "tpu" or architecture.attention_implementation == "xla":
        return None
    heads = architecture.num_kv_heads, architecture.head_dim
    smallest = DECODE_BLOCK_SIZES[-1]
    # Shorter caches are one block; otherwise blocks consist of whole tiles.
    longest = cache_length if cache_length < smallest else cache_length // smallest * smallest
    sizes = [min(longest, DECODE_BLOCK_SIZES[0]), *(size for size in DECODE_BLOCK_SIZES if size < longest)]
    return next((size for size in sizes if 2 * cache_block_bytes(*heads, size, dtype) <= kernel_bytes(kind)), None)


def cache_block_size(architecture: Architecture, max_length: int, dtype: DTypeLike, *, is_large: bool) -> int:
    """Returns the number of tokens in a KV block, for rows of up to `max_length` tokens.

    On average, half a block of each row stays empty, so blocks are large only where that is faster: on a TPU.

    Args:
        is_large: whether a TPU may use the fastest, large blocks, because memory for blocks is not scarce.
    """
    platform, smallest = current_device()[0], DECODE_BLOCK_SIZES[-1]
    if platform == "tpu" and is_large:
        size = 2 ** math.ceil(math.log2(max(max_length, smallest)))
    else:
        size = 2 ** math.floor(math.log2(max(max_length / BLOCKS_PER_ROW_MIN, smallest)))
        size = max(size, BLOCK_SIZE_MIN.get(platform, smallest))
    size = min(size, BLOCK_SIZE_MAX)
    # On a GPU, the kernel reads a block in chunks, so the block may be larger.
    return (decode_block_size(architecture, size, dtype) if platform == "tpu" else None) or size


def attend_in_xla(
    score_mod: ScoreMod,
    window: int | None,
    query: Float[Array, "B 1 Q H"],
    new: LayerCache,
    pool: LayerCache,
    positions: Int32[Array, "B"],
    active: Bool[Array, "B"],
    tables: Int32[Array, "B M"],
) -> tuple[Float[Array, "B 1 Q H"], LayerCache]:
    """Returns one device's attention output, undefined for inactive rows, and its pool with the new tokens.

    Blocks beyond the end of the longest active row are not read. Masked entries add exactly 0, so a row's result does
    not depend on other rows' lengths.

    Args:
        new: key and value of the new token, at `positions`. Only active rows are written.
    """
    _, num_kv_heads, block_size, head_dim = pool.keys.shape
    num_rows = query.shape[0]
    last = jnp.where(active, positions, 0) // block_size
    pool = write_tokens(new, pool, positions, active, tables)
    grouped = query.reshape(num_rows, num_kv_heads, query.shape[2] // num_kv_heads, head_dim)
    scale = score_mod.scale_for(head_dim)
    # XLA on CPUs cannot multiply bfloat16 arrays with a float32 result.
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


def extend_cache(
    query: Float[Array, "B 1 Q H"],
    key: Float[Array, "B K 1 H"],
    value: Float[Array, "B K 1 H"],
    cache: LayerCache,
    positions: Int32[Array, "B"],
    active: Bool[Array, "B"],
    tables: Int32[Array, "B M"],
    *,
    window: int | None = None,
    score_mod: ScoreMod = DEFAULT_SCORE_MOD,
    block_size: int | None = None,
) -> tuple[Float[Array, "B 1 Q H"], LayerCache]:
    """Writes the key and value of one new token per slot at `positions`; returns its attention output, and the cache.

    Args:
        active: rows whose results are used; other results are undefined.
        tables: the blocks of each slot, as indices on its device.
        window: the number of visible cache entries, including the new token's; None = all.
        block_size: the result of `decode_block_size`.
    """
    key_dims = cache_dims(cache.keys)
    query_dims = QUERY_DIMS if key_dims == KEY_DIMS else (key_dims[0], "tokens", "head", "head")
    # Pallas is slow to import and not needed on a CPU.
    if block_size is None:
        attend = functools.partial(attend_in_xla, score_mod, window)
    elif current_device()[0] == "gpu":
        from app.model.kernels import gpu_decode

        attend = functools.partial(gpu_decode.attend, score_mod, window, block_size)
    else:
        from app.model.kernels import tpu_decode

        attend = functools.partial(tpu_decode.attend, score_mod, window, block_size)
    new = LayerCache(key, value) if cache.key_scales is None else to_codes(LayerCache(key, value))
    arrays = positions, active, tables
    dims_of_cache = jax.tree.map(lambda x: key_dims[: x.ndim], cache)
    in_dims = query_dims, dims_of_cache, dims_of_cache, *[(key_dims[0], "tokens")[: x.ndim] for x in arrays]
    with jax.named_scope(ATTENTION_SCOPE):
        run = shard_map_by_dims(attend, in_dims=in_dims, out_dims=(query_dims, dims_of_cache))
        mixed, extended = run(query, new, cache, *arrays)
    return mixed, extended
