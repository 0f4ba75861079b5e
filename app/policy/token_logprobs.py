"""Hidden states -> logprobs and entropies of chosen tokens, without ever holding [tokens, vocab]."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from app.mesh.axis_rules import constrain
from app.policy.decoder import Decoder, Head


def scaled_logits(
    hidden: Float[Array, "*rows D"], head: Head, temperature: Float32[Array, ""] | float
) -> Float32[Array, "*rows V"]:
    """The head's logits / temperature, in float32: the one definition that sampler and scorer share."""
    return head.logits(hidden) / temperature


Entropy = Callable[[Array], Array]
"""log_softmax over the last dim -> entropy in nats."""


def entropy(log_softmax: Float32[Array, "*rows V"]) -> Float32[Array, "*rows"]:
    """-sum(p log p)."""
    # Not log_normalizer - sum(p * logits): that loses digits with the square of the logits.
    return -jnp.sum(jnp.exp(log_softmax) * log_softmax, axis=-1)


def measured_entropy(log_softmax: Float32[Array, "*rows V"]) -> Float32[Array, "*rows"]:
    """`entropy` as a measurement: without a gradient, so that the backward pass holds nothing for it."""
    return entropy(jax.lax.stop_gradient(log_softmax))


def token_logprobs(
    hidden: Float[Array, "R C D"],
    head: Head,
    targets: Int32[Array, "R C"],
    *,
    temperature: Float32[Array, ""] | float,
    chunk: int,
    entropy_of: Entropy = measured_entropy,
) -> tuple[Float32[Array, "R C"], Float32[Array, "R C"]]:
    """Natural logprob of each target, and the entropy in nats of the distribution it was drawn from.

    log_softmax(logits / temperature)[target] over the whole vocabulary. `chunk` tokens of
    every row pass the head at once, forward and backward; the result does not depend on it.
    """

    @jax.checkpoint
    def of_chunk(hidden: Array, targets: Array) -> tuple[Array, Array]:
        logits = constrain(scaled_logits(hidden, head, temperature), "rows", "tokens", "vocab")
        log_normalizer = jax.nn.logsumexp(logits, axis=-1)
        # A comparison instead of a gather: it stays local where the vocabulary is split over tp.
        chosen = jnp.arange(logits.shape[-1]) == targets[..., None]
        target_logits = jnp.sum(jnp.where(chosen, logits, 0.0), axis=-1)
        return target_logits - log_normalizer, entropy_of(logits - log_normalizer[..., None])

    num_tokens = targets.shape[1]
    if num_tokens <= chunk:
        return of_chunk(hidden, targets)
    padding = -num_tokens % chunk
    hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, padding)))
    by_chunk = (
        jnp.moveaxis(hidden.reshape(hidden.shape[0], -1, chunk, hidden.shape[2]), 1, 0),
        jnp.moveaxis(targets.reshape(targets.shape[0], -1, chunk), 1, 0),
    )
    logprobs, entropies = jax.lax.map(lambda pair: of_chunk(*pair), by_chunk)
    rows = targets.shape[0]
    return (
        jnp.moveaxis(logprobs, 0, 1).reshape(rows, -1)[:, :num_tokens],
        jnp.moveaxis(entropies, 0, 1).reshape(rows, -1)[:, :num_tokens],
    )


def completion_logprobs(
    decoder: Decoder,
    *,
    token_ids: Int32[Array, "R T"],
    positions: Int32[Array, "R T"],
    segment_ids: Int32[Array, "R T"],
    score_index: Int32[Array, "R C"],
    targets: Int32[Array, "R C"],
    temperature: Float32[Array, ""] | float,
    dtype: jnp.dtype,
    remat: str,
    logits_chunk: int,
    entropy_of: Entropy = measured_entropy,
) -> tuple[Float32[Array, "R C"], Float32[Array, "R C"]]:
    """Logprob and entropy of each completion token of packed rows: one forward pass for every role.

    Only the hidden states at `score_index` (the position before each target) meet the LM head.
    Entries whose target is padding hold finite rubbish; callers mask them.
    """
    hidden = decoder.hidden(token_ids, positions, segment_ids, dtype=dtype, remat=remat)
    at_targets = jnp.take_along_axis(hidden, score_index[:, :, None], axis=1)
    return token_logprobs(
        at_targets, decoder.head, targets, temperature=temperature, chunk=logits_chunk, entropy_of=entropy_of
    )
