"""Host rows <-> global arrays, and the few numbers that hosts must agree on."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from app.mesh.axis_rules import ROW_AXES, axis_size
from app.mesh.topology import host_index, num_hosts
from settings.errors import InputError


def num_row_shards(mesh: Mesh) -> int:
    """Devices that hold different rows of a batch, over all hosts."""
    return axis_size(mesh, ROW_AXES)


def num_local_row_shards(mesh: Mesh) -> int:
    """Row shards that one host feeds."""
    return num_row_shards(mesh) // num_hosts(mesh)


def check_rows_per_host(mesh: Mesh) -> None:
    """Each host must own whole rows, and as many as every other.

    Raises:
        InputError: tp spans hosts.
    """
    tp, hosts = mesh.shape["tp"], np.vectorize(host_index)(mesh.devices).reshape(-1, mesh.shape["tp"])
    for group in hosts:
        if len(set(group.tolist())) > 1:
            per_host = mesh.size // num_hosts(mesh)
            fitting = [n for n in range(1, per_host + 1) if per_host % n == 0]
            raise InputError(
                f"mesh.shape: tp = {tp} spans hosts {', '.join(map(str, sorted(set(group.tolist()))))}, of {per_host} "
                "devices each, and every host must own whole rows; keep tp inside a host: "
                f"{' or '.join(map(str, fitting))}"
            )
    assert len(set(np.bincount(hosts[:, 0])[np.unique(hosts)])) == 1, "hosts have as many devices each"


def row_sharding(mesh: Mesh, *, row_dim: int = 0) -> NamedSharding:
    """Rows split over the row axes, everything else whole. What `to_local` reads must be laid out like this."""
    return NamedSharding(mesh, PartitionSpec(*[None] * row_dim, ROW_AXES))


def to_global(mesh: Mesh, rows: Any, *, row_dim: int = 0) -> Any:
    """A tree of this host's rows -> the global arrays of all hosts' rows, split over the row axes."""
    sharding = row_sharding(mesh, row_dim=row_dim)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)), rows)


def local_row_indices(mesh: Mesh, num_rows: int) -> np.ndarray:
    """Which rows of a global array of `num_rows` rows this host holds, in the order of `to_local`."""
    indices = row_sharding(mesh).addressable_devices_indices_map((num_rows,)).values()
    spans = {index[0].indices(num_rows)[:2] for index in indices if index is not None}
    return np.concatenate([np.arange(start, stop) for start, stop in sorted(spans)])


def to_local(array: Array, *, row_dim: int = 0) -> np.ndarray:
    """This host's rows of a global array, as numpy, in order."""
    if array.is_fully_addressable:
        return np.asarray(array)
    # Shards that only differ in tp hold the same rows: keep one of each.
    by_start = {shard.index[row_dim].start or 0: shard for shard in array.addressable_shards}
    return np.concatenate([np.asarray(by_start[start].data) for start in sorted(by_start)], axis=row_dim)


def tree_shardings(arrays: Any) -> Any:
    """Where the arrays of a tree lie, or those that it is the shapes of."""
    return jax.tree.map(lambda x: x.sharding, arrays)


def abstract_arrays(shapes: Any, shardings: Any) -> Any:
    """A tree of shaped leaves and the equally built tree of their shardings, as one tree of `jax.ShapeDtypeStruct`."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def bytes_per_device(tree: Any) -> int:
    """What each device holds of a tree of arrays, or of shapes with shardings; the rule table only splits evenly."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


HOST_MEMORY = "pinned_host"
"""Memory of the host that devices read from directly."""


def supports_host_memory(mesh: Mesh) -> bool:
    """Whether arrays can wait in the host's memory on this backend."""
    return all(
        HOST_MEMORY in {memory.kind for memory in device.addressable_memories()} for device in mesh.local_devices
    )


def to_host_memory(tree: Any) -> Any:
    """The arrays laid out as they are, but in the memory of their devices' hosts."""
    return jax.device_put(tree, jax.tree.map(lambda x: x.sharding.with_memory_kind(HOST_MEMORY), tree))


def to_device_memory(tree: Any) -> Any:
    """The inverse of `to_host_memory`; arrays that are on their devices are not copied."""
    return jax.device_put(tree, jax.tree.map(lambda x: x.sharding.with_memory_kind("device"), tree))
