"""Sends arrays to and from process 0 in pieces, because a device may lack memory for a whole one."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from itertools import chain, product
from math import prod
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Compiled
from jaxtyping import Array

MAX_PIECE_BYTES = 1 << 26
"""Maximum bytes of a piece: a device can hold three, and the transfer takes longer than its start-up."""


def gather_in_pieces(x: Array, whole: np.ndarray | None) -> None:
    """Copies an array that is spread over hosts into `whole`; a host whose `whole` is None only sends its parts.

    All hosts must call it together.
    """
    gather_piece, part, block = piece_program(x), x.sharding.shard_shape(x.shape), _block_shape(x)
    num_parts = [size // own for size, own in zip(x.shape, part, strict=True)]
    # The last block of a dim overlaps the one before it, so that all pieces have the same shape.
    starts = ([min(i, own - size) for i in range(0, own, size)] for own, size in zip(part, block, strict=True))
    for start in product(*starts):
        # Waits for each piece, because a program that has been started already holds the memory of its result.
        piece = gather_piece(x, np.asarray(start, np.int32)).block_until_ready()
        if whole is not None:
            received = np.asarray(piece.addressable_data(0)).reshape(_interleaved(num_parts, block))
            blocks = (slice(i, i + size) for i, size in zip(start, block, strict=True))
            index = tuple(_interleaved([slice(None)] * x.ndim, blocks))
            whole.reshape(_interleaved(num_parts, part), copy=False)[index] = received


def piece_program(x: Array | jax.ShapeDtypeStruct) -> Compiled:
    """Returns the program that cuts a block out of each part of an array and copies the blocks to every device.

    Args:
        x: an array, or its shape, dtype and sharding.
    """
    return _compiled(x.shape, x.dtype, x.sharding, _block_shape(x))


@functools.cache
def _compiled(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding, block: tuple[int, ...]) -> Compiled:
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())

    def cut(part: Array, start: Array) -> Array:
        # A TPU cuts an array in host memory along one dim only.
        first = jax.lax.dynamic_slice_in_dim(part, start[0], block[0])
        first = jax.device_put(first, jax.memory.Space.Device)
        return jax.lax.dynamic_slice(first, (0, *start[1:]), block)

    # Each device cuts its own part: for a slice of the whole array, XLA would first gather a dim that is split.
    in_specs = sharding.spec, PartitionSpec()
    cut_parts = jax.shard_map(cut, mesh=sharding.mesh, in_specs=in_specs, out_specs=sharding.spec)
    gather = jax.jit(cut_parts, out_shardings=everywhere)
    start = jax.ShapeDtypeStruct((len(shape),), np.int32, sharding=everywhere)
    return gather.lower(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding), start).compile()


def _block_shape(x: Array | jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """Returns the shape of a block. A piece consists of one block of each part, at the same offset in every part."""
    assert x.sharding is not None
    part = x.sharding.shard_shape(x.shape)
    num_left = max(1, MAX_PIECE_BYTES // x.dtype.itemsize * prod(part) // x.size)
    block = []
    for dim, size in enumerate(part):
        block.append(min(size, max(1, num_left // prod(part[dim + 1 :]))))
        num_left //= block[-1]
    return tuple(block)


def _interleaved(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    return list(chain.from_iterable(zip(first, second, strict=True)))


def broadcast_in_pieces(whole: np.ndarray) -> None:
    """Copies the array of process 0 into `whole` on the other hosts. All hosts must call it together."""
    # As integers: adding the zeros of the other hosts would lose the sign of a zero.
    words = whole.reshape(-1).view(f"uint{8 * whole.dtype.itemsize}")
    size = min(words.size, MAX_PIECE_BYTES // words.itemsize)
    for start in range(0, words.size, size):
        # The last piece overlaps the one before it, so that all pieces have the same shape.
        place = slice(start := min(start, words.size - size), start + size)
        received = multihost_utils.broadcast_one_to_all(words[place])
        if jax.process_index() > 0:
            words[place] = received
