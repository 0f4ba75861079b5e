"""Collectives over hosts for values in host memory: arrays, byte strings, JSON values and errors."""

from __future__ import annotations

import functools
import json
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int32, Int64
from numpy.typing import ArrayLike

from settings.errors import InputError

Item = TypeVar("Item")

_uses_first_devices = False
"""Whether values are exchanged only over the first device of each host."""


def use_first_devices(only: bool) -> None:
    """Sets whether values are exchanged only over the first device of each host, or over all devices.

    Two threads must not run multi-device programs on the same devices, since each might wait for the other.
    """
    global _uses_first_devices
    _uses_first_devices = only


def is_alone() -> bool:
    """Returns whether there is no other process; unlike `jax.process_count`, does not initialize JAX if it is alone."""
    return not jax.distributed.is_initialized() or jax.process_count() == 1


def gather_over_hosts(values: ArrayLike) -> np.ndarray:
    """Returns the arrays of all hosts, stacked to [hosts, ...]; their shapes must be equal. Keeps 64-bit dtypes."""
    values = np.asarray(values)
    if is_alone():
        return values[None]
    # Sent as bytes, because JAX would narrow 64-bit numbers.
    raw = np.frombuffer(values.tobytes(), np.uint8)
    gathered = _exchange_rows(raw, PartitionSpec()) if _uses_first_devices else multihost_utils.process_allgather(raw)
    return np.frombuffer(np.asarray(gathered).tobytes(), values.dtype).reshape(jax.process_count(), *values.shape)


def _exchange_rows(row: np.ndarray, spec: PartitionSpec) -> np.ndarray:
    """Stacks one row per host on their first devices, and returns this host's part of the stack under `spec`."""
    rows = jax.make_array_from_process_local_data(NamedSharding(_first_devices(), PartitionSpec("hosts")), row[None])
    return np.asarray(_relayout(spec)(rows).addressable_data(0))


@functools.cache
def _relayout(spec: PartitionSpec) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda rows: rows, out_shardings=NamedSharding(_first_devices(), spec))


@functools.cache
def _first_devices() -> Mesh:
    first = {device.process_index: device for device in reversed(jax.devices())}
    return Mesh(np.asarray([first[host] for host in range(jax.process_count())]), ("hosts",))


MAX_EXCHANGE_BYTES = 1 << 26
"""Maximum bytes that a host sends or receives in one step of `exchange_over_hosts`; one device holds both."""


