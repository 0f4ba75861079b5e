"""Islands: meshes of this host's devices alone. Programs on them wait for no other host.

All devices of a host are one island, which takes weights over from the mesh of all hosts; disjoint parts of them are
islands of the workers of a rollout.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from app.mesh.axis_rules import AXES
from app.mesh.topology import host_index, local_devices, num_hosts
from settings.errors import InputError
from settings.schema.rollout import WorkerPoolSettings


def assign_worker_devices(pools: dict[str, WorkerPoolSettings], *, num_devices: int) -> list[tuple[int, ...]]:
    """The devices of each worker, by their numbers on this host, pool after pool.

    Named devices are shared out evenly among the workers of their pool, all others among those of pools that name none.
    On a single device all workers take turns.

    Args:
        pools: dotted setting -> workers; no device is named twice.

    Raises:
        InputError: devices that do not exist, or fewer of them than workers.
    """
    named = [device for pool in pools.values() for device in pool.devices or ()]
    for name, pool in pools.items():
        if beyond := [device for device in pool.devices or () if device >= num_devices]:
            raise InputError(
                f"{name}.devices: got {beyond[0]}, and this host has {num_devices} devices, 0 to {num_devices - 1}; "
                "leave it null to share them out evenly"
            )
    if num_devices == 1:
        return [(0,)] * sum(pool.count for pool in pools.values())
    free = [device for device in range(num_devices) if device not in named]
    num_dealt = sum(pool.count for pool in pools.values() if pool.devices is None)
    dealt = iter(_split_evenly(free, num_dealt))
    islands: list[tuple[int, ...]] = []
    for name, pool in pools.items():
        own, num_workers = (free, num_dealt) if pool.devices is None else (pool.devices, pool.count)
        if pool.count and num_workers > len(own):
            raise InputError(
                f"{name}.count: {len(own)} devices are there for {num_workers} workers, and each needs one of its own; "
                "lower it"
            )
        shares = dealt if pool.devices is None else iter(_split_evenly(own, num_workers))
        islands += itertools.islice(shares, pool.count)
    return islands


def _split_evenly(devices: Sequence[int], num_workers: int) -> list[tuple[int, ...]]:
    """As many for each worker; what is left over stays idle."""
    each = len(devices) // max(num_workers, 1)
    return [tuple(devices[i * each : (i + 1) * each]) for i in range(num_workers)]


def make_submesh(device_indices: Sequence[int], *, template: Mesh) -> Mesh:
    """A mesh of some of this host's devices, weights split along tp as on another mesh.

    Raises:
        InputError: too few devices for that.
    """
    tp = template.shape["tp"]
    if len(device_indices) % tp:
        raise InputError(
            f"rollout.workers: a worker has {len(device_indices)} devices, and mesh.shape splits weights over {tp}; "
            f"give each "
            f"worker a multiple of {tp}"
        )
    own = local_devices()
    shape = (1, len(device_indices) // tp, tp)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3, devices=[own[i] for i in device_indices])


def host_submesh(mesh: Mesh) -> Mesh:
    """This host's devices on a mesh: tp as there, rows split over all others. Of one host, the mesh itself."""
    if num_hosts(mesh) == 1:
        return mesh
    groups = mesh.devices.reshape(-1, mesh.shape["tp"])
    assert all(len(set(map(host_index, group))) == 1 for group in groups), "`check_rows_per_host` keeps tp inside hosts"
    own = np.stack([group for group in groups if host_index(group[0]) == jax.process_index()])
    return Mesh(own[None], AXES, axis_types=(AxisType.Auto,) * 3)


def to_host_submesh(arrays: Any, mesh: Mesh) -> Any:
    """Arrays that every host has whole, as arrays of this host's island: the same buffers, and no copy of any.

    Args:
        arrays: a tree of arrays on a mesh of which `mesh` is `host_island`, split along tp at most.
    """

    def take(array: jax.Array) -> jax.Array:
        assert isinstance(array.sharding, NamedSharding)
        shards = [shard.data for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, NamedSharding(mesh, array.sharding.spec), shards)

    return jax.tree.map(take, arrays)
