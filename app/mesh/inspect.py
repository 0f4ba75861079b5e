"""The report behind `grpo inspect-mesh`: devices, axes, and where weights and rows will lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from app.mesh.axis_rules import AXES, partition_spec, replicated_dims
from app.mesh.placement import bytes_per_device


@dataclass(frozen=True)
class WeightPlacement:
    """One parameter on the mesh."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    axes: tuple[str | None, ...]
    """Mesh axes of each dim, joined by `+`; None = whole on every device."""
    bytes_per_device: int
    """float32."""
    replicated_dims: tuple[str, ...]
    """Dims that the table wants split and whose size the axis does not divide."""


@dataclass(frozen=True)
class MeshReport:
    platform: str
    device_kind: str
    num_devices: int
    num_processes: int
    shape: dict[str, int]
    devices: list[dict[str, Any]]
    weights: list[WeightPlacement]
    num_parameters: int
    weight_bytes_per_device: int
    samples_per_step: int
    samples_per_device: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        axes = ", ".join(f"{axis} {size}" for axis, size in self.shape.items())
        lines = [
            f"{self.num_devices} x {self.device_kind} ({self.platform}) on {self.num_processes} host(s); mesh {axes}",
            "",
            f"{'device':>6}  {'host':>4}  " + "  ".join(f"{axis:>4}" for axis in AXES),
        ]
        lines += [
            f"{d['id']:>6}  {d['process']:>4}  " + "  ".join(f"{d['coordinates'][axis]:>4}" for axis in AXES)
            for d in self.devices
        ]
        lines += ["", f"{'weight':<36}{'shape':<26}{'axes':<34}{'MiB a device':>12}"]
        for weight in self.weights:
            where = ", ".join(axis or "-" for axis in weight.axes)
            lines.append(f"{weight.name:<36}{weight.shape!s:<26}{where:<34}{weight.bytes_per_device / 2**20:>12.2f}")
        lines += [
            "",
            f"{self.num_parameters:,} parameters, {self.weight_bytes_per_device / 2**20:,.1f} MiB of float32 weights a "
            "device (AdamW holds twice that beside them)",
            f"{self.samples_per_step} samples a step, {self.samples_per_device:g} a device",
        ]
        lines += [
            f"note: {w.name}: {', '.join(w.replicated_dims)} of {w.shape} is not divisible by its axis and stays whole"
            for w in self.weights
            if w.replicated_dims
        ]
        return "\n".join(lines)


def weight_placement(name: str, shape: Sequence[int], dims: Sequence[str], mesh: Mesh) -> WeightPlacement:
    spec = partition_spec(dims, shape, mesh)
    axes = tuple("+".join(axis) if isinstance(axis, tuple) else axis for axis in spec)
    size = bytes_per_device(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec)))
    return WeightPlacement(name, tuple(shape), tuple(dims), axes, size, tuple(replicated_dims(dims, shape, mesh)))


def mesh_report(
    mesh: Mesh,
    weights: dict[str, tuple[tuple[int, ...], tuple[str, ...]]],
    *,
    samples_per_step: int,
    num_row_shards: int,
) -> MeshReport:
    """The report of a mesh and a model's parameters: name -> (shape, dims)."""
    placements = [weight_placement(name, *weight, mesh) for name, weight in weights.items()]
    first = mesh.devices.flat[0]
    devices = [
        {"id": d.id, "process": d.process_index, "coordinates": dict(zip(AXES, map(int, where), strict=True))}
        for where, d in np.ndenumerate(mesh.devices)
    ]
    return MeshReport(
        platform=first.platform,
        device_kind=first.device_kind,
        num_devices=mesh.size,
        num_processes=jax.process_count(),
        shape=dict(mesh.shape),
        devices=devices,
        weights=placements,
        num_parameters=sum(math.prod(shape) for shape, _ in weights.values()),
        weight_bytes_per_device=sum(p.bytes_per_device for p in placements),
        samples_per_step=samples_per_step,
        samples_per_device=samples_per_step / num_row_shards,
    )
