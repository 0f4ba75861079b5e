"""Chunk scan: all chunks of time at once, then the same scan over what they hand on.

A chunk of C steps knows its own part of every advantage; what is missing is one number, the advantage right behind
it, times the decay from there. Those numbers obey the same recurrence with one step a chunk, so they are found the same
way: 131,072 steps in chunks of 128 are three levels, with no loop over the thousand chunks.

Source: the chunked form of linear attention, applied to GAE in THUDM/slime.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from app.advantage.gae.terms import Credit, Terms

CHUNK_SIZE = 128


def chunked(terms: Terms, *, chunk_size: int = CHUNK_SIZE) -> Credit:
    """The advantages by chunks of any size: small matrix products for one decay, a scan of log depth for many.

    Memory per row: O(T + C^2) for one decay, O(T) for a decay of each token.
    """
    solve = solve_one_decay if terms.decays.ndim == 0 else solve_many_decays
    return terms.credit(solve(terms.deltas, terms.decays, chunk_size=chunk_size))


def solve_one_decay(
    inputs: Float32[Array, "B T"], decay: Float32[Array, ""], *, chunk_size: int
) -> Float32[Array, "B T"]:
    """A_t = inputs_t + decay * A_{t+1}; [C, C] products of full float32 precision, whatever the device prefers."""
    num_tokens = inputs.shape[1]
    size = max(1, min(chunk_size, num_tokens))
    if chunk_size == 1 and num_tokens > 1:
        # A chunk of one step hands on all that it has: there would be no level above with fewer.
        return solve_many_decays(inputs, jnp.broadcast_to(decay, inputs.shape), chunk_size=chunk_size)
    chunks = _in_chunks(inputs, size)
    powers = powers_of(decay, size + 1)
    apart = jnp.arange(size)[:, None] - jnp.arange(size)[None, :]
    kernel = jnp.where(apart >= 0, powers[jnp.maximum(apart, 0)], 0.0)
    own = jnp.einsum("bnj,ji->bni", chunks, kernel, precision=jax.lax.Precision.HIGHEST)
    if chunks.shape[1] > 1:
        handed_on = solve_one_decay(own[:, :, 0], powers[size], chunk_size=chunk_size)
        own = own + _behind(handed_on)[:, :, None] * powers[size - jnp.arange(size)]
    return own.reshape(inputs.shape[0], own.shape[1] * size)[:, :num_tokens]


def solve_many_decays(
    inputs: Float32[Array, "B T"], decays: Float32[Array, "B T"], *, chunk_size: int
) -> Float32[Array, "B T"]:
    """A_t = inputs_t + decays_t * A_{t+1}, by (decay, input) pairs, which combine in any order.

    Source: Blelloch 1990, "Prefix Sums and Their Applications", section 1.4.
    """
    num_tokens = inputs.shape[1]
    if num_tokens == 0:
        return inputs
    # A level of chunks of one step would be as long as the one below it.
    size = min(max(chunk_size, 2), num_tokens)
    decays, own = jax.lax.associative_scan(
        _behind_pair, (_in_chunks(decays, size), _in_chunks(inputs, size)), reverse=True, axis=2
    )
    if own.shape[1] > 1:
        handed_on = solve_many_decays(own[:, :, 0], decays[:, :, 0], chunk_size=chunk_size)
        own = own + _behind(handed_on)[:, :, None] * decays
    return own.reshape(inputs.shape[0], own.shape[1] * size)[:, :num_tokens]


def _behind_pair(after: tuple[Array, Array], before: tuple[Array, Array]) -> tuple[Array, Array]:
    """One step made of two: x -> input_before + decay_before * (input_after + decay_after * x)."""
    return before[0] * after[0], before[1] + before[0] * after[1]


def _in_chunks(x: Float32[Array, "B T"], size: int) -> Float32[Array, "B chunks C"]:
    """Filled up behind the end with zeros, which hand nothing on."""
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)))
    return padded.reshape(x.shape[0], padded.shape[1] // size, size)


def _behind(handed_on: Float32[Array, "B chunks"]) -> Float32[Array, "B chunks"]:
    """What each chunk gets from the next one; 0 for the last."""
    return jnp.pad(handed_on[:, 1:], ((0, 0), (0, 1)))


def powers_of(base: Float32[Array, ""], count: int) -> Float32[Array, "count"]:
    """base^0, base^1, ...: products alone, so that 0 and 1 are exact."""
    return jnp.concatenate([jnp.ones(1, jnp.float32), jnp.cumprod(jnp.broadcast_to(base, count - 1))])
