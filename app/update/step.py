"""One optimizer step: gradients summed over micro-batches, one guarded AdamW update, one program."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from app.update.objective import LossParts, Objective, UpdateBatch
from app.update.optimizer import TrainState

UpdateStep = Callable[[TrainState, UpdateBatch, Array], tuple[TrainState, dict[str, Array]]]


def make_update_step(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    shardings: TrainState,
) -> UpdateStep:
    """(state, micro-batches, temperature) -> (new state, metrics). The old state's memory is reused.

    A step whose loss or gradient is not finite changes no weight and no moment; it is counted.
    """

    def step(state: TrainState, batch: UpdateBatch, temperature: Array) -> tuple[TrainState, dict[str, Array]]:
        gradients, parts = accumulate(objective, state, batch, temperature)
        gradient_norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(gradient_norm) & jnp.isfinite(parts.sums["loss"])
        updates, moments = optimizer.update(gradients, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        rate = schedule(state.num_updates)

        def guarded(new: Array, old: Array) -> Array:
            return jnp.where(finite, new, old)

        new_state = TrainState(
            params=jax.tree.map(guarded, params, state.params),
            optimizer=jax.tree.map(guarded, moments, state.optimizer),
            num_updates=state.num_updates + finite,
            nonfinite_in_a_row=jnp.where(finite, 0, state.nonfinite_in_a_row + 1),
            nonfinite_total=state.nonfinite_total + ~finite,
        )
        metrics = {
            **parts.sums,
            **parts.maxima,
            "policy/grad_norm": gradient_norm,
            "policy/learning_rate": rate,
            "policy/nonfinite_updates": new_state.nonfinite_total,
            "policy/nonfinite_in_a_row": new_state.nonfinite_in_a_row,
        }
        return new_state, metrics

    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


def accumulate(
    objective: Objective, state: TrainState, batch: UpdateBatch, temperature: Array
) -> tuple[dict, LossParts]:
    """Gradient of the sum of all micro-batch losses, in float32, one micro-batch in memory at a time."""
    gradient = jax.value_and_grad(objective, has_aux=True)

    def add(total: tuple[dict, LossParts], micro_batch: UpdateBatch) -> tuple[tuple[dict, LossParts], None]:
        (_, parts), gradients = gradient(state.params, micro_batch, temperature)
        return (jax.tree.map(jnp.add, total[0], gradients), total[1] + parts), None

    first = jax.tree.map(lambda x: x[0], batch)
    shapes = jax.eval_shape(objective, state.params, first, temperature)[1]
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), (state.params, shapes))
    (gradients, parts), _ = jax.lax.scan(add, zeros, batch)
    return gradients, parts
