"""Chunk scan: solves all chunks of time steps at once, then scans over their carries in the same way.

The carry of a chunk is the first advantage of the next chunk. An advantage in the chunk is a local part plus the carry,
which decays with each step in between. The carries obey the same recurrence with one step per chunk, so they are solved
recursively: 131,072 steps in chunks of 128 take three levels, without a loop over the thousand chunks.

Source: the chunked form of linear attention, applied to GAE in THUDM/slime.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from app.advantage.gae.recurrence import MASK_MODES, Discounts, GaeRows, TokenAdvantages

CHUNK_SIZE = 128


@partial(jax.jit, static_argnums=(2, 3))
def solve_chunked(rows: GaeRows, discounts: Discounts, mask_mode: str, chunk_size: int) -> TokenAdvantages:
    """Computes GAE in chunks: with matmuls if the decay is constant, otherwise with an associative scan.

    Memory per row: O(T + C^2) for a constant decay, O(T) for one decay per token.
    """
    terms = MASK_MODES[mask_mode](rows, discounts)
    if terms.one_minus_decay.ndim == 0:
        advantages = solve_constant_decay(terms.deltas, jnp.log1p(-terms.one_minus_decay), chunk_size=chunk_size)
    else:
        advantages = solve_variable_decay(terms.deltas, terms.one_minus_decay, chunk_size=chunk_size)
    results = advantages, advantages + terms.values
    return TokenAdvantages(*(x if rows.mask is None else jnp.where(rows.mask, x, 0.0) for x in results))


def solve_constant_decay(
    inputs: Float32[Array, "B T"], log_decay: Float32[Array, ""], *, chunk_size: int
) -> Float32[Array, "B T"]:
    """Solves A_t = inputs_t + decay * A_{t+1} with [C, C] matmuls in float32, without reduced precision.

    Args:
        log_decay: log of the decay, in [-inf, 0].
    """
    num_tokens = inputs.shape[1]
    size = max(1, min(chunk_size, num_tokens))
    if chunk_size == 1 and num_tokens > 1:
        # With one step per chunk, the next level would have just as many steps.
        return solve_variable_decay(
            inputs, jnp.broadcast_to(-jnp.expm1(log_decay), inputs.shape), chunk_size=chunk_size
        )
    chunks = _split_into_chunks(inputs, size)
    powers = decay_powers(log_decay, size + 1)
    apart = jnp.arange(size)[:, None] - jnp.arange(size)[None, :]
    kernel = jnp.where(apart >= 0, powers[jnp.maximum(apart, 0)], 0.0)
    own = jnp.einsum("bnj,ji->bni", chunks, kernel, precision=jax.lax.Precision.HIGHEST)
    if chunks.shape[1] > 1:
        handed_on = solve_constant_decay(own[:, :, 0], size * log_decay, chunk_size=chunk_size)
        own = own + _carry_from_next_chunk(handed_on)[:, :, None] * powers[size - jnp.arange(size)]
    return own.reshape(inputs.shape[0], own.shape[1] * size)[:, :num_tokens]


def solve_variable_decay(
    inputs: Float32[Array, "B T"], one_minus_decay: Float32[Array, "B T"], *, chunk_size: int
) -> Float32[Array, "B T"]:
    """Solves A_t = inputs_t + (1 - leak_t) * A_{t+1}, with leak = `one_minus_decay`, by an associative scan.

    Source: Blelloch 1990, "Prefix Sums and Their Applications", section 1.4.
    """
    num_tokens = inputs.shape[1]
    if num_tokens == 0:
        return inputs
    # With one step per chunk, the next level would have just as many steps.
    size = min(max(chunk_size, 2), num_tokens)
    one_minus_decay, own = jax.lax.associative_scan(
        _combine_steps,
        (_split_into_chunks(one_minus_decay, size), _split_into_chunks(inputs, size)),
        reverse=True,
        axis=2,
    )
    if own.shape[1] > 1:
        behind = _carry_from_next_chunk(
            solve_variable_decay(own[:, :, 0], one_minus_decay[:, :, 0], chunk_size=chunk_size)
        )[:, :, None]
        own = own + (behind - one_minus_decay * behind)
    return own.reshape(inputs.shape[0], own.shape[1] * size)[:, :num_tokens]


def _combine_steps(after: tuple[Array, Array], before: tuple[Array, Array]) -> tuple[Array, Array]:
    """Combines two consecutive steps into one and returns its leak and its input."""
    (leak_after, own_after), (leak_before, own_before) = after, before
    return leak_before + leak_after * (1 - leak_before), own_before + (own_after - leak_before * own_after)


def _split_into_chunks(x: Float32[Array, "B T"], size: int) -> Float32[Array, "B chunks C"]:
    """Splits rows into chunks; zeros pad the last chunk and contribute nothing."""
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)))
    return padded.reshape(x.shape[0], padded.shape[1] // size, size)


def _carry_from_next_chunk(chunk_advantages: Float32[Array, "B chunks"]) -> Float32[Array, "B chunks"]:
    """Returns the carry that each chunk receives from the next one; 0 for the last chunk."""
    return jnp.pad(chunk_advantages[:, 1:], ((0, 0), (0, 1)))


def decay_powers(log_decay: Float32[Array, ""], count: int) -> Float32[Array, "count"]:
    """Returns decay^0, decay^1, ...; exactly 1, 0, 0, ... for decay 0 and all 1 for decay 1."""
    exponents = jnp.arange(count)
    # -inf * 0 is NaN.
    return jnp.where(exponents == 0, 1.0, jnp.exp(jnp.maximum(exponents, 1) * log_decay))
