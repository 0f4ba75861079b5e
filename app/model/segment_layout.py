"""The layout of packed rows, their attention mask, and the pairs of blocks with visible entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from app.mesh.axis_rules import shard_map_by_dims

Window = Int32[Array, ""] | int | None
"""The number of visible positions, the query's included; None = all before it."""

HostOrDevice = Any
"""A numpy or JAX array."""

UNREACHABLE = 2**30
"""The distance of keys that are not visible; larger than any window."""


class SegmentLayout(NamedTuple):
    """The segment, branch and position of each token of packed rows.

    The tokens of a segment are contiguous: its prompt, then its completions. Positions count from the start of the
    prompt; each completion of a shared prompt continues from the prompt's last position.
    """

    segment_ids: Int32[HostOrDevice, "R T"]
    """1, 2, ... along a row; 0 is padding."""
    branch_ids: Int32[HostOrDevice, "R T"]
    """0 on prompts and on the completion of an unshared prompt; 1, 2, ... on the completions of a shared prompt."""
    positions: Int32[HostOrDevice, "R T"]


def single_segment_layout(mask: Bool[HostOrDevice, "R T"]) -> SegmentLayout:
    """Returns the layout of rows with one sequence each, which starts at the first token.

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

    It does if the key is in the same segment, is not padding, is not later in the row, belongs to the prompt or to the
    query's branch, and is less than `window` positions before the query.

    Args:
        offset: the index of the first query in the row, minus that of the first key.
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


class BlockPairs(NamedTuple):
    """The pairs of query and key blocks with visible entries, as one list for all rows of a device.

    Blocks are numbered along the first row, then along the next. The list has the shape of the rows, so that it is
    split over devices like them. It is read from the front, and its rest is never read.
    """

    query_block: Int32[Array, "R pairs"]
    key_block: Int32[Array, "R pairs"]
    distance: Int32[Array, "R pairs"]
    """Positions from the nearest visible key of the pair to its query. Pairs inside the narrowest window come first."""


def block_pairs(layout: SegmentLayout, windows: Sequence[Window], size: int) -> BlockPairs:
    """Returns the pairs of blocks of `size` tokens with a visible entry in a layer with any of these windows.

    T is a multiple of `size`. Relies on the token order of `SegmentLayout`; costs T * T / size.
    """
    rows = ("rows", "tokens")
    widths = [UNREACHABLE if window is None else window for window in windows]

    def find_pairs(*layout: Array) -> tuple[Array, ...]:
        distance = _block_distances(SegmentLayout(*layout), size)
        num_rows, num_blocks, _ = distance.shape
        flat = distance.ravel()
        # Stable, so that pairs of the same query block stay together.
        needs = sum((flat >= width).astype(jnp.int32) for width in widths)
        # A row of n blocks has at most n (n + 1) / 2 causal pairs.
        order = jnp.argsort(needs, stable=True)[: num_rows * num_blocks * (num_blocks + 1) // 2]
        row, query_block, key_block = jnp.unravel_index(order, distance.shape)
        first = row * num_blocks
        pairs = first + query_block, first + key_block, flat[order]
        return tuple(x.astype(jnp.int32).reshape(num_rows, -1) for x in pairs)

    return BlockPairs(*shard_map_by_dims(find_pairs, in_dims=(rows,) * 3, out_dims=(rows,) * 3)(*layout))


def _block_distances(layout: SegmentLayout, size: int) -> Int32[Array, "R blocks blocks"]:
    """Returns the smallest distance of a query to a visible key, for each pair of blocks; UNREACHABLE if there is none.

    A run is a prompt or a completion: the tokens of one segment and branch. Runs are numbered along the row, so the
    keys of a block are in runs `first` to `last`. A query sees its own run and that of its prompt.
    """
    segment_ids, branch_ids, positions = layout
    num_rows, num_tokens = segment_ids.shape
    at = jnp.arange(num_tokens, dtype=jnp.int32)
    starts_segment = jnp.diff(segment_ids, axis=1, prepend=-1) != 0
    starts_run = starts_segment | (jnp.diff(branch_ids, axis=1, prepend=-1) != 0)
    run = jnp.cumsum(starts_run, axis=1, dtype=jnp.int32)
    prompt_run = jax.lax.cummax(jnp.where(starts_segment, run, 0), axis=1)
    run_start = jax.lax.cummax(jnp.where(starts_run, at, 0), axis=1)

    first, last = run[:, None, ::size], run[:, None, size - 1 :: size]
    end = at[size - 1 :: size]
    distance_to_run = at[:, None] - end
    sees_own_run = last == run[:, :, None]
    # The prompt continues to the block's end, or it ends right before the first position of the query's run.
    continues = last == prompt_run[:, :, None]
    to_prompt = jnp.where(
        continues, positions[:, :, None] - positions[:, None, size - 1 :: size], (at - run_start + 1)[:, :, None]
    )
    sees_prompt = (first <= prompt_run[:, :, None]) & (prompt_run[:, :, None] <= last)
    distance = jnp.where(sees_own_run, distance_to_run, jnp.where(sees_prompt, to_prompt, UNREACHABLE))
    block = at // size
    blocks = at[::size] // size
    distance = jnp.where(block[:, None] == blocks, 0, distance)
    seen = (segment_ids != 0)[:, :, None] & (blocks <= block[:, None])
    distance = jnp.where(seen, distance, UNREACHABLE)
    return distance.reshape(num_rows, -1, size, num_tokens // size).min(axis=2)
