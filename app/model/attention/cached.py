"""Attention of one new token per row over blocks of a pool, by XLA or a backend's kernel."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32

from app.mesh.axis_rules import current_device, shard_map_by_dims
from app.mesh.chips import kernel_bytes
from app.model.architecture import Architecture
from app.model.attention import paged
from app.model.attention.blockwise import KEY_DIMS, QUERY_DIMS
from app.model.attention.dense import ATTENTION_SCOPE, DEFAULT_SCORE_MOD, ScoreMod
from app.model.attention.packed import GPU_BLOCK_SIZE
from app.model.kernels.triton_backend import has_triton
from app.model.kv_cache import LayerCache, cache_block_bytes, cache_dims, to_codes

DECODE_BLOCK_SIZES = (512, 256, 128, 64, 32, 16)
"""Tokens of a cache that the TPU's decode kernel reads at once: the first that fits the cache and the chip's memory."""
BLOCKS_PER_ROW_MIN = 16
"""Blocks of a paged cache that the longest row should have at least, where they are scarce."""
BLOCK_SIZE_MAX = 512
"""Tokens of the largest block of a paged cache."""
BLOCK_SIZE_MIN = {"tpu": 256, "gpu": 64}
"""Tokens of the smallest one by platform, whose time for a block hardly depends on smaller sizes.

On a v4 and v6e, one of 256 takes nearly as long as one of 512.
"""


def decode_block_size(architecture: Architecture, cache_length: int, dtype: DTypeLike) -> int | None:
    """Returns the tokens that a kernel of the current mesh's devices reads from caches at once; None without a kernel.

    Args:
        cache_length: largest number of tokens, that of a block of the cache.
    """
    platform, kind = current_device()
    if platform == "gpu" and architecture.attention_implementation != "xla":
        # Triton has blocks of powers of two, and multiplies float32 arrays from registers, which have no room for them.
        fits = architecture.head_dim & (architecture.head_dim - 1) == 0 and jnp.dtype(dtype) != jnp.float32
        return min(cache_length, GPU_BLOCK_SIZE) if fits and has_triton() else None
    if platform != "tpu" or architecture.attention_implementation == "xla":
        return None
    heads = architecture.num_kv_heads, architecture.head_dim
    smallest = DECODE_BLOCK_SIZES[-1]
    # Shorter caches are one block; otherwise blocks are whole tiles.
    longest = cache_length if cache_length < smallest else cache_length // smallest * smallest
    sizes = [min(longest, DECODE_BLOCK_SIZES[0]), *(size for size in DECODE_BLOCK_SIZES if size < longest)]
    return next((size for size in sizes if 2 * cache_block_bytes(*heads, size, dtype) <= kernel_bytes(kind)), None)


def cache_block_size(architecture: Architecture, max_length: int, dtype: DTypeLike, *, is_large: bool) -> int:
    """Returns the tokens of a block of a paged cache, for rows of up to `max_length` tokens.

    Half a block of each row stays empty. A TPU reads large blocks faster, others read them all alike.

    Args:
        is_large: whether blocks may be as large as a TPU reads them best, because there are enough.
    """
    platform, smallest = current_device()[0], DECODE_BLOCK_SIZES[-1]
    if platform == "tpu" and is_large:
        size = 2 ** math.ceil(math.log2(max(max_length, smallest)))
    else:
        size = 2 ** math.floor(math.log2(max(max_length / BLOCKS_PER_ROW_MIN, smallest)))
        size = max(size, BLOCK_SIZE_MIN.get(platform, smallest))
    size = min(size, BLOCK_SIZE_MAX)
    # A GPU reads a block in several pieces.
    return (decode_block_size(architecture, size, dtype) if platform == "tpu" else None) or size


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
    """Writes the key and value of one new token per slot at `positions`; returns its attention, and the cache.

    Args:
        active: rows whose results are used; those of others have no meaning.
        tables: for each slot, the rows of the cache that are its blocks, as numbers among those of its device.
        window: the number of visible entries, including the token's own; None = all.
        block_size: the result of `decode_block_size`.
    """
    key_dims = cache_dims(cache.keys)
    query_dims = QUERY_DIMS if key_dims == KEY_DIMS else (key_dims[0], "tokens", "head", "head")
    # Pallas is slow to import and not needed on a CPU.
    if block_size is None:
        attend = functools.partial(paged.attend, score_mod, window)
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
    out_dims = query_dims, *(key_dims[: x.ndim] for x in jax.tree.leaves(cache))

    def attend_flat(*arguments: Any) -> tuple[Array, ...]:
        mixed, extended = attend(*arguments)
        return mixed, *jax.tree.leaves(extended)

    with jax.named_scope(ATTENTION_SCOPE):
        mixed, *extended = shard_map_by_dims(attend_flat, in_dims=in_dims, out_dims=out_dims)(
            query, new, cache, *arrays
        )
    return mixed, LayerCache(*extended)
