"""One optimizer step: sums gradients over micro-batches, then updates the weights if loss and gradients are finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.stages import Lowered
from jaxtyping import Array

from app.mesh.compiler_options import compiler_options
from app.model.decoder import Params
from app.model.lora import combine_params
from app.update.optimizer import RunUpdate, TrainState, update_at_once
from app.update.policy_loss import LossStats


class AccumulatedGradients(NamedTuple):
    """Float32 sums over the micro-batches processed so far in an optimizer step."""

    gradients: Params
    stats: LossStats


class MetricNames(NamedTuple):
    loss: str
    """Key of the loss in `LossStats.sums`."""
    prefix: str
    """Prefix of the optimizer's metrics: `policy` in `policy/grad_norm`."""


OPTIMIZER_METRICS = ("grad_norm", "learning_rate", "nonfinite_updates", "nonfinite_in_a_row")
"""Metrics of the optimizer, in the order in which `apply_gradients` computes them."""
BROKEN_GRADIENTS = "broken_gradients"
"""Metric: whether each parameter's gradient contains NaN or infinity, as an array in the order of `jax.tree.leaves`."""
POLICY_METRICS = MetricNames("loss", "policy")
VALUE_METRICS = MetricNames("value/loss", "value")


class UpdateStep:
    """Compiled optimizer step: (state, micro-batches, temperature, frozen) -> (new state, metrics).

    `frozen` contains the network's frozen weights, which have no gradients or moments; None if all are trained.
    Micro-batches run one by one through a program compiled once per shape. The old state is donated: its memory is
    reused. The metrics are those that `metric_names` lists, and `BROKEN_GRADIENTS`.
    """

    def __init__(
        self,
        objective: Callable[[Params, Any, Array], tuple[Array, LossStats]],
        optimizer: optax.GradientTransformationExtraArgs,
        schedule: optax.Schedule,
        shardings: TrainState,
        *,
        metrics: MetricNames = POLICY_METRICS,
        run_update: RunUpdate = update_at_once,
    ):
        sums = AccumulatedGradients(shardings.params, shardings.num_updates)  # pyright: ignore[reportArgumentType]

        def zeros(params: Params) -> AccumulatedGradients:
            assert self._parts is not None
            return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), AccumulatedGradients(params, self._parts))

        def trained_objective(
            params: Params, frozen: Params | None, batch: Any, temperature: Array
        ) -> tuple[Array, LossStats]:
            return objective(combine_params(params, frozen), batch, temperature)

        def add(
            total: AccumulatedGradients, params: Params, frozen: Params | None, batch: Any, temperature: Array
        ) -> AccumulatedGradients:
            loss, backward, parts = jax.vjp(
                lambda params: trained_objective(params, frozen, batch, temperature), params, has_aux=True
            )
            # Each layer's gradients are added in place, so a micro-batch's gradients never exist as a whole.
            sums = jax.tree.map(jax.new_ref, total.gradients)
            backward.with_refs(sums)(jnp.ones_like(loss))
            return AccumulatedGradients(jax.tree.map(jax.freeze, sums), total.stats + parts)

        def apply(state: TrainState, total: AccumulatedGradients) -> tuple[TrainState, dict[str, Array]]:
            return apply_gradients(state, total, optimizer, schedule, metrics, run_update=run_update)

        self._objective = trained_objective
        self._names = metrics
        self._parts: LossStats | None = None
        self._zeros = jax.jit(zeros, out_shardings=sums)
        options = compiler_options(shardings.num_updates.mesh, packed_rows=True)  # pyright: ignore[reportAttributeAccessIssue]
        self._add = jax.jit(add, donate_argnums=0, out_shardings=sums, compiler_options=options)
        self._apply = jax.jit(apply, donate_argnums=0, out_shardings=(shardings, None), compiler_options=options)

    def __call__(
        self, state: TrainState, micro_batches: Sequence[Any], temperature: Array, frozen: Params | None = None
    ) -> tuple[TrainState, dict[str, Array]]:
        return self._apply(state, self.accumulate(state.params, micro_batches, temperature, frozen))

    def accumulate(
        self, params: Params, micro_batches: Sequence[Any], temperature: Array, frozen: Params | None = None
    ) -> AccumulatedGradients:
        """Computes the gradient of the summed micro-batch losses, with one micro-batch's activations at a time."""
        self._stats_shapes(params, frozen, micro_batches[0], temperature)
        total = self._zeros(params)
        for batch in micro_batches:
            total = self._add(total, params, frozen, batch, temperature)
        return total

    def lower(
        self, state: TrainState, batch: Any, temperature: Array, frozen: Params | None = None
    ) -> dict[str, Lowered]:
        """Lowers both programs (gradients of a micro-batch, update); the arguments are shapes with shardings."""
        whole = state.num_updates.sharding
        parts = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole),
            self._stats_shapes(state.params, frozen, batch, temperature),
        )
        total = AccumulatedGradients(state.params, parts)
        return {
            "gradients": self._add.lower(total, state.params, frozen, batch, temperature),
            "optimizer": self._apply.lower(state, total),
        }

    def metric_names(self, params: Params, batch: Any, temperature: Array, frozen: Params | None = None) -> list[str]:
        """Returns the names of an update's metrics, without computing anything."""
        objective_metrics = jax.eval_shape(LossStats.metrics, self._stats_shapes(params, frozen, batch, temperature))
        return [*objective_metrics, *(f"{self._names.prefix}/{name}" for name in OPTIMIZER_METRICS)]

    def _stats_shapes(self, params: Params, frozen: Params | None, batch: Any, temperature: Array) -> LossStats:
        """Returns the shapes of the statistics, which are the same for every micro-batch."""
        parts = self._parts or jax.eval_shape(self._objective, params, frozen, batch, temperature)[1]
        self._parts = parts
        return parts


def apply_gradients(
    state: TrainState,
    total: AccumulatedGradients,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: optax.Schedule,
    names: MetricNames,
    *,
    run_update: RunUpdate = update_at_once,
) -> tuple[TrainState, dict[str, Array]]:
    """Returns the state after one update, and the step's metrics.

    If the loss or the gradient is not finite, weights and moments stay unchanged and the update counts as skipped.

    Args:
        run_update: `update_by_layer` if the moments are in host memory.
    """
    gradients, parts = total
    gradient_norm = optax.tree.norm(gradients)
    finite = jnp.isfinite(gradient_norm) & jnp.isfinite(parts.sums[names.loss])

    def update(params: Params, moments: Any, gradients: Params) -> tuple[Params, Any]:
        updates, new_moments = optimizer.update(gradients, moments, params, norm=gradient_norm)
        new = optax.apply_updates(params, updates), new_moments
        return jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, (params, moments))

    params, moments = run_update(update, state.params, state.optimizer, gradients)
    new_state = TrainState(
        params=params,
        optimizer=moments,
        num_updates=state.num_updates + finite,
        nonfinite_in_a_row=jnp.where(finite, 0, state.nonfinite_in_a_row + 1),
        nonfinite_total=state.nonfinite_total + ~finite,
    )
    learning_rate: Any = schedule(state.num_updates)
    measured = gradient_norm, learning_rate, new_state.nonfinite_total, new_state.nonfinite_in_a_row
    added = {f"{names.prefix}/{name}": value for name, value in zip(OPTIMIZER_METRICS, measured, strict=True)}
    broken = jnp.stack([~jnp.isfinite(optax.tree.norm(gradient)) for gradient in jax.tree.leaves(gradients)])
    return new_state, {**parts.metrics(), **added, BROKEN_GRADIENTS: broken}
