"""The mesh of all hosts' training devices, with the axes dp, fsdp and tp; and submeshes.

A submesh has devices of this host; its programs do not wait for other hosts. The host submesh has all devices of a
host, and receives weights from the mesh of all hosts; rollout workers have submeshes of disjoint parts of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from app.mesh.axis_rules import AXES
from app.mesh.devices import (
    check_equal_device_counts,
    compile_only_devices,
    devices_of_submesh,
    global_devices,
    host_index,
    is_compile_only,
    local_devices,
    simulated_slice,
)
from app.records.text_format import format_count
from settings.errors import InputError, join_words
from settings.schema.mesh import MeshSettings

MAX_ROUNDING = 0.05
"""Maximum difference, in devices, between a fraction of the devices and a whole number: 0.33 of 3 devices is 1."""


def num_hosts(mesh: Mesh) -> int:
    """Returns the number of hosts whose devices are in a mesh: 1 for a submesh."""
    return len(set(map(host_index, mesh.devices.flat)))


def parse_mesh_shape(text: str, *, num_devices: int, num_processes: int, others: str = "") -> tuple[int, int, int]:
    """Returns (dp, fsdp, tp), whose product is `num_devices`.

    `auto` splits dp across hosts and fsdp inside a host, so that weights are gathered over fast links.

    Args:
        text: the value of `mesh.shape`.
        others: clause of the error message about devices that are not part of the mesh.

    Raises:
        InputError: the product is not the number of devices.
    """
    if text == "auto":
        assert num_devices % num_processes == 0, "hosts have equally many devices"
        return num_processes, num_devices // num_processes, 1
    sizes = tuple(map(int, text.split(",")))
    known = math.prod(size for size in sizes if size != -1)
    if num_devices % known != 0 or (-1 not in sizes and known != num_devices):
        raise InputError(
            f"mesh.shape: {text!r} needs {'a multiple of ' if -1 in sizes else ''}{known} devices, but there "
            f"are {num_devices}{others}; set sizes whose product is {num_devices}; one of them may be -1"
        )
    dp, fsdp, tp = (num_devices // known if size == -1 else size for size in sizes)
    return dp, fsdp, tp


def make_mesh(settings: MeshSettings, *, set_aside: Collection[int] = ()) -> Mesh:
    """Returns the mesh over the devices of all hosts. Axes are Auto: XLA places arrays that have no constraint.

    Devices are in the best order for their links if this keeps each host's devices contiguous; otherwise they are
    ordered host by host.

    Args:
        set_aside: indices, on each host, of devices that are not part of the mesh.

    Raises:
        InputError: `mesh.shape` does not fit the devices.
    """
    devices = global_devices(settings)
    check_equal_device_counts(devices)
    devices = without_generation_devices(devices, set_aside)
    others = " besides those of rollout.devices" if set_aside else ""
    num_processes = len(set(map(host_index, devices)))
    shape = parse_mesh_shape(settings.shape, num_devices=len(devices), num_processes=num_processes, others=others)
    axis_types = (AxisType.Auto,) * len(AXES)
    try:
        mesh = jax.make_mesh(shape, AXES, axis_types=axis_types, devices=devices)
    except (AssertionError, NotImplementedError):
        # JAX knows the best order of chips only if they form a cuboid, which the rest of a slice may not.
        if not set_aside:
            raise
        mesh = None
    if mesh is not None and is_grouped_by_host(mesh):
        return mesh
    in_order = sorted(devices, key=lambda device: (host_index(device), device.id))
    return Mesh(np.asarray(in_order).reshape(shape), AXES, axis_types=axis_types)


def with_tp(mesh: Mesh, tp: int) -> Mesh:
    """Returns a mesh of the same devices, in the same order, with fsdp = 1 and this tp."""
    return Mesh(mesh.devices.reshape(-1, 1, tp), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def is_grouped_by_host(mesh: Mesh) -> bool:
    """Returns whether the devices of each host are contiguous, in the order of the hosts."""
    hosts = [host_index(device) for device in mesh.devices.flat]
    return hosts == sorted(hosts)


def generation_devices(wanted: float | tuple[int, ...], *, num_devices: int) -> tuple[int, ...]:
    """Returns the indices of a host's devices that only generate; for a fraction, the last ones.

    Args:
        wanted: the value of `rollout.devices`.
        num_devices: devices of a host.

    Raises:
        InputError: no device would be left to train, an index is too large, or a fraction gives no whole number.
    """
    if num_devices == 1:
        got = list(wanted) if isinstance(wanted, tuple) else f"{wanted:g}"
        raise InputError(
            f"rollout.devices: got {got}, but each host has a single device, which must both train and "
            "generate; set it to null"
        )
    if isinstance(wanted, tuple):
        if wanted[-1] >= num_devices:
            raise InputError(
                f"rollout.devices: got {wanted[-1]}, but each host has devices 0 to {num_devices - 1}; give indices "
                f"below {num_devices}, or a fraction such as 0.5"
            )
        return wanted
    num_generating = round(wanted * num_devices)
    if abs(num_generating - wanted * num_devices) > MAX_ROUNDING or not 0 < num_generating < num_devices:
        possible = join_words(f"{k / num_devices:g}" for k in range(1, num_devices))
        raise InputError(
            f"rollout.devices: {wanted:g} of the {num_devices} devices of a host is not a whole number of devices; "
            f"set it to {possible}"
        )
    return tuple(range(num_devices - num_generating, num_devices))


def without_generation_devices(devices: Sequence[Any], set_aside: Collection[int]) -> Sequence[Any]:
    """Returns the devices of all hosts, except the devices whose index on their host is in `set_aside`.

    Raises:
        InputError: programs cannot be compiled for the remaining part of a slice.
    """
    if not set_aside:
        return devices
    of_hosts: dict[int, list[Any]] = {}
    for device in devices:
        of_hosts.setdefault(host_index(device), []).append(device)
    kept = [one for local in of_hosts.values() for number, one in enumerate(local) if number not in set_aside]
    if not is_compile_only():
        return kept
    # A compiler knows only whole slices.
    whole, per_host = simulated_slice(), len(kept) // len(of_hosts)
    assert whole is not None
    if per_host.bit_count() != 1:
        raise InputError(
            f"rollout.devices: {per_host} devices of each host would train, but programs can be compiled in advance "
            "only for 1, 2, 4 or 8 of them; set it so that one of these numbers trains, or omit --compile"
        )
    return compile_only_devices(replace(whole, num_chips=len(kept), chips_per_host=per_host))


def assign_worker_devices(num_workers: int, devices: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the devices of each worker, the same number for each; leftover devices stay idle.

    On a single device, all workers take turns.

    Args:
        devices: indices of this host's devices that generate.

    Raises:
        InputError: there are fewer devices than workers.
    """
    if len(devices) == 1:
        return [tuple(devices)] * num_workers
    if num_workers > len(devices):
        raise InputError(
            f"rollout.workers.fast.count, rollout.workers.heavy.count: {num_workers} workers need a device each, "
            f"but only {len(devices)} devices of this host generate; lower these counts"
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
            f"tp={tp} (mesh.shape, or rollout.mesh if set); give each worker a multiple of {tp}: use fewer workers "
            "(rollout.workers.fast.count, rollout.workers.heavy.count) or more devices"
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
    assert all(len(set(map(host_index, group))) == 1 for group in groups), "checked by `check_tp_within_hosts`"
    local = np.stack([group for group in groups if host_index(group[0]) == jax.process_index()])
    devices = np.asarray(devices_of_submesh(list(local.flat))).reshape(local[None].shape)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 3)


def to_host_submesh(arrays: Any, mesh: Mesh) -> Any:
    """Returns arrays of which every host has a full copy as arrays on this host's submesh, without copying buffers.

    Args:
        arrays: a tree of arrays on a mesh whose `host_submesh` is `mesh`, split over tp at most.
    """

    def take(array: jax.Array) -> jax.Array:
        assert isinstance(array.sharding, NamedSharding)
        shards = [shard.data for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, NamedSharding(mesh, array.sharding.spec), shards)

    return jax.tree.map(take, arrays)
