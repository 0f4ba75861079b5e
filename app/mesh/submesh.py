"""Submeshes of this host's devices, whose programs do not wait for other hosts.

The host submesh has all devices of a host, and receives weights from the mesh of all hosts. Rollout workers have
submeshes of disjoint parts of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from app.mesh.axis_rules import AXES
from app.mesh.device_mesh import num_hosts
from app.mesh.devices import devices_of_submesh, host_index, local_devices
from app.records.text_format import format_count
from settings.errors import InputError


def assign_worker_devices(num_workers: int, devices: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the devices of each worker: the same number for each, of which the remaining devices stay idle.

    On a single device, all workers take turns.

    Args:
        devices: numbers of this host's devices that generate.

    Raises:
        InputError: there are fewer devices than workers.
    """
    if len(devices) == 1:
        return [tuple(devices)] * num_workers
    if num_workers > len(devices):
        raise InputError(
            f"rollout.workers.fast.count, rollout.workers.heavy.count: {num_workers} workers need a device each, but "
            f"there are only {len(devices)} that generate on this host; lower them"
        )
    each = len(devices) // num_workers
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
