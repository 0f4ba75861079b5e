"""The pairs of query and key blocks with visible entries, for attention that skips all other blocks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from app.mesh.axis_rules import shard_map_by_dims
from app.model.segment_layout import SegmentLayout, Window

UNREACHABLE = 2**30
"""The distance assigned to invisible keys; larger than any window."""


class Blocking(NamedTuple):
    """Block size and number of pairs computed at once; a static argument of compiled functions."""

    block_size: int
    """Tokens per block."""
    pairs_per_iteration: int
    """Pairs of blocks per iteration of the loop."""
    kernel: Literal["tpu", "gpu"] | None = None
    """The platform whose Pallas kernels compute the pairs; None without kernels."""


class BlockPairs(NamedTuple):
    """The pairs of query and key blocks with visible entries: for each window, one list for all rows of a device.

    Blocks are numbered row by row, and pairs are in the order of their query blocks. Lists have a dim R only so that
    they are split over devices like the rows; each device fills its part from the front.
    """

    windows: Int32[Array, "windows"]
    query_block: Int32[Array, "windows R pairs"]
    key_block: Int32[Array, "windows R pairs"]
    num_pairs: Int32[Array, "windows R"]
    """The number of pairs of each row."""

    def inside(self, window: Int32[Array, ""]) -> tuple[Int32[Array, "N"], Int32[Array, "N"], Int32[Array, ""]]:
        """Returns this device's pairs for a window: query blocks, key blocks, and the number of valid pairs."""
        number = jnp.argmax(self.windows == window)
        return self.query_block[number].ravel(), self.key_block[number].ravel(), self.num_pairs[number].sum()


class PackedInputs(NamedTuple):
    """Inputs of attention over packed rows: for the whole mesh, or for one device's rows and heads."""

    query: Float[Array, "R T Q H"]
    keys: Float[Array, "R K T H"]
    values: Float[Array, "R K T H"]
    layout: SegmentLayout
    pairs: BlockPairs
    """The result of `block_pairs` for these rows and for windows that include `window`."""
    window: Int32[Array, ""]


def block_pairs(
    layout: SegmentLayout, windows: Collection[Window], size: int, *, with_padding: bool = False
) -> BlockPairs:
    """Returns, for each window, the pairs of `size`-token blocks with a visible entry.

    T must be a multiple of `size`. Relies on the token order of `SegmentLayout`. The work per row is T * T / size.

    Args:
        with_padding: whether blocks of padding are paired with themselves.
    """
    rows, lists = ("rows", "tokens"), ("layers", "rows", "tokens")
    widths = jnp.stack([jnp.asarray(UNREACHABLE if window is None else window, jnp.int32) for window in windows])

    def find_pairs(*layout: Array) -> tuple[Array, ...]:
        distance = _block_distances(SegmentLayout(*layout), size)
        num_rows, num_blocks, _ = distance.shape
        if with_padding:
            distance = jnp.where(jnp.eye(num_blocks, dtype=bool), 0, distance)
        is_outside = (distance >= widths[:, None, None, None]).astype(jnp.int32)
        # The sort is stable, so pairs of the same query block stay together.
        order = jnp.argsort(is_outside.reshape(len(windows), -1), axis=1, stable=True)
        # A row of n blocks has at most n (n + 1) / 2 causal pairs.
        order = order[:, : num_rows * num_blocks * (num_blocks + 1) // 2].reshape(len(windows), num_rows, -1)
        row, query_block, key_block = jnp.unravel_index(order, distance.shape)
        blocks = (row * num_blocks + query_block, row * num_blocks + key_block)
        num_pairs = jnp.sum(1 - is_outside, axis=(2, 3), dtype=jnp.int32)
        return *(x.astype(jnp.int32) for x in blocks), num_pairs

    pairs = shard_map_by_dims(find_pairs, in_dims=(rows,) * 3, out_dims=(lists, lists, lists[:2]))(*layout)
    return BlockPairs(widths, *pairs)


def _block_distances(layout: SegmentLayout, size: int) -> Int32[Array, "R blocks blocks"]:
    """Returns, per pair of blocks, the smallest distance from a query to a visible key; UNREACHABLE without one.

    A run is a prompt or a completion: the tokens of one segment and branch. Runs are numbered along the row, so the
    keys of a block are in runs `first` to `last`. A query sees its own run and its prompt's run.
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
