"""The few numbers that hosts must agree on, gathered over all of them."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from app.records.moments import Moments, merge_moments


def gather_over_hosts(values: np.ndarray) -> np.ndarray:
    """[hosts, ...]: every host's array of the same shape. Float64 and int64 pass unrounded."""
    values = np.asarray(values)
    if jax.process_count() == 1:
        return values[None]
    # JAX would narrow 64-bit numbers; bytes it leaves alone.
    raw = np.frombuffer(values.tobytes(), np.uint8)
    gathered = np.asarray(multihost_utils.process_allgather(raw))
    return np.frombuffer(gathered.tobytes(), values.dtype).reshape(jax.process_count(), *values.shape)


def sum_over_hosts(values: np.ndarray) -> np.ndarray:
    return gather_over_hosts(values).sum(axis=0)


def max_over_hosts(values: np.ndarray) -> np.ndarray:
    return gather_over_hosts(values).max(axis=0)


def moments_over_hosts(parts: Sequence[Moments]) -> list[Moments]:
    """Of several quantities, those of all hosts' numbers. Hosts have the same quantities, and any numbers of each."""
    hosts = gather_over_hosts(np.asarray(parts, np.float64))
    return [merge_moments(Moments(*host) for host in quantity.tolist()) for quantity in hosts.swapaxes(0, 1)]


MIN_MESSAGE_BYTES = 1 << 12


MAX_MESSAGE_BYTES = 1 << 20
"""Bytes that a host sends at once: all devices of all hosts hold those of all."""


def gather_bytes_over_hosts(local_bytes: bytes) -> list[bytes]:
    """Every host's, in the order of processes; they may differ in length."""
    sizes = gather_over_hosts(np.asarray(len(local_bytes)))
    # Of few sizes, since each is a program to compile.
    padded = np.zeros(max(MIN_MESSAGE_BYTES, 1 << (int(sizes.max()) - 1).bit_length()), np.uint8)
    padded[: len(local_bytes)] = np.frombuffer(local_bytes, np.uint8)
    return [raw[:size].tobytes() for raw, size in zip(gather_over_hosts(padded), sizes, strict=True)]


def gather_bytes_to_first_host(local_bytes: bytes) -> list[bytes]:
    """On the first host every host's, in the order of processes; nothing on the others.

    Of any length: they go in messages of a bounded size, one after another.
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
