"""Submeshes of this host's devices, whose programs do not wait for other hosts.

The host submesh has all devices of a host, and receives weights from the mesh of all hosts. Rollout workers have
submeshes of disjoint parts of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from app.mesh.axis_rules import AXES
from app.mesh.device_mesh import num_hosts
from app.mesh.devices import devices_of_submesh, host_index, local_devices
from app.records.text_format import format_count, format_ranges
from settings.errors import InputError
from settings.schema.rollout import WorkerPoolSettings


def assign_worker_devices(pools: dict[str, WorkerPoolSettings], devices: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the devices of each worker by their number on this host, pool after pool.

    The devices that a pool names are split evenly among its workers, and all other devices among the workers of pools
    that name none. On a single device, all workers take turns.

    Args:
        pools: worker pools by dotted setting; no device may be named twice.
        devices: numbers of this host's devices that generate.

    Raises:
        InputError: a named device is not one of these, or there are fewer devices than workers.
    """
    named = [device for pool in pools.values() for device in pool.devices or ()]
    for name, pool in pools.items():
        if beyond := [device for device in pool.devices or () if device not in devices]:
            raise InputError(
                f"{name}.devices: got {beyond[0]}, but the devices of this host that generate are "
                f"{format_ranges(devices)}; set it to null to split them evenly"
            )
    if len(devices) == 1:
        return [tuple(devices)] * sum(pool.count for pool in pools.values())
    free = [device for device in devices if device not in named]
    num_unassigned = sum(pool.count for pool in pools.values() if pool.devices is None)
    shared = iter(_split_evenly(free, num_unassigned))
    islands: list[tuple[int, ...]] = []
    for name, pool in pools.items():
        own, num_workers = (free, num_unassigned) if pool.devices is None else (pool.devices, pool.count)
        if pool.count and num_workers > len(own):
            raise InputError(
                f"{name}.count: {num_workers} workers need a device each, but there are only {len(own)}; lower it"
            )
        shares = shared if pool.devices is None else iter(_split_evenly(own, num_workers))
        islands += itertools.islice(shares, pool.count)
    return islands


def _split_evenly(devices: Sequence[int], num_workers: int) -> list[tuple[int, ...]]:
    """Returns the same number of devices for each worker; the remaining devices stay idle."""
    each = len(devices) // max(num_workers, 1)
    return [tuple(devices[i * each : (i + 1) * each]) for i in range(num_workers)]


def make_submesh(device_indices: Sequence[int], *, template: Mesh) -> Mesh:
    """Returns a mesh of some of this host's devices, with the tp of another mesh.

    Raises:
        InputError: the number of devices is not a multiple of tp.
    """
    tp = template.shape["tp"]
    if len(device_indices) % tp:
        raise InputError(
            f"rollout.workers: a worker has {format_count(len(device_indices), 'device')}, but weights are split over "
            f"tp={tp} (mesh.shape, or rollout.mesh if set); give each worker a multiple of {tp}, by fewer workers "
            "(rollout.workers.fast.count, heavy.count) or more devices"
        )
    local = local_devices()
    shape = (1, len(device_indices) // tp, tp)
    devices = devices_of_submesh([local[i] for i in device_indices])
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def host_submesh(mesh: Mesh) -> Mesh:
    """Returns this host's part of a mesh, with the same tp; the mesh itself on one host."""
    if num_hosts(mesh) == 1:
        return mesh
    groups = mesh.devices.reshape(-1, mesh.shape["tp"])
    assert all(len(set(map(host_index, group))) == 1 for group in groups), "`check_rows_per_host` keeps tp inside hosts"
    local = np.stack([group for group in groups if host_index(group[0]) == jax.process_index()])
    devices = np.asarray(devices_of_submesh(list(local.flat))).reshape(local[None].shape)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 3)


def to_host_submesh(arrays: Any, mesh: Mesh) -> Any:
    """Returns arrays that every host holds completely as arrays on this host's submesh, without copying buffers.

    Args:
        arrays: a tree of arrays on a mesh whose `host_submesh` is `mesh`, split over tp at most.
    """

    def take(array: jax.Array) -> jax.Array:
        assert isinstance(array.sharding, NamedSharding)
        shards = [shard.data for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, NamedSharding(mesh, array.sharding.spec), shards)

    return jax.tree.map(take, arrays)
