"""Placement of arrays: host rows as global arrays, shardings, and host memory."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from app.mesh.axis_rules import ROW_AXES, axis_size
from app.mesh.device_mesh import num_hosts
from app.mesh.devices import device_platform, host_index
from settings.errors import InputError, join_words


def num_row_shards(mesh: Mesh) -> int:
    """Returns the number of parts into which the mesh splits the rows of a batch, over all hosts."""
    return axis_size(mesh, ROW_AXES)


def num_local_row_shards(mesh: Mesh) -> int:
    """Returns the number of row shards of one host."""
    return num_row_shards(mesh) // num_hosts(mesh)


def check_tp_within_hosts(mesh: Mesh) -> None:
    """Checks that all hosts have whole rows and the same number of rows.

    Raises:
        InputError: tp spans hosts.
    """
    tp, hosts = mesh.shape["tp"], np.vectorize(host_index)(mesh.devices).reshape(-1, mesh.shape["tp"])
    for group in hosts:
        if len(set(group.tolist())) > 1:
            per_host = mesh.size // num_hosts(mesh)
            fitting = [n for n in range(1, per_host + 1) if per_host % n == 0]
            raise InputError(
                f"mesh.shape: tp = {tp} spans hosts {join_words(sorted(set(group.tolist())), last='and')} with "
                f"{per_host} devices each, but devices that share a row must be on one host; set tp to "
                f"{join_words(fitting)}"
            )
    assert len(set(np.bincount(hosts[:, 0])[np.unique(hosts)])) == 1, "hosts have equally many devices"


def row_sharding(mesh: Mesh, *, row_dim: int = 0) -> NamedSharding:
    """Returns the sharding that splits only rows (dim `row_dim`), over the row axes, as `to_local` requires."""
    return NamedSharding(mesh, PartitionSpec(*[None] * row_dim, ROW_AXES))


def to_global(mesh: Mesh, rows: Any, *, row_dim: int = 0) -> Any:
    """Joins this host's rows (dim `row_dim`) with the other hosts' into global arrays, split over the row axes."""
    sharding = row_sharding(mesh, row_dim=row_dim)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)), rows)


def to_local(array: Array, *, row_dim: int = 0) -> np.ndarray:
    """Returns this host's rows (dim `row_dim`) of a global array as numpy, in order."""
    if array.is_fully_addressable:
        return np.asarray(array)
    # Shards that differ only in tp have the same rows: keep one of each.
    by_start = {shard.index[row_dim].start or 0: shard for shard in array.addressable_shards}
    return np.concatenate([np.asarray(by_start[start].data) for start in sorted(by_start)], axis=row_dim)


def tree_shardings(arrays: Any) -> Any:
    """Returns the shardings of a tree of arrays or shapes."""
    return jax.tree.map(lambda x: x.sharding, arrays)


def abstract_arrays(shapes: Any, shardings: Any) -> Any:
    """Returns a tree of `jax.ShapeDtypeStruct` from a tree of arrays or shapes and the tree of their shardings."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


HOST_MEMORY = "pinned_host"
"""The kind of host memory that devices can access directly."""


def bytes_per_device(tree: Any, *, in_host_memory: bool = False) -> int:
    """Returns the bytes that a tree of arrays, or of shapes with shardings, takes on each device.

    Args:
        in_host_memory: whether to count the arrays in host memory instead of those in device memory.
    """
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
        if is_in_host_memory(x.sharding) == in_host_memory
    )


def bytes_received(before: Any, after: Any) -> int:
    """Returns the bytes that the busiest device receives when arrays move to other shardings.

    Parts that a device already has are not counted.

    Args:
        before: a tree of shapes with shardings.
        after: the same shapes with the new shardings.
    """
    received: Counter[Any] = Counter()
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        held = old.sharding.devices_indices_map(old.shape)
        for device, part in new.sharding.devices_indices_map(new.shape).items():
            spans, own = (
                [span.indices(size)[:2] for span, size in zip(spans, new.shape, strict=True)]
                for spans in (part, held.get(device, (slice(0),) * new.ndim))
            )
            kept = math.prod(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in zip(spans, own, strict=True))
            received[device] += (math.prod(stop - start for start, stop in spans) - kept) * new.dtype.itemsize
    return max(received.values(), default=0)


def is_in_host_memory(sharding: Any) -> bool:
    """Returns whether arrays with this sharding are in host memory; False on CPUs, where both memories are the same."""
    return sharding.memory_kind == HOST_MEMORY and device_platform(sharding.mesh.devices.flat[0]) != "cpu"


def supports_host_memory(mesh: Mesh) -> bool:
    """Returns whether this backend supports arrays in host memory."""
    return all(
        HOST_MEMORY in {memory.kind for memory in device.addressable_memories()} for device in mesh.local_devices
    )


def check_host_memory(mesh: Mesh, setting: str) -> None:
    """Raises InputError if the backend does not support arrays in host memory, which a setting needs."""
    if not supports_host_memory(mesh):
        kind = mesh.devices.flat[0].device_kind
        raise InputError(f"{setting}: true needs host memory, which JAX does not support on {kind}; set it to false")


def to_host_memory(tree: Any) -> Any:
    """Returns the arrays in the host memory of their devices, with the same sharding."""
    return jax.device_put(tree, jax.tree.map(lambda x: x.sharding.with_memory_kind(HOST_MEMORY), tree))


def to_device_memory(tree: Any) -> Any:
    """Returns the arrays in device memory; arrays that are already there are not copied."""
    return jax.device_put(tree, jax.tree.map(lambda x: x.sharding.with_memory_kind("device"), tree))
