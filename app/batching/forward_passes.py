"""Forward passes over packed rows, for scoring and updates: logprobs of the policy, values of the critic."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from app.batching.token_batch import TokenBatch
from app.mesh.axis_rules import row_shard_size
from app.model.decoder import Decoder, ValueDecoder
from app.model.token_logprobs import hidden_before_targets, token_logprobs


class RowLogprobs(NamedTuple):
    """The results of a forward pass for the completion tokens of packed rows."""

    logprobs: Float32[Array, "R C"]
    entropies: Float32[Array, "R C"]
    """Entropy, in nats, of the policy's distribution over the vocabulary at each token."""
    routes: Int32[Array, "L R T k"] | None
    """The experts that the routers chose for all tokens; None for a model without experts."""


def row_logprobs(
    decoder: Decoder,
    rows: TokenBatch,
    *,
    temperature: Float32[Array, ""] | float,
    dtype: jnp.dtype,
    remat: str,
    logits_chunk: int,
    entropy_gradient: bool = False,
) -> RowLogprobs:
    """Returns the logprob and entropy of each completion token of packed rows; finite but undefined on padding.

    Only the hidden states at `logits_indices` (the position before each target) pass through the LM head. Recorded
    routes are replayed.

    Args:
        dtype: compute dtype.
        remat: what the backward pass recomputes; see `REMAT_POLICIES`.
        logits_chunk: number of tokens per device that pass through the LM head at once, at least one per row.
        entropy_gradient: whether entropies are differentiable.
    """
    hidden, routes = decoder.hidden_and_routes(
        rows.token_ids, rows.layout, recorded=rows.routes, dtype=dtype, remat=remat
    )
    scored = token_logprobs(
        hidden_before_targets(hidden, rows.logits_indices),
        decoder.head,
        rows.targets,
        rows.logits_indices >= 0,
        temperature=temperature,
        chunk=max(1, logits_chunk // row_shard_size(rows.targets.shape[0])),
        entropy_gradient=entropy_gradient,
    )
    return RowLogprobs(*scored, routes)


def critic_values(decoder: ValueDecoder, rows: TokenBatch, *, dtype: jnp.dtype, remat: str) -> Float32[Array, "R C"]:
    """Returns the value of the state before each target; finite but undefined on padding."""
    hidden = decoder.hidden(rows.token_ids, rows.layout, dtype=dtype, remat=remat)
    return decoder.values(hidden_before_targets(hidden, rows.logits_indices))
