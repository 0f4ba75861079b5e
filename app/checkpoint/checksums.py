"""Checksums of the arrays in a checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jax.stages import Compiled
from jaxtyping import Array, UInt32

CHECKSUM_MISMATCH = "the checksums of its arrays do not match the saved ones"


def checksums(state: Any) -> dict[str, int]:
    """Returns the checksum of each array by its path, in the form stored in checkpoints.

    All hosts must call it together.
    """
    # One program per array: a single program would hold a copy of every array at once, as integers or out of host
    # memory. One after the other, because concurrent sums over devices can starve the threads of a CPU.
    arrays = jax.tree.leaves_with_path(state)
    return {array_path(keys): int(_program(x.shape, x.dtype, x.sharding)(x)) for keys, x in arrays}


def compile_checksums(shapes: Any) -> None:
    """Compiles what `checksums` of such arrays will run."""
    for x in jax.tree.leaves(shapes):
        _program(x.shape, x.dtype, x.sharding)


@functools.cache
def _program(shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> Compiled:
    return jax.jit(checksum).lower(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)).compile()


def array_path(keys: Sequence[Any]) -> str:
    """Returns the path of an array in a state, in the form used in checkpoints."""
    return "/".join(jax.tree_util.keystr((key,), simple=True) for key in keys)


def checksum(x: Array) -> UInt32[Array, ""]:
    """Returns the sum of the words, of 16 or 32 bits, mod 2^32, which is exact and so the same on every mesh.

    TensorStore's compressed arrays have no checksum, so a flipped bit in a weight would go unnoticed.
    """
    word = jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32
    x = jax.device_put(x, jax.memory.Space.Device)
    return jnp.sum(jax.lax.bitcast_convert_type(x, word), dtype=jnp.uint32)
