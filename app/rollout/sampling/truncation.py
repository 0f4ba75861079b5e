"""Which tokens top-k, top-p and min-p keep: thresholds are searched in a fixed number of passes, nothing is sorted."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from app.rollout.sampling.threshold_search import lowest_reached

MASS_UNIT = 2.0**-30
"""Probabilities are added up as integers of this unit: their sums do not depend on the order of the tokens."""


def kept_tokens(
    logits: Float32[Array, "B V"],
    probabilities: Float32[Array, "B V"],
    top_k: Int32[Array, ""],
    top_p: Float32[Array, ""],
    min_p: Float32[Array, ""],
) -> Bool[Array, "B V"]:
    """Returns the tokens that remain after top-k, then top-p of the remaining mass, then min-p.

    Of equal logits, those with the smaller token id come first. The likeliest token is always kept.

    Sources: Fan et al. 2018 (top-k), Holtzman et al. 2020 (top-p), Nguyen et al. 2024 (min-p).

    Args:
        top_k: 0 keeps all tokens.
        top_p: 1 keeps all tokens.
    """
    num_rows, vocab_size = logits.shape
    units = jnp.round(probabilities / MASS_UNIT).astype(jnp.int32)

    def above(threshold: Array, weights: Array | int) -> Int32[Array, "B"]:
        return jnp.sum(jnp.where(logits > threshold[:, None], weights, 0), axis=-1)

    def mass_at(threshold: Array) -> Int32[Array, "B"]:
        """Returns the mass of one token with this logit."""
        return jnp.max(jnp.where(logits == threshold[:, None], units, 0), axis=-1)

    count = jnp.where(top_k > 0, jnp.minimum(top_k, vocab_size), vocab_size)
    last_of_k = lowest_reached(logits, None, jnp.broadcast_to(count, num_rows))
    ties_of_k = count - above(last_of_k, 1)
    mass = above(last_of_k, units) + ties_of_k * mass_at(last_of_k)
    limit = jnp.where(top_p < 1, jnp.maximum(jnp.ceil(top_p * mass).astype(jnp.int32), 1), jnp.iinfo(jnp.int32).max)
    last_of_p = lowest_reached(logits, units, limit)
    ties_of_p = -(-(limit - above(last_of_p, units)) // jnp.maximum(mass_at(last_of_p), 1))

    # Both keep the first tokens of one order, so the stricter of them decides, also among tokens with equal logits.
    last = jnp.maximum(last_of_k, last_of_p)
    num_ties = jnp.minimum(
        jnp.where(last_of_k == last, ties_of_k, vocab_size), jnp.where(last_of_p == last, ties_of_p, vocab_size)
    )
    ids_from_end = jnp.arange(vocab_size - 1, -1, -1, dtype=jnp.int32)
    tied = jnp.where(logits == last[:, None], ids_from_end, -1)
    last_tie = lowest_reached(tied, None, num_ties, num_bits=max(1, (vocab_size - 1).bit_length()))
    kept = (logits > last[:, None]) | (tied >= last_tie[:, None])
    return kept & (probabilities >= min_p * jnp.max(probabilities, axis=-1, keepdims=True))