def exchange_over_hosts(
    parts: Sequence[Int32[np.ndarray, "n"]], sizes: Int64[np.ndarray, "hosts hosts"]
) -> list[Int32[np.ndarray, "n"]]:
    """Sends every host its part, and returns what each host has sent to this one. All hosts must call it together.

    Args:
        sizes: number of elements from each host (first index) to each (second), equal on all hosts.
    """
    here, num_hosts, longest = jax.process_index(), jax.process_count(), int(sizes.max(initial=0))
    # Padded to powers of two, because JAX compiles a program for each new size.
    count = min(1 << max(longest - 1, 0).bit_length(), max(1, MAX_EXCHANGE_BYTES // 4 // num_hosts))
    received: list[list[np.ndarray]] = [[np.zeros(0, np.int32)] for _ in parts]
    for start in range(0, longest, count):
        padded = np.zeros((num_hosts, count), np.int32)
        for row, part in zip(padded, parts, strict=True):
            piece = part[start : start + count]
            row[: len(piece)] = piece
        for pieces, row in zip(received, _exchange_rows(padded, PartitionSpec(None, "hosts"))[:, 0], strict=True):
            pieces.append(row)
    return [np.concatenate(pieces)[:size] for pieces, size in zip(received, sizes[:, here], strict=True)]


def sum_over_hosts(values: ArrayLike) -> np.ndarray:
    return gather_over_hosts(values).sum(axis=0)


def max_over_hosts(values: ArrayLike) -> np.ndarray:
    return gather_over_hosts(values).max(axis=0)


def any_host(flag: bool) -> bool:
    """Returns whether the flag is True on any host."""
    return bool(max_over_hosts(flag))


def gather_table(columns: Mapping[str, Sequence[float]]) -> dict[str, np.ndarray]:
    """Returns the columns with the rows of all hosts, in host order. All hosts must have the same columns."""
    rows = np.concatenate(gather_rows(np.asarray(list(columns.values()), np.float64).T))
    return dict(zip(columns, rows.T, strict=True))


MIN_MESSAGE_BYTES = 1 << 12
MAX_MESSAGE_BYTES = 1 << 20
"""Maximum size of a host's message; each device of every host holds the messages of all hosts."""


def gather_bytes_over_hosts(local_bytes: bytes) -> list[bytes]:
    """Returns the bytes of every host, in process order; lengths may differ."""
    sizes = gather_over_hosts(len(local_bytes))
    # Padded to powers of two, because JAX compiles a program for each new size.
    padded = np.zeros(max(MIN_MESSAGE_BYTES, 1 << (int(sizes.max()) - 1).bit_length()), np.uint8)
    padded[: len(local_bytes)] = np.frombuffer(local_bytes, np.uint8)
    return [raw[:size].tobytes() for raw, size in zip(gather_over_hosts(padded), sizes, strict=True)]


def gather_rows(values: np.ndarray) -> list[np.ndarray]:
    """Returns the array of every host, in process order; only their numbers of rows (the first dim) may differ."""
    shape = -1, *values.shape[1:]
    return [np.frombuffer(raw, values.dtype).reshape(shape) for raw in gather_bytes_over_hosts(values.tobytes())]


def gather_json_over_hosts(local_value: Any) -> list[Any]:
    """Returns every host's value, sent as JSON, in process order."""
    return [json.loads(one) for one in gather_bytes_over_hosts(json.dumps(local_value).encode())]


def gather_bytes_to_process_0(local_bytes: bytes) -> list[bytes]:
    """Returns the bytes of every host on process 0, in process order; an empty list on the others.

    Longer byte strings are sent in messages of at most `MAX_MESSAGE_BYTES`.
    """
    if is_alone():
        return [local_bytes]
    longest = int(max_over_hosts(len(local_bytes)))
    received: list[bytearray] = [bytearray() for _ in range(jax.process_count())]
    for start in range(0, longest, MAX_MESSAGE_BYTES):
        pieces = gather_bytes_over_hosts(local_bytes[start : start + MAX_MESSAGE_BYTES])
        if jax.process_index() == 0:
            for whole, piece in zip(received, pieces, strict=True):
                whole += piece
    return list(map(bytes, received)) if jax.process_index() == 0 else []


def broadcast_bytes(local_bytes: bytes) -> bytes:
    """Returns the bytes of process 0 on every host; they are sent in messages of at most `MAX_MESSAGE_BYTES`."""
    size = int(gather_over_hosts(len(local_bytes))[0])
    sent = local_bytes if jax.process_index() == 0 else b""
    starts = range(0, size, MAX_MESSAGE_BYTES)
    return b"".join(gather_bytes_over_hosts(sent[start : start + MAX_MESSAGE_BYTES])[0] for start in starts)


def broadcast_json(local_value: Any) -> Any:
    """Returns the value of process 0 on every host, sent as JSON."""
    return json.loads(broadcast_bytes(json.dumps(local_value).encode()))


def is_process_0() -> bool:
    """Returns whether this is process 0 or a single process; unlike `jax.process_index`, does not initialize JAX."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


@contextmanager
def error_barrier() -> Iterator[None]:
    """Returns a context manager: if the block raises on any process, it raises on every process.

    Every host must enter the block, and the block must not contain a collective. A single process does not initialize
    JAX. An error of the JAX runtime is raised at once, and only on its own process.

    Raises:
        InputError: the block raised an InputError on another host.
        RuntimeError: the block raised any other exception on another host.
    """
    if not jax.distributed.is_initialized():
        yield
        return
    problem: Exception | None = None
    try:
        yield
    except jax.errors.JaxRuntimeError:
        # Raised at once: another host may have died, and a collective would wait for it.
        raise
    # Catches every exception, because the other hosts wait for this one; it is raised again below.
    except Exception as error:
        problem = error
    kind = 0 if problem is None else 2 if isinstance(problem, InputError) else 1
    worst = int(max_over_hosts(kind))
    if not worst:
        return
    message = str(problem) if kind == 2 or isinstance(problem, RuntimeError) else f"{type(problem).__name__}: {problem}"
    gathered = gather_json_over_hosts([kind, socket.gethostname(), message])
    if problem is not None:
        raise problem
    host, name, reason = next((i, *rest) for i, (code, *rest) in enumerate(gathered) if code == worst)
    raise (InputError if worst == 2 else RuntimeError)(f"on host {host} ({name}): {reason}")


def iterate_in_lockstep(items: Iterable[Item]) -> Iterator[Item]:
    """Yields the items, each produced inside an error barrier. All hosts must have the same number of items."""
    iterator = iter(items)
    while True:
        with error_barrier():
            part = list(islice(iterator, 1))
        if not part:
            return
        yield part[0]
