"""The arrays in a checkpoint: their paths, checksums and dtypes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Sharding
from jax.stages import Compiled
from jaxtyping import Array, UInt32


def checksums(state: Any) -> dict[str, int]:
    """Maps the path of each array (see `array_path`) to its checksum, as stored in checkpoints.

    All hosts must call it together.
    """
    # One program per array: a single program would hold a copy of every array at once, as integers or out of host
    # memory. One after the other, because concurrent reductions over devices can starve a CPU's threads.
    arrays = jax.tree.leaves_with_path(state)
    return {array_path(keys): int(_program(x.shape, x.dtype, x.sharding)(x)) for keys, x in arrays}


def compile_checksums(shapes: Any) -> None:
    """Compiles the programs of `checksums` for arrays with these shapes, dtypes and shardings."""
    for x in jax.tree.leaves(shapes):
        _program(x.shape, x.dtype, x.sharding)


@functools.cache
def _program(shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> Compiled:
    return jax.jit(checksum).lower(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)).compile()


def array_path(keys: Sequence[Any]) -> str:
    """Returns the path of an array in a state, in the form used in checkpoints."""
    return "/".join(jax.tree_util.keystr((key,), simple=True) for key in keys)


def checksum(x: Array) -> UInt32[Array, ""]:
    """Returns the sum of an array's 16- or 32-bit words mod 2^32; it is exact, and so the same on every mesh.

    TensorStore's compressed arrays have no checksum, so a flipped bit in a weight would go unnoticed.
    """
    word = jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32
    x = jax.device_put(x, jax.memory.Space.Device)
    return jnp.sum(jax.lax.bitcast_convert_type(x, word), dtype=jnp.uint32)


def saved_metadata(folder: Path) -> Any:
    """Returns the tree of a checkpoint's state with the metadata of each array."""
    return ocp.PyTreeCheckpointHandler().metadata(folder / "state").tree  # pyright: ignore[reportArgumentType]


def with_saved_dtypes(folder: Path, target: Any) -> Any:
    """Returns the shapes of a state, or of a part of it, with the dtypes that the arrays have in a checkpoint.

    Settings may have changed the moments' dtypes since the checkpoint was saved.
    """
    dtypes = {array_path(keys): x.dtype for keys, x in jax.tree.leaves_with_path(saved_metadata(folder))}

    def with_saved_dtype(keys: Any, x: Any) -> jax.ShapeDtypeStruct:
        # Orbax reports missing arrays.
        return jax.ShapeDtypeStruct(x.shape, dtypes.get(array_path(keys), x.dtype), sharding=x.sharding)

    return jax.tree.map_with_path(with_saved_dtype, target)


def convert_dtypes(state: Any, target: Any) -> Any:
    """Returns a state with the dtypes of `target`. All hosts must call it together."""

    def convert(x: Array, like: jax.ShapeDtypeStruct) -> Array:
        if x.dtype == like.dtype:
            return x
        cast = lambda x: jax.device_put(x, jax.memory.Space.Device).astype(like.dtype)  # noqa: E731
        return jax.jit(cast, out_shardings=like.sharding)(x)

    return jax.tree.map(convert, state, target)
