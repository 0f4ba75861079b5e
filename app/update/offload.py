"""An update whose moments are in host memory: those of one layer at a time are on the device, then those of the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jaxtyping import Array

from app.model.decoder import Params
from app.update.optimizer import map_moments

ElementwiseUpdate = Callable[[Params, Any, Params], tuple[Params, Any]]
"""(weights, optimizer state, gradients) -> (new weights, new optimizer state), for all weights or some of them."""

STACKED = "blocks"
"""The weights of all layers, stacked on their first dim."""


def update_by_part(update: ElementwiseUpdate, params: Params, state: Any, gradients: Params) -> tuple[Params, Any]:
    """Runs an update on one layer after another, then on each of the other weights, such as the embedding.

    The moments of `state` are in host memory, and so are the new ones. All parts read the same counters.
    """

    def run(params: Params, part: Any, gradients: Params) -> tuple[Params, Any]:
        part = map_moments(lambda _, moment: jax.device_put(moment, jax.memory.Space.Device), like, state, part)
        params, part = update(params, part, gradients)
        return params, map_moments(lambda _, moment: jax.device_put(moment, jax.memory.Space.Host), like, state, part)

    def run_layers(params: Params, stacks: Any, gradients: Params) -> tuple[Params, Any]:
        def one_layer(i: Array, done: tuple[Params, Any]) -> tuple[Params, Any]:
            def layer_of(stack: Any) -> Any:
                return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), stack)

            def with_layer(stack: Any, layer: Any) -> Any:
                return jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, i, 0), stack, layer)

            params, stacks = done
            layer = map_moments(lambda _, stack, __: layer_of(stack), like, state, stacks, state)
            new_params, layer = run(layer_of(params), layer, layer_of(gradients))
            stacks = map_moments(lambda _, stack, new: with_layer(stack, new), like, state, stacks, layer)
            return with_layer(params, new_params), stacks

        return lax.fori_loop(0, len(jax.tree.leaves(gradients)[0]), one_layer, (params, stacks))

    like, new_params, new_state = params, {}, map_moments(lambda _: {}, params, state)
    for name in sorted(params, key=lambda name: name != STACKED):
        moments = map_moments(lambda moment, name=name: {name: moment[name]}, like, state)
        part = {name: params[name]}, moments, {name: gradients[name]}
        # Otherwise the moments of several parts would be on the device at once.
        part, new_params = lax.optimization_barrier((part, new_params))
        done, moments = (run_layers if name == STACKED else run)(*part)
        new_params |= done
        new_state = map_moments(lambda _, before, new: before | new, like, state, new_state, moments)
    return new_params, new_state
