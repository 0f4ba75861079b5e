"""The table that maps logical dims to mesh axes, and its application to shapes and meshes.

Weights declare their dims where they are defined (`app.model.decoder`), activations where they are constrained. No
other module maps dims to mesh axes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from app.mesh.devices import device_kind, device_platform

AXES = ("dp", "fsdp", "tp")
ROW_AXES = ("dp", "fsdp")
"""The axes over which the rows of a batch (prompts, samples, slots, packed rows) are split."""

Dims = Sequence[str]
"""The names of an array's logical dims."""

LOGICAL_AXIS_RULES: dict[str, str | tuple[str, ...] | None] = {
    "rows": ROW_AXES,
    # Rows gathered over the devices that share weights.
    "shared_rows": "dp",
    # Rows that are also split along tp; see `spread_rows`.
    "spread_rows": AXES,
    "tokens": None,
    # Tokens of the residual stream between sublayers, where no matmul needs all of them.
    "residual_tokens": "tp",
    "layers": None,
    "embed": "fsdp",
    "vocab": "tp",
    "query_heads": "tp",
    "kv_heads": "tp",
    "head": None,
    "mlp": "tp",
    # Whole experts: a device has all tokens of its rows, and applies its own experts to them.
    "experts": "tp",
    "expert_mlp": None,
    # The router's outputs.
    "routes": None,
    "lora_rank": None,
    # The LM head's vocabulary, split where it is used, so that no device needs another one's part of the table.
    "head_vocab": ("tp", "fsdp"),
    # The model dim of activations is not split: fsdp splits their rows.
    "activation": None,
}


def axis_size(mesh: Mesh | AbstractMesh, axes: str | tuple[str, ...] | None) -> int:
    """Returns the number of devices along one axis, or along several together; 1 for None."""
    if axes is None:
        return 1
    return math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))


def partition_spec(dims: Sequence[str], shape: Sequence[int], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Returns the PartitionSpec of an array. A dim whose size is not divisible by its axis is replicated.

    Raises:
        KeyError: a dim is not in the table.
    """
    assert len(dims) == len(shape), f"{dims} does not name the dims of {shape}"
    axes = [LOGICAL_AXIS_RULES[dim] for dim in dims]
    return PartitionSpec(*(a if size % axis_size(mesh, a) == 0 else None for a, size in zip(axes, shape, strict=True)))


def sharding_tree(mesh: Mesh, shapes: Any, dims: Any) -> Any:
    """Returns the NamedShardings of a tree of arrays or shapes, given the tree of their dims."""
    return jax.tree.map(lambda leaf, d: NamedSharding(mesh, partition_spec(d, leaf.shape, mesh)), shapes, dims)


def constrain(x: Array, *dims: str) -> Array:
    """Constrains `x` to the sharding of its dims on the current mesh; returns it unchanged without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(dims, x.shape, mesh))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def reshard(x: Array, before: Dims, after: Dims) -> Array:
    """Moves `x` from the sharding of dims `before` to the sharding of dims `after`; its gradient moves back."""
    return constrain(constrain(x, *before), *after)


reshard.defvjp(
    lambda x, before, after: (reshard(x, before, after), None),
    lambda before, after, _, gradient: (reshard(gradient, after, before),),
)


def current_device() -> tuple[str, str]:
    """Returns the platform (`cpu`, `gpu` or `tpu`) and kind of the current mesh's devices, or of the default device.

    For virtual devices that simulate others, returns the platform and kind of the simulated devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    device = jax.devices()[0] if mesh.empty else mesh.abstract_device
    return device_platform(device), device_kind(device)


def spread_rows(num_rows: int, mesh: Mesh | AbstractMesh | None = None) -> str:
    """Returns the dim `spread_rows` if the rows can be split evenly over all devices of the mesh, else `rows`.

    Args:
        mesh: the mesh; None = the current mesh.
    """
    mesh = mesh or jax.sharding.get_abstract_mesh()
    return "rows" if mesh.empty or num_rows % mesh.size else "spread_rows"


def row_shard_size(num_rows: int) -> int:
    """Returns the number of rows on each device of the current mesh: all rows if they cannot be split evenly."""
    mesh = jax.sharding.get_abstract_mesh()
    num_shards = 1 if mesh.empty else axis_size(mesh, LOGICAL_AXIS_RULES["rows"])
    return num_rows // num_shards if num_rows % num_shards == 0 else num_rows


def shard_map_by_dims(
    function: Callable[..., tuple[Any, ...]], *, in_dims: Any, out_dims: Sequence[Any]
) -> Callable[..., tuple[Any, ...]]:
    """Returns a function that applies `function` to each device's part of its arguments on the current mesh.

    Loops in `function` may differ in length between devices, unless they contain collectives. A dim is split if its
    axis divides it in every argument that has it; otherwise it is replicated. Gradients of an argument are summed over
    the devices that have the same part of it.

    Args:
        in_dims: the dims of each argument, as a tree of tuples of names.
        out_dims: the dims of each result, in the same format; all must occur in `in_dims`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function

    def split(*arguments: Any) -> tuple[Any, ...]:
        replicated: set[str] = set()

        def find_replicated(array: Array, dims: Dims) -> None:
            spec = partition_spec(dims, array.shape, mesh)
            replicated.update(dim for dim, axes in zip(dims, spec, strict=True) if axes is None)

        def spec(dims: Dims) -> PartitionSpec:
            return PartitionSpec(*(None if dim in replicated else LOGICAL_AXIS_RULES[dim] for dim in dims))

        jax.tree.map(find_replicated, arguments, in_dims)
        in_specs = jax.tree.map(lambda _, dims: spec(dims), arguments, in_dims)
        is_dims = lambda tree: isinstance(tree, tuple) and all(isinstance(dim, str) for dim in tree)  # noqa: E731
        out_specs = jax.tree.map(spec, tuple(out_dims), is_leaf=is_dims)
        return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*arguments)

    return split
