"""Packed rows -> values: the forward pass of networks that give one number per token."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32

from app.batching.pack import TokenBatch
from app.policy.decoder import ValueDecoder
from app.policy.row_layout import RowLayout


def row_values(decoder: ValueDecoder, rows: TokenBatch, *, dtype: jnp.dtype, remat: str) -> Float32[Array, "R C"]:
    """The value at the token before each target, where its logprob is read, too; rubbish on padding."""
    layout = RowLayout(rows.segment_ids, rows.branch_ids, rows.positions)
    values = decoder.values(decoder.hidden(rows.token_ids, layout, dtype=dtype, remat=remat))
    return jnp.take_along_axis(values, jnp.maximum(rows.score_index, 0), axis=1)
