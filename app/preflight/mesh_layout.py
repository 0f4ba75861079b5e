"""Layout in the report of `grpo inspect-mesh`: devices, mesh axes, and the placement of weights and rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from app.mesh.axis_rules import partition_spec
from app.mesh.device_mesh import num_hosts
from app.mesh.devices import device_kind, device_platform, host_index, local_devices, simulated_slice
from app.mesh.placement import bytes_per_device, num_row_shards
from app.records.text_format import format_bytes, format_ranges, format_table

MAX_HOSTS_SHOWN = 4
"""Maximum number of hosts in the text; if there are more, it shows only the first two and the last."""


@dataclass(frozen=True)
class HostParts:
    """The devices of one host, and the indices of their parts of a batch's rows and of the weights."""

    host: int
    devices: tuple[int, ...]
    rows: tuple[int, ...]
    """Parts of the rows, which are split over dp and fsdp."""
    fsdp: tuple[int, ...]
    tp: tuple[int, ...]
    """Parts of the weights along the two axes over which they are split."""


@dataclass(frozen=True)
class WeightPlacement:
    """Placement of one parameter on the mesh."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    """Mesh axes of each dim, joined by `+`; None for a replicated dim."""
    bytes_per_device: int


@dataclass(frozen=True)
class MeshLayout:
    """Layout of a model's weights and of a step's samples on a mesh."""

    platform: str
    device_kind: str
    pretended: str | None
    """Name of the TPU slice, or of the host with GPUs, that virtual devices simulate; None for real devices."""
    num_devices: int
    num_hosts: int
    this_host: int
    device_memory_bytes: int | None
    shape: Mapping[str, int]
    hosts: Sequence[HostParts]
    weights: Sequence[WeightPlacement]
    num_parameters: int
    weight_bytes_per_device: int
    samples_per_step: int
    samples_per_device: float

    def to_text(self) -> str:
        """Returns the layout as readable text."""
        size = self.device_memory_bytes
        memory = "memory unknown" if size is None else f"{format_bytes(size)} each"
        simulated = "" if self.pretended is None else f" of a simulated {self.pretended}"
        weights = [
            (w.name, str(w.shape), ", ".join(axis or "-" for axis in w.axes), format_bytes(w.bytes_per_device))
            for w in self.weights
        ]
        return "\n".join(
            [
                f"{self.num_devices} x {self.device_kind} ({self.platform}), {memory}, on {self.num_hosts} host(s)",
                f"host {self.this_host}{simulated}: devices {format_ranges(self.hosts[self.this_host].devices)}",
                f"\nmesh {' x '.join(f'{axis} {size}' for axis, size in self.shape.items())}\n{self._host_table()}\n",
                format_table(weights, header=("weight", "shape", "axes", "on each device"), num_left=3),
                f"\n{self.num_parameters:,} parameters, {format_bytes(self.weight_bytes_per_device)} on each device",
                f"{self.samples_per_step} samples per step, {self.samples_per_device:g} per device",
            ]
        )

    def _host_table(self) -> str:
        header = ["host", "devices", f"parts of rows (of {self.shape['dp'] * self.shape['fsdp']})"]
        header += [f"parts of weights along {axis} (of {self.shape[axis]})" for axis in ("fsdp", "tp")]
        rows = [[str(one.host), *map(format_ranges, (one.devices, one.rows, one.fsdp, one.tp))] for one in self.hosts]
        if len(rows) > MAX_HOSTS_SHOWN:
            rows = [*rows[:2], ["..."] * len(header), rows[-1]]
        return format_table(rows, header=header, num_left=len(header))


def host_parts(mesh: Mesh) -> list[HostParts]:
    """Returns the devices and the parts of every host."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for (dp, fsdp, tp), device in np.ndenumerate(mesh.devices):
        numbers = (device.id, dp * mesh.shape["fsdp"] + fsdp, fsdp, tp)
        found.setdefault(host_index(device), []).append(numbers)
    return [HostParts(host, *zip(*numbers, strict=True)) for host, numbers in sorted(found.items())]


def weight_placement(name: str, weight: jax.ShapeDtypeStruct, dims: Sequence[str], mesh: Mesh) -> WeightPlacement:
    """Returns the mesh axes of a weight's dims and its bytes on each device."""
    shape, spec = weight.shape, partition_spec(dims, weight.shape, mesh)
    axes = tuple("+".join(axis) if isinstance(axis, tuple) else axis for axis in spec)
    size = bytes_per_device(jax.ShapeDtypeStruct(shape, weight.dtype, sharding=NamedSharding(mesh, spec)))
    return WeightPlacement(name, shape, axes, size)


def mesh_layout(
    mesh: Mesh,
    weights: Mapping[str, tuple[jax.ShapeDtypeStruct, tuple[str, ...]]],
    *,
    num_parameters: int,
    samples_per_step: int,
    memory_bytes: int | None,
) -> MeshLayout:
    """Returns the layout of a model on a mesh; `weights` maps names to (shape and type, dims)."""
    placements = [weight_placement(name, *weight, mesh) for name, weight in weights.items()]
    pretended, device = simulated_slice(), mesh.devices.flat[0]
    return MeshLayout(
        platform=device_platform(device),
        device_kind=device_kind(device),
        pretended=pretended and pretended.name,
        num_devices=mesh.size,
        num_hosts=num_hosts(mesh),
        this_host=host_index(local_devices()[0]),
        device_memory_bytes=memory_bytes,
        shape=dict(mesh.shape),
        hosts=host_parts(mesh),
        weights=placements,
        num_parameters=num_parameters,
        weight_bytes_per_device=sum(p.bytes_per_device for p in placements),
        samples_per_step=samples_per_step,
        samples_per_device=samples_per_step / num_row_shards(mesh),
    )
