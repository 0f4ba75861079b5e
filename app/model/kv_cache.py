"""The KV cache: its arrays, their shardings, writes to blocks of a pool, and its 8-bit codes.

An int8 cache has one scale for the key and one for the value of each token and head. A scale maps the largest
absolute value to the end of the range. The scales multiply scores and weights, so that matmuls read the codes.
KIVI (Liu et al. 2024) has scales per channel for keys, because of outliers at 2 bits; it needs many tokens for a scale.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int8, Int32

from app.mesh.axis_rules import Dims, constrain, sharding_tree, spread_rows
from app.mesh.chips import padded_head_dim
from app.mesh.placement import abstract_arrays, num_row_shards
from app.model.architecture import Architecture

INT8_END = 127


class LayerCache(NamedTuple):
    """The keys and values of one layer."""

    keys: Float[Array, "B K S H"] | Int8[Array, "B K S H"]
    values: Float[Array, "B K S H"] | Int8[Array, "B K S H"]
    key_scales: Float32[Array, "B K S"] | None = None
    """Scales of the keys' codes; None if keys and values are not quantized."""
    value_scales: Float32[Array, "B K S"] | None = None


KVCache = tuple[LayerCache, ...]
"""The caches of all layers, in separate buffers that a decode step updates in place."""


def to_codes(cache: LayerCache) -> LayerCache:
    """Quantizes keys and values to int8 codes, with one scale per token and head."""
    tensors = [x.astype(jnp.float32) for x in (cache.keys, cache.values)]
    scales = [jnp.max(jnp.abs(x), axis=-1) / INT8_END for x in tensors]
    codes = [jnp.round(x / jnp.where(s == 0, 1, s)[..., None]) for x, s in zip(tensors, scales, strict=True)]
    return LayerCache(*(x.astype(jnp.int8) for x in codes), *scales)


def cache_shapes(
    architecture: Architecture, num_rows: int, length: int, dtype: DTypeLike, *, is_int8: bool = False
) -> KVCache:
    """Returns the shapes of a cache with `num_rows` rows (or blocks) of `length` tokens in each layer."""
    shape = num_rows, architecture.num_kv_heads, length, architecture.head_dim
    of_tokens: Any = jax.ShapeDtypeStruct(shape, jnp.int8 if is_int8 else dtype)
    scales: Any = jax.ShapeDtypeStruct(shape[:-1], jnp.float32) if is_int8 else None
    return (LayerCache(of_tokens, of_tokens, scales, scales),) * architecture.num_layers


def cache_dims(cache: Array | jax.ShapeDtypeStruct, mesh: Mesh | None = None) -> Dims:
    """Returns the logical dims of a cache array: split over tp by heads, or by rows if tp does not divide the heads.

    If tp divides neither the heads nor the rows, the array is replicated along tp.

    Args:
        mesh: the mesh; None = the current mesh.
    """
    num_rows, num_heads = cache.shape[:2]
    of_mesh = mesh or jax.sharding.get_abstract_mesh()
    splits_heads = of_mesh.empty or num_heads % of_mesh.shape["tp"] == 0
    return ("rows" if splits_heads else spread_rows(num_rows, mesh), "kv_heads", "tokens", "head")[: len(cache.shape)]


def num_cache_shards(mesh: Mesh, num_kv_heads: int) -> int:
    """Returns the number of parts into which cache rows are split; one per device if tp does not divide the heads."""
    return num_row_shards(mesh) if num_kv_heads % mesh.shape["tp"] == 0 else mesh.size


def constrain_cache(cache: KVCache) -> KVCache:
    """Constrains the cache to the shardings of `cache_dims`."""
    return jax.tree.map(lambda x: constrain(x, *cache_dims(x)), cache)


def abstract_cache(shapes: KVCache, mesh: Mesh) -> KVCache:
    """Returns a cache's shapes with the shardings of `constrain_cache`."""
    return abstract_arrays(shapes, sharding_tree(mesh, shapes, jax.tree.map(lambda x: cache_dims(x, mesh), shapes)))


def write_tokens(
    new: LayerCache,
    pool: LayerCache,
    positions: Int32[Array, "B"],
    active: Bool[Array, "B"],
    tables: Int32[Array, "B M"],
) -> LayerCache:
    """Returns the pool after writing each active row's new key and value at `positions`."""
    num_blocks, _, block_size, _ = pool.keys.shape
    own = jnp.take_along_axis(tables, positions[:, None] // block_size, axis=1)[:, 0]
    place, offset = jnp.where(active, own, num_blocks), positions % block_size
    return jax.tree.map(lambda pool, new: pool.at[place, :, offset].set(new[:, :, 0], mode="drop"), pool, new)


def cache_block_bytes(num_kv_heads: int, head_dim: int, block_size: int, dtype: DTypeLike) -> int:
    """Returns the bytes of on-chip memory of a TPU for a block of keys and a block of values, both double-buffered."""
    return 4 * num_kv_heads * block_size * padded_head_dim(head_dim) * jnp.dtype(dtype).itemsize
