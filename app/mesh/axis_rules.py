"""The one table from logical dims to mesh axes, and how it resolves for a given shape and mesh.

Weights name their dims once, beside their declaration (`app.model.decoder`); activations name
theirs where they are constrained. Axis names appear in no other room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

AXES = ("dp", "fsdp", "tp")
ROW_AXES = ("dp", "fsdp")
"""Rows of a batch (prompts, samples, slots, packed rows) are split over both."""

Dims = Sequence[str]
"""Logical dims of one array, by name."""

LOGICAL_AXIS_RULES: dict[str, str | tuple[str, ...] | None] = {
    "rows": ROW_AXES,
    "tokens": None,
    "layers": None,
    "embed": "fsdp",
    "vocab": "tp",
    "query_heads": "tp",
    "kv_heads": "tp",
    "head": None,
    "mlp": "tp",
    "lora_rank": None,
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
    axes = [LOGICAL_AXIS_RULES[dim] for dim in dims]
    return PartitionSpec(*(a if size % axis_size(mesh, a) == 0 else None for a, size in zip(axes, shape, strict=True)))


def replicated_dims(dims: Sequence[str], shape: Sequence[int], mesh: Mesh) -> list[str]:
    """Dims that should be split on this mesh and cannot be, for the report."""
    return [
        dim
        for dim, size in zip(dims, shape, strict=True)
        if (devices := axis_size(mesh, LOGICAL_AXIS_RULES[dim])) > 1 and size % devices != 0
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


def rows_per_device(num_rows: int) -> int:
    """How many of an array's rows lie on each device of the mesh in force."""
    mesh = jax.sharding.get_abstract_mesh()
    num_shards = 1 if mesh.empty else axis_size(mesh, LOGICAL_AXIS_RULES["rows"])
    return num_rows // num_shards if num_rows % num_shards == 0 else num_rows


def shard_map_by_dims(
    function: Callable[..., tuple[Array, ...]], *, in_dims: Any, out_dims: Sequence[Dims]
) -> Callable[..., tuple[Array, ...]]:
    """`function` of what each device of the mesh in force holds, where no device needs another's part.

    Each then runs loops of its own length. A dim is split where its axis divides it in every argument that has a dim
    of that name, else whole everywhere, and computed by each. Not to be differentiated through.

    Args:
        inputs: dims of each argument, which are trees of arrays; a tree of tuples of names.
        outputs: dims of each result; all are names of the inputs.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function

    def split(*arguments: Any) -> tuple[Array, ...]:
        whole: set[str] = set()

        def find_whole(array: Array, dims: Dims) -> None:
            spec = partition_spec(dims, array.shape, mesh)
            whole.update(dim for dim, axes in zip(dims, spec, strict=True) if axes is None)

        def spec(dims: Dims) -> PartitionSpec:
            return PartitionSpec(*(None if dim in whole else LOGICAL_AXIS_RULES[dim] for dim in dims))

        jax.tree.map(find_whole, arguments, in_dims)
        in_specs = jax.tree.map(lambda _, dims: spec(dims), arguments, in_dims)
        out_specs = tuple(map(spec, out_dims))
        return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*arguments)

    return split
