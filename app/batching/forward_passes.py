"""Forward passes over packed rows, for scoring and updates: logprobs of the policy, values of the critic."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32

from app.batching.token_batch import TokenBatch
from app.model.decoder import Decoder, ValueDecoder
from app.model.segment_layout import SegmentLayout
from app.model.token_logprobs import CompletionLogprobs, completion_logprobs, hidden_before_targets


def row_logprobs(
    decoder: Decoder,
    rows: TokenBatch,
    *,
    temperature: Float32[Array, ""] | float,
    dtype: jnp.dtype,
    remat: str,
    logits_chunk: int,
    entropy_gradient: bool = False,
) -> CompletionLogprobs:
    """Returns the logprob and entropy of each target of a micro-batch; undefined on padding."""
    return completion_logprobs(
        decoder,
        token_ids=rows.token_ids,
        layout=SegmentLayout(rows.segment_ids, rows.branch_ids, rows.positions),
        logits_indices=rows.logits_indices,
        targets=rows.targets,
        target_mask=rows.logits_indices >= 0,
        recorded=rows.routes,
        temperature=temperature,
        dtype=dtype,
        remat=remat,
        logits_chunk=logits_chunk,
        entropy_gradient=entropy_gradient,
    )


def critic_values(decoder: ValueDecoder, rows: TokenBatch, *, dtype: jnp.dtype, remat: str) -> Float32[Array, "R C"]:
    """Returns the value of the state before each target; finite but undefined on padding."""
    layout = SegmentLayout(rows.segment_ids, rows.branch_ids, rows.positions)
    hidden = decoder.hidden(rows.token_ids, layout, dtype=dtype, remat=remat)
    return decoder.values(hidden_before_targets(hidden, rows.logits_indices))
