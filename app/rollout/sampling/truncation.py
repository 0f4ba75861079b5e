"""Top-k, top-p and min-p: finds thresholds in a fixed number of passes, without sorting."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, Num

from app.mesh.axis_rules import current_device, shard_map_by_dims, spread_rows
from app.mesh.chips import kernel_bytes
from app.rollout.sampling.threshold_codes import lowest_code, value_of_code

MASS_UNIT = 2.0**-30
"""Probabilities are summed as integers in this unit, so that sums do not depend on the order of tokens."""
BITS_PER_PASS = {"cpu": 1}
"""Platform -> bits found per pass; 4 on other platforms, where reading a value takes as long as several comparisons."""


def kept_tokens(
    logits: Float32[Array, "B V"],
    probabilities: Float32[Array, "B V"],
    top_k: Int32[Array, ""],
    top_p: Float32[Array, ""],
    min_p: Float32[Array, ""],
) -> Bool[Array, "B V"]:
    """Returns a mask of the tokens that remain after top-k, then top-p of the remaining mass, then min-p.

    Among equal logits, smaller token ids come first. The most likely token is always kept.

    Sources: Fan et al. 2018 (top-k), Holtzman et al. 2020 (top-p), Nguyen et al. 2024 (min-p).

    Args:
        top_k: 0 keeps all tokens.
        top_p: 1 keeps all tokens.
        min_p: minimum probability of a token relative to the most likely token; 0 keeps all tokens.
    """
    num_rows, vocab_size = logits.shape
    units = jnp.round(probabilities / MASS_UNIT).astype(jnp.int32)

    def above(threshold: Array, weights: Array | int) -> Int32[Array, "B"]:
        return jnp.sum(jnp.where(logits > threshold[:, None], weights, 0), axis=-1)

    def mass_at(threshold: Array) -> Int32[Array, "B"]:
        """Returns the mass of a single token with this logit, in `MASS_UNIT`."""
        return jnp.max(jnp.where(logits == threshold[:, None], units, 0), axis=-1)

    count = jnp.where(top_k > 0, jnp.minimum(top_k, vocab_size), vocab_size)
    last_of_k = lowest_reached(logits, None, jnp.broadcast_to(count, num_rows))
    ties_of_k = count - above(last_of_k, 1)
    mass = above(last_of_k, units) + ties_of_k * mass_at(last_of_k)
    limit = jnp.where(top_p < 1, jnp.maximum(jnp.ceil(top_p * mass).astype(jnp.int32), 1), jnp.iinfo(jnp.int32).max)
    last_of_p = lowest_reached(logits, units, limit)
    ties_of_p = -(-(limit - above(last_of_p, units)) // jnp.maximum(mass_at(last_of_p), 1))

    # Both keep a prefix of the same order, so the stricter one decides, also among equal logits.
    last = jnp.maximum(last_of_k, last_of_p)
    num_ties = jnp.minimum(
        jnp.where(last_of_k == last, ties_of_k, vocab_size), jnp.where(last_of_p == last, ties_of_p, vocab_size)
    )
    ids_from_end = jnp.arange(vocab_size - 1, -1, -1, dtype=jnp.int32)
    tied = jnp.where(logits == last[:, None], ids_from_end, -1)
    last_tie = lowest_reached(tied, None, num_ties, num_bits=max(1, (vocab_size - 1).bit_length()))
    kept = (logits > last[:, None]) | (tied >= last_tie[:, None])
    return kept & (probabilities >= min_p * jnp.max(probabilities, axis=-1, keepdims=True))


def lowest_reached(
    values: Num[Array, "B V"], weights: Int32[Array, "B V"] | None, limits: Int32[Array, "B"], *, num_bits: int = 32
) -> Num[Array, "B"]:
    """Returns the lowest value of each row such that the weights of all greater values sum to less than the limit.

    If all weights together are below the limit, this is the lowest representable number. Each device searches its own
    rows, over the whole vocabulary, bit by bit.

    Source: radix select, Alabi et al. 2012, "Fast k-selection algorithms for graphics processing units".

    Args:
        values: float32, or integers below 2^num_bits; negative integers are ignored.
        weights: non-negative, with a sum below 2^31 per row; None = 1 each.
        limits: at least 1.
    """
    platform, kind = current_device()
    search = functools.partial(_search, num_bits=num_bits, bits_per_pass=BITS_PER_PASS.get(platform, 4))
    if platform == "tpu":
        # Pallas is slow to import and not needed elsewhere.
        from app.rollout.sampling import threshold_kernel

        available = kernel_bytes(kind)
        if threshold_kernel.num_buffers(values.shape[1], available):
            search = functools.partial(threshold_kernel.search, num_bits=num_bits, available_bytes=available)
    dims = spread_rows(len(values)), "tokens"
    in_dims = (dims, None if weights is None else dims, dims[:1])
    by_device = shard_map_by_dims(lambda *rows: (search(*rows),), in_dims=in_dims, out_dims=(dims[:1],))
    return value_of_code(by_device(values, weights, limits)[0], values.dtype)


def _search(
    values: Num[Array, "B V"],
    weights: Int32[Array, "B V"] | None,
    limits: Int32[Array, "B"],
    *,
    num_bits: int,
    bits_per_pass: int,
) -> Int32[Array, "B"]:
    num_passes = -(-num_bits // bits_per_pass)

    def add_digit(number: Array, found: Array) -> Array:
        shift = bits_per_pass * (num_passes - 1 - number)
        # A digit is too low if the weight above the greatest value with this digit reaches the limit.
        digit = jnp.zeros_like(found)
        for higher in range(1, 2**bits_per_pass):
            greatest = value_of_code(found + (jnp.int32(higher) << shift) - 1, values.dtype)
            is_above = values > greatest[:, None]
            digit += jnp.sum(jnp.where(is_above, 1 if weights is None else weights, 0), axis=-1) >= limits
        return found + (digit << shift)

    return jax.lax.fori_loop(0, num_passes, add_digit, jnp.full_like(limits, lowest_code(values.dtype)))
