"""What stands where in packed rows, who sees whom, and which blocks of a row have to meet for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from app.mesh.axis_rules import shard_map_by_dims

Window = Int32[Array, ""] | int | None
"""How many positions a token sees, its own included; None = all before it."""

HostOrDevice = Any
"""numpy, or an array of jax's."""

UNREACHABLE = 2**30
"""Farther than any window is wide: the distance of what is not seen at all."""


class SegmentLayout(NamedTuple):
    """Of each token of packed rows: the sample or samples it belongs to, and its place there.

    A segment's tokens follow one another: its prompt, then its completions. Positions count from the start of the
    prompt; each completion of a shared prompt continues from the prompt's last position.
    """

    segment_ids: Int32[HostOrDevice, "R T"]
    """1, 2, ... along a row; 0 is padding."""
    branch_ids: Int32[HostOrDevice, "R T"]
    """0 on a prompt, and on the completion of a prompt that has only that one; 1, 2, ... on the completions of a
    prompt that they share."""
    positions: Int32[HostOrDevice, "R T"]


def single_segment_layout(mask: Bool[HostOrDevice, "R T"]) -> SegmentLayout:
    """Rows of one sequence each, from the first token on; True where it has tokens."""
    segment_ids = jnp.asarray(mask, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(mask.shape[1], dtype=jnp.int32), mask.shape)
    return SegmentLayout(segment_ids, jnp.zeros_like(segment_ids), positions)


def attention_mask(
    queries: SegmentLayout,
    keys: SegmentLayout,
    offset: Int32[Array, "*R 1"] | int,
    window: Window,
) -> Bool[Array, "R T S"]:
    """Whether a query sees a key.

    It does if the key is of the same segment and no padding, stands no later in the row, belongs to the prompt or to
    the query's own branch, and less than `window` positions back.

    Args:
        offset: how much farther along the row the first query stands than the first key.
    """

    def pairwise(of_queries: Array, of_keys: Array) -> tuple[Array, Array]:
        return of_queries[..., :, None], of_keys[..., None, :]

    own, other = pairwise(queries.segment_ids, keys.segment_ids)
    own_branch, branch = pairwise(queries.branch_ids, keys.branch_ids)
    at, before = pairwise(jnp.arange(own.shape[-2]) + offset, jnp.arange(other.shape[-1]))
    seen = (own == other) & (own != 0) & (before <= at) & ((branch == 0) | (branch == own_branch))
    if window is None:
        return seen
    position, earlier = pairwise(queries.positions, keys.positions)
    return seen & (position - earlier < window)


class BlockPairs(NamedTuple):
    """Which blocks of queries meet which blocks of keys, as one list for all rows of a device.

    Blocks are numbered along the first row, then along the next. The list lies in the shape of the rows, so that
    it is split over devices as they are; it is read from the front, and its rest is never looked at.
    """

    query_block: Int32[Array, "R pairs"]
    key_block: Int32[Array, "R pairs"]
    distance: Int32[Array, "R pairs"]
    """Positions from the nearest visible key of the pair to its query. Pairs of the narrowest window come first."""


def block_pairs(layout: SegmentLayout, windows: Sequence[Window], size: int) -> BlockPairs:
    """The pairs of blocks of `size` tokens that hold at least one visible entry in a layer with any such window.

    T is a multiple of `size`. Relies on what `RowLayout` says of the order of a row; costs T * T / size.
    """
    rows = ("rows", "tokens")
    widths = [UNREACHABLE if window is None else window for window in windows]

    def of_rows(*layout: Array) -> tuple[Array, ...]:
        distance = _block_distances(SegmentLayout(*layout), size)
        num_rows, num_blocks, _ = distance.shape
        flat = distance.ravel()
        # Stable: inside of a class, pairs of the same queries stay together.
        needs = sum((flat >= width).astype(jnp.int32) for width in widths)
        # In a row with n blocks no more than n (n + 1) / 2 pairs are causal.
        order = jnp.argsort(needs, stable=True)[: num_rows * num_blocks * (num_blocks + 1) // 2]
        row, query_block, key_block = jnp.unravel_index(order, distance.shape)
        first = row * num_blocks
        pairs = first + query_block, first + key_block, flat[order]
        return tuple(x.astype(jnp.int32).reshape(num_rows, -1) for x in pairs)

    return BlockPairs(*shard_map_by_dims(of_rows, in_dims=(rows,) * 3, out_dims=(rows,) * 3)(*layout))


def _block_distances(layout: SegmentLayout, size: int) -> Int32[Array, "R blocks blocks"]:
    """Of each block of queries and block of keys: positions between the closest two that see each other, or UNSEEN.

    A run is a prompt or a completion: tokens of one segment and branch. They are numbered along the row, so the
    keys of a block are of runs `first` to `last`, and a query sees those of its own run and of its prompt's.
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
    to_own = at[:, None] - end
    sees_own = last == run[:, :, None]
    # The prompt goes on to the block's end, or it ended right before the first position of the query's own run.
    goes_on = last == prompt_run[:, :, None]
    to_prompt = jnp.where(
        goes_on, positions[:, :, None] - positions[:, None, size - 1 :: size], (at - run_start + 1)[:, :, None]
    )
    sees_prompt = (first <= prompt_run[:, :, None]) & (prompt_run[:, :, None] <= last)
    distance = jnp.where(sees_own, to_own, jnp.where(sees_prompt, to_prompt, UNREACHABLE))
    block = at // size
    blocks = at[::size] // size
    distance = jnp.where(block[:, None] == blocks, 0, distance)
    seen = (segment_ids != 0)[:, :, None] & (blocks <= block[:, None])
    distance = jnp.where(seen, distance, UNREACHABLE)
    return distance.reshape(num_rows, -1, size, num_tokens // size).min(axis=2)
