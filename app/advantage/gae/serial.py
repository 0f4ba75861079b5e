"""Serial solution of the recurrence, one time step after another: simple and slow."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from app.advantage.gae.recurrence import GaeOutput, RecurrenceTerms

CompensatedSum = tuple[Array, Array]
"""A sum and its rounding error."""


def solve_serial(terms: RecurrenceTerms) -> GaeOutput:
    """Solves A_t = delta_t + A_{t+1} - leak_t A_{t+1} from the last step to the first, with compensated sums.

    Over 131,072 steps without a leak, a plain float32 sum would be off by 1e-3.
    """
    deltas = terms.deltas

    def step(after: CompensatedSum, one: tuple[Array, Array]) -> tuple[CompensatedSum, Array]:
        (total, error), (own, leak) = after, one
        kept, lost_error = _two_sum(total, -leak * total)
        total, own_error = _two_sum(kept, own)
        error = (error - leak * error) + (lost_error + own_error)
        return (total, error), total + error

    zeros = jnp.zeros(deltas.shape[0], jnp.float32)
    leaks = jnp.broadcast_to(terms.one_minus_decay, deltas.shape)
    _, advantages = jax.lax.scan(step, (zeros, zeros), (deltas.T, leaks.T), reverse=True)
    return terms.to_output(advantages.T)


def _two_sum(a: Array, b: Array) -> CompensatedSum:
    """Returns a + b and its error. Source: Knuth 1969, "The Art of Computer Programming" vol. 2, section 4.2.2."""
    total = a + b
    added = total - a
    return total, (a - (total - added)) + (b - added)
