"""Converts the policy's weights to a layout for fast decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh
from jaxtyping import Array

from app.mesh.axis_rules import constrain, sharding_tree
from app.mesh.device_mesh import to_host_submesh
from app.mesh.placement import abstract_arrays, bytes_received, tree_shardings
from app.model.decoder import DecoderDefinition, Params, flatten_by_path
from app.model.quantization import CODES, SCALES


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeWeights:
    """The policy's weights, laid out for fast decoding: split only over tp.

    Each layer has its own arrays, already in the compute dtype: slicing and casting stacked arrays would copy them for
    every token.
    """

    params: Params
    """All weights outside the layers."""
    blocks: tuple[Params, ...]


class DecodeConversion:
    """Unstacks, casts and lays out a policy's weights on a mesh, with adapters merged into the kernels.

    `definition` determines whether float kernels are quantized or get their output dims first.

    One small program serves every layer: a program for all layers takes seconds to compile, and merging adapters in it
    would keep all layers both in float32 and in the compute dtype.

    Args:
        mesh: devices used for generation, of this host or of all hosts.
        mesh_of_all_hosts: mesh over the training devices, in their order, of which `mesh` is this host's part;
            `mesh` if None.
        training_mesh: mesh of the policy's weights; `mesh_of_all_hosts` if None.
        merge: converts a policy with adapters to weights for `definition`; None to use the weights as they are.
    """

    def __init__(
        self,
        definition: DecoderDefinition,
        mesh: Mesh,
        dtype: jnp.dtype,
        *,
        mesh_of_all_hosts: Mesh | None = None,
        training_mesh: Mesh | None = None,
        merge: Callable[[Params], Params] | None = None,
    ):
        self.definition, self.mesh = definition, mesh
        self.mesh_of_all_hosts = mesh_of_all_hosts or mesh
        self._training_mesh = training_mesh or self.mesh_of_all_hosts
        self._dtype = dtype
        merge = merge or (lambda params: params)
        # Explicit shardings, because a host's submesh receives the weights in them, and programs are compiled for them.
        shardings = tree_shardings(abstract_decode_weights(definition, self.mesh_of_all_hosts, dtype))

        def lay_out(params: Params, dims: Any) -> Params:
            converted = _cast(_move_outputs_first(definition, _quantize_kernels(definition, merge(params))), dtype)
            # Gather over fsdp first; a mesh with another tp then takes its part. In one step, XLA would do the same
            # with a warning.
            return jax.tree.map(lambda x, dims: constrain(x, *decode_dims(dims)), converted, dims)

        def block(stacked: Params, layer: Array) -> Params:
            one = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, layer, 1), {"blocks": stacked})
            return jax.tree.map(lambda x: x[0], lay_out(one, {"blocks": definition.dims["blocks"]})["blocks"])

        def others(params: Params) -> Params:
            # The stacked blocks stay in the tree as empty leaves, so that the tree still fits the graph.
            stacked = jax.tree.map(lambda x: x[:0], params["blocks"])
            return lay_out({**params, "blocks": stacked}, definition.dims)

        self._block = jax.jit(block, out_shardings=shardings.blocks[0])
        self._others = jax.jit(others, out_shardings=shardings.params)

    def __call__(self, params: Params) -> DecodeWeights:
        """Converts the weights of a policy version. The caller drops the result before an update, to free its memory.

        Programs on the training mesh give every host the complete weights. All hosts must call it from their training
        threads; while a host waits for the others, no host may run another program.
        """
        with jax.set_mesh(self._training_mesh):
            weights = self.lay_out(params)
        return weights if self.mesh == self.mesh_of_all_hosts else to_host_submesh(weights, self.mesh)

    def lay_out(self, params: Params) -> DecodeWeights:
        """Returns the weights on the mesh of all hosts. The training mesh must be the current mesh."""
        blocks = tuple(
            self._block(params["blocks"], np.int32(i)) for i in range(self.definition.architecture.num_layers)
        )
        return DecodeWeights(self._others(params), blocks)

    @property
    def abstract_weights(self) -> DecodeWeights:
        """Shapes, dtypes and shardings of the decode weights."""
        return abstract_decode_weights(self.definition, self.mesh, self._dtype)


def _quantize_kernels(definition: DecoderDefinition, params: Params) -> Params:
    """Replaces float kernels by codes and scales if the definition's kernels are quantized."""
    if definition.quantization is None:
        return params
    flat = flatten_by_path(params)
    for path in [path for path in flat if path[-1] == "kernel"]:
        parts = jax.vmap(definition.quantizer(path).quantize)(flat.pop(path).astype(jnp.float32))
        flat |= {(*path[:-1], leaf): part for leaf, part in parts.items()}
    return unflatten_dict(flat)


