"""Forward pass of the critic over packed rows, used in scoring and in the critic's update."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32

from app.batching.token_batch import TokenBatch
from app.model.decoder import ValueDecoder
from app.model.segment_layout import SegmentLayout
from app.model.token_logprobs import hidden_before_targets


def critic_values(decoder: ValueDecoder, rows: TokenBatch, *, dtype: jnp.dtype, remat: str) -> Float32[Array, "R C"]:
    """Returns the value of the state before each target; finite but undefined on padding."""
    layout = SegmentLayout(rows.segment_ids, rows.branch_ids, rows.positions)
    hidden = decoder.hidden(rows.token_ids, layout, dtype=dtype, remat=remat)
    return decoder.values(hidden_before_targets(hidden, rows.logits_indices))
