"""The policy's weights, laid out for fast decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh
from jaxtyping import Array

from app.mesh.axis_rules import constrain, sharding_tree
from app.mesh.placement import abstract_arrays
from app.model.decoder import DecoderDefinition, Params, flatten_by_path
from app.model.quantization import CODES, SCALES
from settings.schema.rollout import DecodeLayout


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeWeights:
    """The policy's weights, laid out for fast decoding.

    Each layer has its own arrays, already in the compute type: slicing and casting stacked arrays would copy them for
    every token.
    """

    params: Params
    """All weights except those of the blocks."""
    blocks: tuple[Params, ...]
    layout: DecodeLayout = field(default="gathered", metadata={"static": True})
    """`gathered`: split over tp only; `fsdp`: split over fsdp as in training, and gathered for every token."""


def make_decode_weights(
    definition: DecoderDefinition, params: Params, dtype: jnp.dtype, layout: DecodeLayout = "gathered"
) -> DecodeWeights:
    """Unstacks, casts and lays out the weights; runs once per policy version, under jit."""

    def constrain_param(x: Array, dims: tuple[str, ...]) -> Array:
        return constrain(x, *decode_dims(dims, layout))

    def layer_params(layer: int) -> Params:
        return jax.tree.map(
            lambda x, dims: constrain(x[layer], *decode_dims(dims[1:], layout)),
            constrained["blocks"],
            definition.dims["blocks"],
        )

    constrained = jax.tree.map(constrain_param, _cast_params(params, dtype), definition.dims)
    # The stacked blocks stay in the tree as empty leaves, so that the tree still fits the graph.
    rest = {**constrained, "blocks": jax.tree.map(lambda x: x[:0], constrained["blocks"])}
    num_layers = jax.tree.leaves(params["blocks"])[0].shape[0]
    return DecodeWeights(rest, tuple(layer_params(i) for i in range(num_layers)), layout)


def _cast_params(params: Params, dtype: jnp.dtype) -> Params:
    """Casts weights to the compute type, except quantized kernels, which are dequantized as in training."""
    flat = flatten_by_path(params)
    return unflatten_dict({path: x if path[-1] in (CODES, SCALES) else x.astype(dtype) for path, x in flat.items()})


def make_merged_decode_weights(
    definition: DecoderDefinition,
    params: Params,
    dtype: jnp.dtype,
    layout: DecodeLayout = "gathered",
    *,
    merge: Callable[[Params], Params],
) -> DecodeWeights:
    """Returns decode weights with the adapters merged into the kernels by `merge`.

    Works layer by layer: merging all layers at once would hold them in memory both in float32 and in the compute type.
    """

    def layer_params(layer: int) -> DecodeWeights:
        block = jax.tree.map(lambda x: x[layer : layer + 1], params["blocks"])
        return make_decode_weights(definition, merge({**params, "blocks": block}), dtype, layout)

    first, *others = map(layer_params, range(definition.architecture.num_layers))
    return replace(first, blocks=(*first.blocks, *(other.blocks[0] for other in others)))


def decode_dims(dims: tuple[str, ...], layout: DecodeLayout) -> tuple[str, ...]:
    """Returns a weight's logical dims for decoding."""
    return tuple("activation" if dim == "embed" else dim for dim in dims) if layout == "gathered" else dims


def abstract_decode_weights(
    definition: DecoderDefinition, mesh: Mesh, dtype: jnp.dtype, layout: DecodeLayout = "gathered"
) -> DecodeWeights:
    """Returns the result of `make_decode_weights` as shapes with shardings."""
    shapes = jax.eval_shape(lambda params: make_decode_weights(definition, params, dtype, layout), definition.shapes)
    dims = jax.tree.map(lambda _, dims: decode_dims(dims, layout), definition.shapes, definition.dims)
    layer_dims = jax.tree.map(lambda _, dims: dims[1:], definition.shapes["blocks"], dims["blocks"])
    tree = DecodeWeights(dims, (layer_dims,) * len(shapes.blocks), layout)
    return abstract_arrays(shapes, sharding_tree(mesh, shapes, tree))
