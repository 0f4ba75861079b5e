"""An update of moments in host memory, of which those of one layer at a time are on the device, then the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax.traverse_util import unflatten_dict
from jax import lax
from jaxtyping import Array

from app.model.decoder import ParamPath, Params, flatten_by_path
from app.update.optimizer import map_moments

ElementwiseUpdate = Callable[[Params, Any, Params], tuple[Params, Any]]
"""(weights, optimizer state, gradients) -> (new weights, new optimizer state), for all weights or some of them."""

RunUpdate = Callable[[ElementwiseUpdate, Params, Any, Params], tuple[Params, Any]]
"""(update, weights, optimizer state, gradients) -> (new weights, new optimizer state)."""

FlatParams = dict[ParamPath, Any]

STACKED = "blocks"
"""Where the weights of all layers are, stacked on their first dim."""


def update_at_once(update: ElementwiseUpdate, params: Params, state: Any, gradients: Params) -> tuple[Params, Any]:
    """Runs an update on all weights together."""
    return update(params, state, gradients)


def update_by_layer(update: ElementwiseUpdate, params: Params, state: Any, gradients: Params) -> tuple[Params, Any]:
    """Runs an update on one layer after another, then on all other weights; XLA would move all moments at once.

    The moments of `state` are in host memory, and so are the new ones. Weights may differ by a rounding from those of
    `update_at_once`, because a compiler fuses products and sums of different programs differently.
    """
    flat_params, flat_gradients = flatten_by_path(params), flatten_by_path(gradients)
    flat_state = map_moments(flatten_by_path, params, state)

    def of_moments(fn: Callable[..., Any], *others: Any) -> Any:
        return map_moments(fn, flat_params, flat_state, *others)

    def run(params: FlatParams, part: Any, gradients: FlatParams) -> tuple[FlatParams, Any]:
        def on_device(_: Any, moment: Any) -> Any:
            return unflatten_dict(jax.device_put(moment, jax.memory.Space.Device))

        def on_host(_: Any, moment: Any) -> Any:
            return jax.device_put(flatten_by_path(moment), jax.memory.Space.Host)

        new, part = update(unflatten_dict(params), of_moments(on_device, part), unflatten_dict(gradients))
        return flatten_by_path(new), of_moments(on_host, part)

    def run_layers(params: FlatParams, stacks: Any, gradients: FlatParams) -> tuple[FlatParams, Any]:
        def layer_of(stack: Any, i: Array) -> Any:
            return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), stack)

        def with_layer(stack: Any, layer: Any, i: Array) -> Any:
            return jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, i, 0), stack, layer)

        def one_layer(i: Array, done: tuple[FlatParams, Any]) -> tuple[FlatParams, Any]:
            params, stacks = done
            # Counters are those before the update, for every layer.
            layer = of_moments(lambda _, stack, __: layer_of(stack, i), stacks, flat_state)
            new_params, layer = run(layer_of(params, i), layer, layer_of(gradients, i))
            stacks = of_moments(lambda _, stack, new: with_layer(stack, new, i), stacks, layer)
            return with_layer(params, new_params, i), stacks

        return lax.fori_loop(0, len(next(iter(gradients.values()))), one_layer, (params, stacks))

    # Not their vectors, [L, D]: they are small, and a row of a TPU's tiles cannot be moved on its own.
    stacked = [path for path, x in flat_params.items() if path[0] == STACKED and x.ndim > 2]
    others = [path for path in flat_params if path not in stacked]
    new_params, new_state = {}, of_moments(lambda _: {})
    for paths, run_part in ((stacked, run_layers), (others, run)):
        if paths:

            def some(tree: FlatParams, paths: list[ParamPath] = paths) -> FlatParams:
                return {path: tree[path] for path in paths}

            done, moments = run_part(some(flat_params), of_moments(some), some(flat_gradients))
            new_params |= done
            new_state = of_moments(lambda _, before, new: before | new, new_state, moments)
    return unflatten_dict(new_params), of_moments(lambda _, moment: unflatten_dict(moment), new_state)
