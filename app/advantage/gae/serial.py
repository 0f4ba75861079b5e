"""The recurrence as it is written: one step of time after another. The readable truth, and slow."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from app.advantage.gae.terms import Credit, Terms


def serial(terms: Terms) -> Credit:
    """A_t = delta_t + decay_t * A_{t+1}, from the last step to the first.

    The rounding error of every sum is carried along beside it: over 131,072 steps without decay a plain float32 sum
    would be off by 1e-3. Source of the error term: Knuth 1969, TAOCP vol. 2, section 4.2.2.
    """
    deltas = terms.deltas
    decays = jnp.broadcast_to(terms.decays, deltas.shape)

    def step(after: tuple[Array, Array], one: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
        (advantage, error), (delta, decay) = after, one
        carried = decay * advantage
        total = carried + delta
        added = total - carried
        error = decay * error + ((carried - (total - added)) + (delta - added))
        return (total, error), total + error

    nothing = jnp.zeros(deltas.shape[0], jnp.float32)
    _, advantages = jax.lax.scan(step, (nothing, nothing), (deltas.T, decays.T), reverse=True)
    return terms.credit(advantages.T)
