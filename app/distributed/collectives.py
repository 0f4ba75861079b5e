"""Collectives over hosts for small values: numbers and byte strings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from app.records.moments import Moments, merge_moments

_mesh: Mesh | None = None
"""One device of each host, over which values are exchanged; None = all devices."""


def exchange_over(devices: Sequence[Any] | None) -> None:
    """Sets the devices that exchange values: one of each host, in their order; None = all devices.

    Two threads must not start programs of several devices on the same devices, since each might wait for the other.
    """
    global _mesh
    _mesh = None if devices is None else Mesh(np.asarray(devices), ("hosts",))


def gather_over_hosts(values: np.ndarray) -> np.ndarray:
    """Returns the stacked arrays of all hosts, [hosts, ...], of equal shapes. 64-bit types keep their precision."""
    values = np.asarray(values)
    if jax.process_count() == 1:
        return values[None]
    # JAX would narrow 64-bit numbers, but not bytes.
    raw = np.frombuffer(values.tobytes(), np.uint8)
    gathered = multihost_utils.process_allgather(raw) if _mesh is None else _gather_over(_mesh, raw)
    return np.frombuffer(np.asarray(gathered).tobytes(), values.dtype).reshape(jax.process_count(), *values.shape)


def _gather_over(mesh: Mesh, raw: np.ndarray) -> jax.Array:
    """Returns the bytes of all hosts on this host's device of a mesh."""
    local = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("hosts")), raw[None])
    return _replicate(mesh)(local).addressable_data(0)


@functools.cache
def _replicate(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, PartitionSpec()))


def sum_over_hosts(values: np.ndarray) -> np.ndarray:
    return gather_over_hosts(values).sum(axis=0)


def max_over_hosts(values: np.ndarray) -> np.ndarray:
    return gather_over_hosts(values).max(axis=0)


def moments_over_hosts(parts: Sequence[Moments]) -> list[Moments]:
    """Returns the moments of each quantity over all hosts. All hosts must pass the same quantities."""
    hosts = gather_over_hosts(np.asarray(parts, np.float64))
    return [merge_moments(Moments(*host) for host in quantity.tolist()) for quantity in hosts.swapaxes(0, 1)]


MIN_MESSAGE_BYTES = 1 << 12
MAX_MESSAGE_BYTES = 1 << 20
"""Maximum size of a host's message; each device of every host holds the messages of all hosts."""


def gather_bytes_over_hosts(local_bytes: bytes) -> list[bytes]:
    """Returns the bytes of every host, in process order; lengths may differ."""
    sizes = gather_over_hosts(np.asarray(len(local_bytes)))
    # Padded to powers of two, because JAX compiles a program for each new size.
    padded = np.zeros(max(MIN_MESSAGE_BYTES, 1 << (int(sizes.max()) - 1).bit_length()), np.uint8)
    padded[: len(local_bytes)] = np.frombuffer(local_bytes, np.uint8)
    return [raw[:size].tobytes() for raw, size in zip(gather_over_hosts(padded), sizes, strict=True)]


def gather_bytes_to_first_host(local_bytes: bytes) -> list[bytes]:
    """Returns the bytes of every host on the first host, in process order; an empty list on the others.

    Longer byte strings are sent in messages of at most `MAX_MESSAGE_BYTES`.
    """
    if jax.process_count() == 1:
        return [local_bytes]
    longest = int(max_over_hosts(np.asarray(len(local_bytes))))
    received: list[bytearray] = [bytearray() for _ in range(jax.process_count())]
    for start in range(0, longest, MAX_MESSAGE_BYTES):
        pieces = gather_bytes_over_hosts(local_bytes[start : start + MAX_MESSAGE_BYTES])
        if jax.process_index() == 0:
            for whole, piece in zip(received, pieces, strict=True):
                whole += piece
    return list(map(bytes, received)) if jax.process_index() == 0 else []
