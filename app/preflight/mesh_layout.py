"""The report behind `grpo inspect-mesh`: devices, axes, and where weights and rows will lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from app.mesh.axis_rules import AXES, partition_spec, replicated_dims
from app.mesh.placement import bytes_per_device, num_row_shards
from app.mesh.simulated_slice import TpuChip, find_chip
from app.mesh.topology import device_kind, device_platform, host_index, local_devices, num_hosts, simulated_slice

DEVICES_PER_LINE = 8
MAX_HOSTS_SHOWN = 4
"""Of more hosts, all but the first two and the last are drawn as one line."""


@dataclass(frozen=True)
class Topology:
    """What devices there are, on which hosts, and what is known of their kind."""

    platform: str
    device_kind: str
    pretended: str | None
    """The slice that virtual devices stand for; None where all this is there."""
    num_devices: int
    num_hosts: int
    this_host: int
    local_devices: tuple[int, ...]
    """Ids of this host's."""
    memory_bytes: int | None
    """Of a device; None where it is not told."""
    chip: TpuChip | None
    """Links and speeds; None of a kind that the table of chips does not have."""

    def to_lines(self) -> list[str]:
        memory = "memory not known" if self.memory_bytes is None else f"{self.memory_bytes / 2**30:.1f} GiB each"
        ids = format_id_ranges(self.local_devices)
        whose = f"of {self.pretended}: none of this is there, and host 0 stands for all" if self.pretended else "here"
        return [
            f"{self.num_devices} x {self.device_kind} ({self.platform}), {memory}, on {self.num_hosts} host(s), "
            "one process each",
            f"host {self.this_host} {whose}: devices {ids}",
        ]


def device_topology(mesh: Mesh, *, memory_bytes: int | None) -> Topology:
    """Of the devices of all hosts, as this host sees them."""
    first, local, whole = mesh.devices.flat[0], local_devices(), simulated_slice()
    kind = device_kind(first)
    return Topology(
        platform=device_platform(first),
        device_kind=kind,
        pretended=whole and whole.name,
        num_devices=mesh.size,
        num_hosts=num_hosts(mesh),
        this_host=host_index(local[0]),
        local_devices=tuple(device.id for device in local),
        memory_bytes=memory_bytes,
        chip=find_chip(kind),
    )


@dataclass(frozen=True)
class DevicePlace:
    """One device, and which parts it holds."""

    id: int
    process: int
    """Its host."""
    coordinates: dict[str, int]
    row_shard: int
    """Of a batch's rows, split over dp and fsdp."""
    weight_shard: tuple[int, int]
    """Of the weights, split over fsdp and tp."""


@dataclass(frozen=True)
class WeightPlacement:
    """One parameter on the mesh."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    axes: tuple[str | None, ...]
    """Mesh axes of each dim, joined by `+`; None = whole on every device."""
    bytes_per_device: int
    replicated_dims: tuple[str, ...]
    """Dims that the table wants split and whose size the axis does not divide."""


@dataclass(frozen=True)
class MeshReport:
    topology: Topology
    shape: dict[str, int]
    devices: list[DevicePlace]
    weights: list[WeightPlacement]
    num_parameters: int
    weight_bytes_per_device: int
    samples_per_step: int
    samples_per_device: float

    def to_dict(self) -> dict[str, Any]:
        topology = self.topology
        flat = {
            "platform": topology.platform,
            "device_kind": topology.device_kind,
            "num_devices": topology.num_devices,
            "num_processes": topology.num_hosts,
        }
        return {**flat, **asdict(self)}

    def to_text(self) -> str:
        axes = " x ".join(f"{axis} {size}" for axis, size in self.shape.items())
        rows, fsdp, tp = self.shape["dp"] * self.shape["fsdp"], self.shape["fsdp"], self.shape["tp"]
        lines = [*self.topology.to_lines(), "", f"mesh {axes}", *self._host_lines()]
        lines.append(
            f"b: which of {rows} equal parts of a batch's rows; w: which of {fsdp} parts of the weights along fsdp"
            + (f", and of {tp} along tp" if tp > 1 else "")
        )
        return "\n".join([*lines, "", *self._weight_table()])

    def _host_lines(self) -> Iterator[str]:
        """Which device of which host holds what: a line for each host, or for many alike."""
        hosts: dict[int, list[DevicePlace]] = {}
        for device in self.devices:
            hosts.setdefault(device.process, []).append(device)
        numbers = sorted(hosts)
        drawn = numbers if len(numbers) <= MAX_HOSTS_SHOWN else [*numbers[:2], numbers[-1]]
        for number in drawn:
            if number == numbers[-1] and len(drawn) < len(numbers):
                yield self._format_host_range([hosts[n] for n in numbers[2:-1]])
            devices = hosts[number]
            for first in range(0, len(devices), DEVICES_PER_LINE):
                cells = "  ".join(
                    f"{self._format_device(one):<18}" for one in devices[first : first + DEVICES_PER_LINE]
                )
                yield f"{f'host {number}' if first == 0 else '':<14}{cells}".rstrip()

    def _format_device(self, device: DevicePlace) -> str:
        fsdp, tp = device.weight_shard
        which = f"w{fsdp}" if self.shape["tp"] == 1 else f"w{fsdp}.{tp}"
        return f"[{device.id}: b{device.row_shard} {which}]"

    def _format_host_range(self, hosts: Sequence[Sequence[DevicePlace]]) -> str:
        held = {tuple(device.weight_shard for device in host) for host in hosts}
        alike = ", each host with the same w" if len(held) == 1 else ""
        ends = f"{self._format_device(hosts[0][0])} to {self._format_device(hosts[-1][-1])}"
        name = f"hosts {hosts[0][0].process}-{hosts[-1][0].process}"
        return f"{name:<14}{ends}, {len(hosts[0])} on each{alike}"

    def _weight_table(self) -> list[str]:
        lines = [f"{'weight':<36}{'shape':<26}{'axes':<34}{'MiB a device':>12}"]
        for weight in self.weights:
            where = ", ".join(axis or "-" for axis in weight.axes)
            lines.append(f"{weight.name:<36}{weight.shape!s:<26}{where:<34}{weight.bytes_per_device / 2**20:>12.2f}")
        lines += [
            "",
            f"{self.num_parameters:,} parameters, {self.weight_bytes_per_device / 2**20:,.1f} MiB of weights a device",
            f"{self.samples_per_step} samples a step, {self.samples_per_device:g} a device",
        ]
        return lines + [
            f"note: {w.name}: {', '.join(w.replicated_dims)} of {w.shape} is not divisible by its axis and stays whole"
            for w in self.weights
            if w.replicated_dims
        ]


def weight_placement(name: str, weight: jax.ShapeDtypeStruct, dims: Sequence[str], mesh: Mesh) -> WeightPlacement:
    shape, spec = weight.shape, partition_spec(dims, weight.shape, mesh)
    axes = tuple("+".join(axis) if isinstance(axis, tuple) else axis for axis in spec)
    size = bytes_per_device(jax.ShapeDtypeStruct(shape, weight.dtype, sharding=NamedSharding(mesh, spec)))
    return WeightPlacement(name, shape, tuple(dims), axes, size, tuple(replicated_dims(dims, shape, mesh)))


def device_places(mesh: Mesh) -> list[DevicePlace]:
    """Every device of the mesh, host after host."""
    places = []
    for where, device in np.ndenumerate(mesh.devices):
        dp, fsdp, tp = map(int, where)
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
    """The report of a mesh and a model's weights: name -> (shape and type, dims)."""
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


def format_id_ranges(numbers: Sequence[int]) -> str:
    """`0-3, 6`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
