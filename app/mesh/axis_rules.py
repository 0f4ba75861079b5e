"""The one table from logical dims to mesh axes, and how it resolves for a given shape and mesh.

Weights name their dims once, beside their declaration (`app.policy.decoder`); activations name
theirs where they are constrained. Axis names appear in no other room.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

AXES = ("dp", "fsdp", "tp")
ROW_AXES = ("dp", "fsdp")
"""Rows of a batch (prompts, samples, slots, packed rows) are split over both."""

AXIS_OF_DIM: dict[str, str | tuple[str, ...] | None] = {
    "rows": ROW_AXES,
    "micro_batches": None,
    "tokens": None,
    "layers": None,
    "embed": "fsdp",
    "vocab": "tp",
    "query_heads": "tp",
    "kv_heads": "tp",
    "head": None,
    "mlp": "tp",
    # An activation's model dim is whole on every device: its rows are what fsdp splits.
    "activation": None,
}


def axis_size(mesh: Mesh | AbstractMesh, axes: str | tuple[str, ...] | None) -> int:
    """Number of devices along one axis, or along several taken together; 1 for None."""
    if axes is None:
        return 1
    return math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))


def partition_spec(dims: Sequence[str], shape: Sequence[int], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """The PartitionSpec of an array. A dim that its axis does not divide is replicated.

    Raises:
        KeyError: a dim that the table does not know.
    """
    assert len(dims) == len(shape), f"{dims} does not name the dims of {shape}"
    axes = [AXIS_OF_DIM[dim] for dim in dims]
    return PartitionSpec(*(a if size % axis_size(mesh, a) == 0 else None for a, size in zip(axes, shape, strict=True)))


def replicated_dims(dims: Sequence[str], shape: Sequence[int], mesh: Mesh) -> list[str]:
    """Dims that should be split on this mesh and cannot be, for the report."""
    return [
        dim
        for dim, size in zip(dims, shape, strict=True)
        if (devices := axis_size(mesh, AXIS_OF_DIM[dim])) > 1 and size % devices != 0
    ]


def sharding_tree(mesh: Mesh, shapes: Any, dims: Any) -> Any:
    """NamedShardings for a tree of shaped leaves and the equally built tree of their dims."""
    return jax.tree.map(lambda leaf, d: NamedSharding(mesh, partition_spec(d, leaf.shape, mesh)), shapes, dims)


def constrain(x: Array, *dims: str) -> Array:
    """`x`, with the layout its dims ask for on the mesh in force; unchanged where there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(dims, x.shape, mesh))
