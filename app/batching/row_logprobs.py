"""Forward pass over packed rows that gives logprobs, for scoring, updates and the script of the tiny model."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32

from app.batching.token_batch import TokenBatch
from app.model.decoder import Decoder
from app.model.segment_layout import SegmentLayout
from app.model.token_logprobs import CompletionLogprobs, completion_logprobs


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
