"""Layout in the report of `grpo inspect-mesh`: devices, mesh axes, and the placement of weights and rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from app.mesh.axis_rules import AXES, partition_spec, replicated_dims
from app.mesh.chips import TpuChip, find_chip
from app.mesh.device_mesh import num_hosts
from app.mesh.devices import device_kind, device_platform, host_index, local_devices, simulated_slice
from app.mesh.placement import bytes_per_device, num_row_shards
from app.records.text_format import format_bytes, format_ranges, format_table

MAX_HOSTS_SHOWN = 4
"""Maximum number of hosts in the text; if there are more, it shows only the first two and the last."""


@dataclass(frozen=True)
class Topology:
    """The devices, their hosts, and the known properties of their kind."""

    platform: str
    device_kind: str
    pretended: str | None
    """Name of the TPU slice, or of the host with GPUs, that virtual devices simulate; None for real devices."""
    num_devices: int
    num_hosts: int
    this_host: int
    local_devices: tuple[int, ...]
    """Ids of this host's devices."""
    memory_bytes: int | None
    chip: TpuChip | None
    """Bandwidths and speed of the chip; None for a device kind that is not in the table of chips."""


@dataclass(frozen=True)
class DevicePlace:
    """One device with its parts of rows and weights."""

    id: int
    process: int
    """Index of the device's host."""
    coordinates: dict[str, int]
    row_shard: int
    """Index of the device's part of a batch's rows, which are split over dp and fsdp."""
    weight_shard: tuple[int, int]
    """Indices of the device's part of the weights, which are split over fsdp and tp."""


@dataclass(frozen=True)
class WeightPlacement:
    """Placement of one parameter on the mesh."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    axes: tuple[str | None, ...]
    """Mesh axes of each dim, joined by `+`; None for a replicated dim."""
    bytes_per_device: int
    replicated_dims: tuple[str, ...]
    """Dims replicated because their size is not divisible by that of the axis over which they would be split."""


@dataclass(frozen=True)
class MeshReport:
    """Layout of a model's weights and of a step's samples on a mesh."""

    topology: Topology
    shape: dict[str, int]
    devices: list[DevicePlace]
    weights: list[WeightPlacement]
    num_parameters: int
    weight_bytes_per_device: int
    samples_per_step: int
    samples_per_device: float

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as values for JSON."""
        of = self.topology
        flat = {"platform": of.platform, "device_kind": of.device_kind, "num_devices": of.num_devices}
        return {**flat, "num_processes": of.num_hosts, **asdict(self)}

    def to_text(self) -> str:
        """Returns the report as readable text."""
        of, axes = self.topology, " x ".join(f"{axis} {size}" for axis, size in self.shape.items())
        memory = "memory unknown" if of.memory_bytes is None else f"{format_bytes(of.memory_bytes)} each"
        kind = "" if of.pretended is None else f" of a simulated {of.pretended}"
        weights = [
            (w.name, str(w.shape), ", ".join(axis or "-" for axis in w.axes), format_bytes(w.bytes_per_device))
            for w in self.weights
        ]
        notes = [
            f"note: {w.name}: {', '.join(w.replicated_dims)} of {w.shape} is replicated: not divisible by its axis"
            for w in self.weights
            if w.replicated_dims
        ]
        return "\n".join(
            [
                f"{of.num_devices} x {of.device_kind} ({of.platform}), {memory}, on {of.num_hosts} host(s)",
                f"host {of.this_host}{kind}: devices {format_ranges(of.local_devices)}",
                f"\nmesh {axes}\n{self._host_table()}\n",
                format_table(weights, header=("weight", "shape", "axes", "on each device"), num_left=3),
                f"\n{self.num_parameters:,} parameters, {format_bytes(self.weight_bytes_per_device)} on each device",
                f"{self.samples_per_step} samples per step, {self.samples_per_device:g} per device",
                *notes,
            ]
        )

    def _host_table(self) -> str:
        """Returns a table with one line per host: its devices, and their parts of rows and weights."""
        header = ["host", "devices", f"parts of rows (of {self.shape['dp'] * self.shape['fsdp']})"]
        header += [f"parts of weights along {axis} (of {self.shape[axis]})" for axis in ("fsdp", "tp")]
        hosts: dict[int, list[DevicePlace]] = {}
        for device in self.devices:
            hosts.setdefault(device.process, []).append(device)
        rows = []
        for host, devices in sorted(hosts.items()):
            numbers = zip(*((device.id, device.row_shard, *device.weight_shard) for device in devices), strict=True)
            rows.append([str(host), *map(format_ranges, numbers)])
        if len(rows) > MAX_HOSTS_SHOWN:
            rows = [*rows[:2], ["..."] * len(header), rows[-1]]
        return format_table(rows, header=header, num_left=len(header))


def weight_placement(name: str, weight: jax.ShapeDtypeStruct, dims: Sequence[str], mesh: Mesh) -> WeightPlacement:
    """Returns the mesh axes of a weight's dims and its bytes on each device."""
    shape, spec = weight.shape, partition_spec(dims, weight.shape, mesh)
    axes = tuple("+".join(axis) if isinstance(axis, tuple) else axis for axis in spec)
    size = bytes_per_device(jax.ShapeDtypeStruct(shape, weight.dtype, sharding=NamedSharding(mesh, spec)))
    return WeightPlacement(name, shape, tuple(dims), axes, size, tuple(replicated_dims(dims, shape, mesh)))


def device_places(mesh: Mesh) -> list[DevicePlace]:
    """Returns every device of the mesh, ordered by host."""
    places = []
    for position, device in np.ndenumerate(mesh.devices):
        dp, fsdp, tp = map(int, position)
        row_shard = dp * mesh.shape["fsdp"] + fsdp
        coordinates: dict[str, int] = dict(zip(AXES, (dp, fsdp, tp), strict=True))
        places.append(DevicePlace(device.id, host_index(device), coordinates, row_shard, (fsdp, tp)))
    return sorted(places, key=lambda place: place.process)


def mesh_report(
    mesh: Mesh,
    weights: Mapping[str, tuple[jax.ShapeDtypeStruct, tuple[str, ...]]],
    *,
    num_parameters: int,
    samples_per_step: int,
    memory_bytes: int | None,
) -> MeshReport:
    """Returns the layout of a model on a mesh; `weights` maps names to (shape and type, dims)."""
    placements = [weight_placement(name, *weight, mesh) for name, weight in weights.items()]
    local, pretended = local_devices(), simulated_slice()
    kind = device_kind(mesh.devices.flat[0])
    return MeshReport(
        topology=Topology(
            platform=device_platform(mesh.devices.flat[0]),
            device_kind=kind,
            pretended=pretended and pretended.name,
            num_devices=mesh.size,
            num_hosts=num_hosts(mesh),
            this_host=host_index(local[0]),
            local_devices=tuple(device.id for device in local),
            memory_bytes=memory_bytes,
            chip=find_chip(kind),
        ),
        shape=dict(mesh.shape),
        devices=device_places(mesh),
        weights=placements,
        num_parameters=num_parameters,
        weight_bytes_per_device=sum(p.bytes_per_device for p in placements),
        samples_per_step=samples_per_step,
        samples_per_device=samples_per_step / num_row_shards(mesh),
    )
