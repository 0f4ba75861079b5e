"""Layout part of `grpo inspect-mesh`: devices, mesh axes, and the placement of weights and rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from app.mesh.axis_rules import AXES, partition_spec, replicated_dims
from app.mesh.placement import bytes_per_device, num_row_shards
from app.mesh.simulated_slice import TpuChip, find_chip
from app.mesh.topology import device_kind, device_platform, host_index, local_devices, num_hosts, simulated_slice
from app.preflight.tables import format_table

MAX_HOSTS_SHOWN = 4
"""Hosts in the text; of more hosts, it shows the first two and the last."""


@dataclass(frozen=True)
class Topology:
    """The devices, their hosts, and what is known of their kind."""

    platform: str
    device_kind: str
    pretended: str | None
    """Name of the TPU slice that virtual devices stand for; None for real devices."""
    num_devices: int
    num_hosts: int
    this_host: int
    local_devices: tuple[int, ...]
    """Ids of this host's devices."""
    memory_bytes: int | None
    """Memory of each device; None if it is not known."""
    chip: TpuChip | None
    """Links and speeds of the chip; None for a kind that is not in the table of chips."""

    def to_lines(self) -> list[str]:
        """Returns two lines: all devices, and those of this host."""
        memory = "memory not known" if self.memory_bytes is None else f"{self.memory_bytes / 2**30:.1f} GiB each"
        ids = format_id_ranges(self.local_devices)
        kind = f"of {self.pretended} (pretended: none of it is there)" if self.pretended else "here"
        return [
            f"{self.num_devices} x {self.device_kind} ({self.platform}), {memory}, on {self.num_hosts} host(s), "
            "one process each",
            f"host {self.this_host} {kind}: devices {ids}",
        ]


@dataclass(frozen=True)
class DevicePlace:
    """One device and the parts of rows and weights that it holds."""

    id: int
    process: int
    """Index of its host."""
    coordinates: dict[str, int]
    row_shard: int
    """Index of its part of a batch's rows, which are split over dp and fsdp."""
    weight_shard: tuple[int, int]
    """Indices of its part of the weights, which are split over fsdp and tp."""


@dataclass(frozen=True)
class WeightPlacement:
    """One parameter on the mesh."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    axes: tuple[str | None, ...]
    """Mesh axes of each dim, joined by `+`; None for a dim that is whole on every device."""
    bytes_per_device: int
    replicated_dims: tuple[str, ...]
    """Dims that the axis rules would split, but whose size the axis does not divide."""


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
        """Returns the report for JSON."""
        topology = self.topology
        flat = {
            "platform": topology.platform,
            "device_kind": topology.device_kind,
            "num_devices": topology.num_devices,
            "num_processes": topology.num_hosts,
        }
        return {**flat, **asdict(self)}

    def to_text(self) -> str:
        """Returns the report for a person."""
        axes = " x ".join(f"{axis} {size}" for axis, size in self.shape.items())
        weights = [
            (w.name, str(w.shape), ", ".join(axis or "-" for axis in w.axes), f"{w.bytes_per_device / 2**20:.2f}")
            for w in self.weights
        ]
        lines = [*self.topology.to_lines(), "", f"mesh {axes}", *self._host_table(), ""]
        lines += format_table(("weight", "shape", "axes", "MiB a device"), weights, right_from=3)
        lines += [
            "",
            f"{self.num_parameters:,} parameters, {self.weight_bytes_per_device / 2**20:,.1f} MiB of weights a device",
            f"{self.samples_per_step} samples a step, {self.samples_per_device:g} a device",
        ]
        lines += [
            f"note: {w.name}: {', '.join(w.replicated_dims)} of {w.shape} is not divisible by its axis and stays whole"
            for w in self.weights
            if w.replicated_dims
        ]
        return "\n".join(lines)

    def _host_table(self) -> list[str]:
        """Returns a line for each host: its devices, and which parts of rows and weights they hold."""
        num_row_parts = self.shape["dp"] * self.shape["fsdp"]
        head = ("host", "devices", f"parts of rows (of {num_row_parts})")
        head += tuple(f"parts of weights along {axis} (of {self.shape[axis]})" for axis in ("fsdp", "tp"))
        hosts: dict[int, list[DevicePlace]] = {}
        for device in self.devices:
            hosts.setdefault(device.process, []).append(device)
        rows = [
            (
                str(host),
                format_id_ranges(device.id for device in devices),
                format_id_ranges(device.row_shard for device in devices),
                *(format_id_ranges(device.weight_shard[axis] for device in devices) for axis in (0, 1)),
            )
            for host, devices in sorted(hosts.items())
        ]
        if len(rows) > MAX_HOSTS_SHOWN:
            rows = [*rows[:2], ("...",) * len(head), rows[-1]]
        return format_table(head, rows, right_from=len(head))


def device_topology(mesh: Mesh, *, memory_bytes: int | None) -> Topology:
    """Returns the devices of all hosts, as this host sees them."""
    local, pretended = local_devices(), simulated_slice()
    kind = device_kind(mesh.devices.flat[0])
    return Topology(
        platform=device_platform(mesh.devices.flat[0]),
        device_kind=kind,
        pretended=pretended and pretended.name,
        num_devices=mesh.size,
        num_hosts=num_hosts(mesh),
        this_host=host_index(local[0]),
        local_devices=tuple(device.id for device in local),
        memory_bytes=memory_bytes,
        chip=find_chip(kind),
    )


def weight_placement(name: str, weight: jax.ShapeDtypeStruct, dims: Sequence[str], mesh: Mesh) -> WeightPlacement:
    """Returns the mesh axes of a weight's dims and its bytes on each device."""
    shape, spec = weight.shape, partition_spec(dims, weight.shape, mesh)
    axes = tuple("+".join(axis) if isinstance(axis, tuple) else axis for axis in spec)
    size = bytes_per_device(jax.ShapeDtypeStruct(shape, weight.dtype, sharding=NamedSharding(mesh, spec)))
    return WeightPlacement(name, shape, tuple(dims), axes, size, tuple(replicated_dims(dims, shape, mesh)))


def device_places(mesh: Mesh) -> list[DevicePlace]:
    """Returns every device of the mesh, host after host."""
    places = []
    for position, device in np.ndenumerate(mesh.devices):
        dp, fsdp, tp = map(int, position)
        row_shard = dp * mesh.shape["fsdp"] + fsdp
        coordinates: dict[str, int] = dict(zip(AXES, (dp, fsdp, tp), strict=True))
        places.append(DevicePlace(device.id, host_index(device), coordinates, row_shard, (fsdp, tp)))
    return sorted(places, key=lambda place: place.process)


def mesh_report(
    mesh: Mesh,
    weights: dict[str, tuple[jax.ShapeDtypeStruct, tuple[str, ...]]],
    *,
    num_parameters: int,
    samples_per_step: int,
    memory_bytes: int | None,
) -> MeshReport:
    """Returns the report of a mesh and a model's weights: name -> (shape and type, dims)."""
    placements = [weight_placement(name, *weight, mesh) for name, weight in weights.items()]
    return MeshReport(
        topology=device_topology(mesh, memory_bytes=memory_bytes),
        shape=dict(mesh.shape),
        devices=device_places(mesh),
        weights=placements,
        num_parameters=num_parameters,
        weight_bytes_per_device=sum(p.bytes_per_device for p in placements),
        samples_per_step=samples_per_step,
        samples_per_device=samples_per_step / num_row_shards(mesh),
    )


def format_id_ranges(numbers: Iterable[int]) -> str:
    """Returns the numbers as ranges, such as `0-3, 6`."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