def _move_outputs_first(definition: DecoderDefinition, params: Params) -> Params:
    """Moves the output dims of stacked kernels to the front if `definition` has `outputs_first`."""
    if not definition.outputs_first:
        return params
    stored = DecoderDefinition.create(definition.architecture, definition.network_class, lora=definition.lora)
    given = flatten_by_path(stored.dims)
    wanted, flat = flatten_by_path(definition.dims), flatten_by_path(params)
    return unflatten_dict({path: x.transpose(map(given[path].index, wanted[path])) for path, x in flat.items()})


def _cast(params: Params, dtype: jnp.dtype) -> Params:
    """Casts weights to the compute dtype, except quantized kernels, which are dequantized as in training."""
    flat = flatten_by_path(params)
    return unflatten_dict({path: x if path[-1] in (CODES, SCALES) else x.astype(dtype) for path, x in flat.items()})


def decode_dims(dims: tuple[str, ...]) -> tuple[str, ...]:
    """Returns a weight's logical dims for decoding, none of which fsdp splits."""
    return tuple("activation" if dim == "embed" else dim for dim in dims)


def abstract_decode_weights(
    definition: DecoderDefinition,
    mesh: Mesh,
    dtype: jnp.dtype,
    to_dims: Callable[[tuple[str, ...]], tuple[str, ...]] = decode_dims,
) -> DecodeWeights:
    """Returns the shapes, dtypes and shardings of the weights that a `DecodeConversion` returns.

    Args:
        to_dims: maps a weight's logical dims to those that determine its sharding.
    """
    shapes = jax.eval_shape(lambda params: _cast(params, dtype), definition.shapes)

    def resized(num_layers: tuple[int, ...]) -> Params:
        resize = lambda x: jax.ShapeDtypeStruct((*num_layers, *x.shape[1:]), x.dtype)  # noqa: E731
        return jax.tree.map(resize, shapes["blocks"])

    def placed(shapes: Params, dims: Any) -> Params:
        dims = jax.tree.map(lambda _, dims: to_dims(dims), shapes, dims)
        return abstract_arrays(shapes, sharding_tree(mesh, shapes, dims))

    layer_dims = jax.tree.map(lambda _, dims: dims[1:], shapes["blocks"], definition.dims["blocks"])
    others = placed({**shapes, "blocks": resized((0,))}, definition.dims)
    return DecodeWeights(others, (placed(resized(()), layer_dims),) * definition.architecture.num_layers)


def transferred_bytes(definition: DecoderDefinition, training: Mesh, generating: Mesh, dtype: jnp.dtype) -> int:
    """Returns the bytes that the busiest device receives in a `DecodeConversion`.

    Weights are gathered on the training mesh, already in the compute dtype, and then moved to the generation mesh. The
    result is a lower bound if tp is larger in generation than in training.
    """
    trained = abstract_decode_weights(definition, training, dtype, to_dims=lambda dims: dims)
    gathered, placed = (abstract_decode_weights(definition, mesh, dtype) for mesh in (training, generating))
    return bytes_received(trained, gathered) + bytes_received(gathered, placed)
