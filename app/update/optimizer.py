"""AdamW with gradient clipping and a learning-rate schedule, and the training state, whose moments may be offloaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import unflatten_dict
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int32

from app.mesh.placement import HOST_MEMORY
from app.model.decoder import ParamPath, Params, flatten_by_path
from app.model.lora import LORA_A, LORA_B
from settings.schema.algorithm import OptimizerSettings

DECAYED = ("kernel", "embedding", "output", LORA_A, LORA_B)
"""Leaf names of weights with weight decay: matrices, including adapters, but no norms, biases or frozen routers."""

ElementwiseUpdate = Callable[[Params, Any, Params], tuple[Params, Any]]
"""(weights, optimizer state, gradients) -> (new weights, new optimizer state), for all weights or some of them."""

RunUpdate = Callable[[ElementwiseUpdate, Params, Any, Params], tuple[Params, Any]]
"""(update, weights, optimizer state, gradients) -> (new weights, new optimizer state)."""

FlatParams = dict[ParamPath, Any]

STACKED = "blocks"
"""Key of the layers' weights, which are stacked along their first dim."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that an update changes: trained weights, optimizer state and counters."""

    params: Params
    optimizer: Any
    """The state of the optax transformation: AdamW's moments and optax's step counters."""
    num_updates: Int32[Array, ""]
    """Number of updates applied, not counting skipped updates."""
    nonfinite_in_a_row: Int32[Array, ""]
    nonfinite_total: Int32[Array, ""]


def make_schedule(settings: OptimizerSettings, *, num_updates: int) -> optax.Schedule:
    """Returns a learning rate that warms up linearly with the applied updates, then stays constant or decays."""
    peak, warmup = settings.learning_rate, settings.warmup_steps
    decay_steps = max(num_updates - warmup, 1)
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, peak * settings.final_fraction, decay_steps),
        "cosine": optax.cosine_decay_schedule(peak, decay_steps, alpha=settings.final_fraction),
    }[settings.schedule]
    if warmup == 0:
        return after
    # The first update already has a positive rate: the ramp is 1/w, 2/w, ..., 1.
    ramp = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([ramp, after], [warmup])


def make_optimizer(settings: OptimizerSettings, schedule: optax.Schedule) -> optax.GradientTransformationExtraArgs:
    """Returns clipping by the global norm followed by AdamW. Source: Loshchilov & Hutter 2019.

    `update` takes the global norm as the argument `norm`; with it, the update is elementwise.
    """

    def decayed(params: Params) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in DECAYED, params)

    adamw = optax.adamw(
        schedule,
        b1=settings.beta1,
        b2=settings.beta2,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        mask=decayed,
    )
    types = {"mu": jnp.dtype(settings.first_moment), "nu": jnp.dtype(settings.second_moment)}
    return optax.chain(_clip(settings.max_grad_norm), _store_moments(adamw, types))


def _clip(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Returns a `clip_by_global_norm` that takes the norm as an argument, because gradients may come in parts."""

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        del params
        norm: Array = extra["norm"]
        return jax.tree.map(lambda g: jnp.where(norm < max_norm, g, g / norm * max_norm), updates), state

    return optax.GradientTransformationExtraArgs(optax.identity().init, update)


def _store_moments(adamw: optax.GradientTransformation, types: Mapping[str, Any]) -> optax.GradientTransformation:
    """Wraps AdamW to store its moments `mu` and `nu` in the given dtypes between updates, but to compute in float32."""
    if set(types.values()) == {jnp.dtype("float32")}:
        return adamw

    def cast(state: Any, types: Mapping[str, Any]) -> Any:
        return optax.tree.set(
            state, **{name: optax.tree.cast(optax.tree.get(state, name), dtype) for name, dtype in types.items()}
        )

    def init(params: Any) -> Any:
        return cast(adamw.init(params), types)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = adamw.update(updates, cast(state, dict.fromkeys(types, jnp.dtype("float32"))), params)
        return updates, cast(state, types)

    return optax.GradientTransformation(init, update)


def map_moments(fn: Callable[..., Any], like: Any, state: Any, *others: Any) -> Any:
    """Returns an optimizer state with `fn` applied to each moment; other fields come from the last state passed.

    Args:
        like: a tree with the structure of the weights, which distinguishes moments from other fields.
        others: states whose moments are passed to `fn` as further arguments; in these, a moment may be any tree.
    """
    # optax.tree_utils.tree_map_params would create an array, which compiles a program.
    is_moment = lambda field: jax.tree.structure(field) == jax.tree.structure(like)  # noqa: E731
    return jax.tree.map(
        lambda *fields: fn(*fields) if is_moment(fields[0]) else fields[-1], state, *others, is_leaf=is_moment
    )


def train_state_shardings(
    optimizer: optax.GradientTransformation, shapes: Params, shardings: Params, mesh: Mesh, *, offload: bool = False
) -> TrainState:
    """Returns the shardings of a TrainState: moments are sharded like their weights, counters are replicated.

    Args:
        offload: whether moments are in host memory.
    """
    replicated: Any = NamedSharding(mesh, PartitionSpec())
    state = jax.eval_shape(optimizer.init, shapes)
    kind = HOST_MEMORY if offload else None
    moments = jax.tree.map(lambda sharding: sharding.with_memory_kind(kind), shardings)
    counters = jax.tree.map(lambda _: replicated, state)
    return TrainState(
        shardings, map_moments(lambda *_: moments, shapes, state, counters), replicated, replicated, replicated
    )


def init_train_state(optimizer: optax.GradientTransformation, params: Params, shardings: TrainState) -> TrainState:
    """Returns the initial state for the given weights."""
    init = jax.jit(optimizer.init, out_shardings=shardings.optimizer)
    counters = [jax.device_put(jnp.zeros((), jnp.int32), shardings.num_updates) for _ in range(3)]
    return TrainState(params, init(params), *counters)


def update_at_once(update: ElementwiseUpdate, params: Params, state: Any, gradients: Params) -> tuple[Params, Any]:
    """Runs an update on all weights together."""
    return update(params, state, gradients)


def update_by_layer(update: ElementwiseUpdate, params: Params, state: Any, gradients: Params) -> tuple[Params, Any]:
    """Runs an update on one layer after another, then on all other weights.

    The old and the new moments are in host memory; updating all layers at once would move all moments to the device.
    The results may differ from those of `update_at_once` by rounding, because XLA fuses the two programs differently.
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
            # Every layer uses the counters from before the update.
            layer = of_moments(lambda _, stack, __: layer_of(stack, i), stacks, flat_state)
            new_params, layer = run(layer_of(params, i), layer, layer_of(gradients, i))
            stacks = of_moments(lambda _, stack, new: with_layer(stack, new, i), stacks, layer)
            return with_layer(params, new_params, i), stacks

        return lax.fori_loop(0, len(next(iter(gradients.values()))), one_layer, (params, stacks))

    # Not vectors, [L, D]: they are small, and a single row of a TPU tile cannot be moved.
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
