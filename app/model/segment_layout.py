"""The layout of packed rows and their attention mask."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

Window = Int32[Array, ""] | int | None
"""The number of visible positions, including the position of the query; None = unlimited."""

HostOrDevice = Any
"""A numpy or JAX array."""


class SegmentLayout(NamedTuple):
    """The segment, branch and position of each token of packed rows.

    The tokens of a segment are contiguous: its prompt, then its completions. Positions count from the start of the
    prompt; each completion of a shared prompt continues from the prompt's last position.
    """

    segment_ids: Int32[HostOrDevice, "R T"]
    """Numbers the segments of a row 1, 2, ...; 0 is padding."""
    branch_ids: Int32[HostOrDevice, "R T"]
    """Numbers the completions of a shared prompt 1, 2, ...; 0 on prompts and on completions of unshared prompts."""
    positions: Int32[HostOrDevice, "R T"]


def single_segment_layout(mask: Bool[HostOrDevice, "R T"]) -> SegmentLayout:
    """Returns the layout of rows that contain one right-padded sequence each.

    Args:
        mask: True where the row has a token.
    """
    segment_ids = jnp.asarray(mask, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(mask.shape[1], dtype=jnp.int32), mask.shape)
    return SegmentLayout(segment_ids, jnp.zeros_like(segment_ids), positions)


def attention_mask(
    queries: SegmentLayout,
    keys: SegmentLayout,
    offset: Int32[Array, "*R 1"] | int,
    window: Window,
) -> Bool[Array, "R T S"]:
    """Returns whether each query sees each key.

    A query sees a key if the key is in the same segment, is not padding, is not later in the row, belongs to the prompt
    or to the query's branch, and is less than `window` positions before the query.

    Args:
        offset: index in the row of the first query, minus index of the first key.
    """

    def pairwise(query_values: Array, key_values: Array) -> tuple[Array, Array]:
        return query_values[..., :, None], key_values[..., None, :]

    query_segment, key_segment = pairwise(queries.segment_ids, keys.segment_ids)
    query_branch, key_branch = pairwise(queries.branch_ids, keys.branch_ids)
    query_index, key_index = pairwise(jnp.arange(query_segment.shape[-2]) + offset, jnp.arange(key_segment.shape[-1]))
    visible = (query_segment == key_segment) & (query_segment != 0) & (key_index <= query_index)
    visible &= (key_branch == 0) | (key_branch == query_branch)
    if window is None:
        return visible
    query_position, key_position = pairwise(queries.positions, keys.positions)
    return visible & (query_position - key_position < window)
