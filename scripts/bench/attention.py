"""Compares block-wise attention over packed rows with attention over all scores of a row and a mask.

python scripts/bench/attention.py --lengths 512 1024 2048 4096 --mean 300
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from app.model.attention.dense import dot_product_attention
from app.model.attention.packed import make_block_pairs, packed_attention, platform_blocking
from app.model.segment_layout import SegmentLayout, attention_mask

TOKENS = 8192
"""Number of tokens of all rows together, for every row length."""
QUERY_HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
"""Sizes of SmolLM2-135M."""
SIGMA = 1.0
QUERY_BLOCK = 1024
RUNS = 5


def masked_attention(query: Array, keys: Array, values: Array, layout: SegmentLayout) -> Array:
    """Computes the baseline: 1024 queries at a time against every key of their row, with other segments masked."""
    rows, num_tokens = layout.segment_ids.shape

    @jax.checkpoint
    def block(query: Array, layout_of_queries: SegmentLayout, first: Array | int) -> Array:
        offset = jnp.full((rows, 1), first)
        return dot_product_attention(query, keys, values, attention_mask(layout_of_queries, layout, offset, None))

    if num_tokens <= QUERY_BLOCK:
        return block(query, layout, 0)
    size = math.gcd(num_tokens, QUERY_BLOCK)
    by_block = lambda x: jnp.moveaxis(x.reshape(rows, -1, size, *x.shape[2:]), 1, 0)  # noqa: E731
    blocks = jax.tree.map(by_block, (query, layout))
    mixed = jax.lax.map(lambda args: block(*args), (*blocks, jnp.arange(num_tokens // size) * size))
    return jnp.moveaxis(mixed, 0, 1).reshape(query.shape)


def block_attention(query: Array, keys: Array, values: Array, layout: SegmentLayout) -> Array:
    """Computes our attention, with the block pairs that a decoder computes once for all layers."""
    blocking = platform_blocking(query.shape[1], query.shape[-1], query.dtype, group_size=QUERY_HEADS // KV_HEADS)
    pairs = make_block_pairs(layout, [None], blocking)
    return packed_attention(query, keys, values, layout, pairs=pairs, blocking=blocking)


def log_normal_rows(rng: np.random.Generator, num_tokens: int, mean: float) -> SegmentLayout:
    """Returns full rows of segments with log-normal lengths; the last segment of a row is truncated."""
    rows = TOKENS // num_tokens
    segment_ids, positions = np.zeros((2, rows, num_tokens), np.int32)
    for row in range(rows):
        first = segment = 0
        while first < num_tokens:
            length = max(8, round(rng.lognormal(math.log(mean) - SIGMA**2 / 2, SIGMA)))
            last, segment = min(first + length, num_tokens), segment + 1
            segment_ids[row, first:last], positions[row, first:last] = segment, np.arange(last - first)
            first = last
    return SegmentLayout(jnp.asarray(segment_ids), jnp.zeros((rows, num_tokens), jnp.int32), jnp.asarray(positions))


def interleaved_seconds(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Returns the median seconds of each call; the calls take turns after one that compiles."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for run in range(RUNS + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            if run > 0:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def measured(layout: SegmentLayout, rng: np.random.Generator) -> dict[str, float]:
    """Returns the seconds of both, forward, and forward and backward."""
    rows, num_tokens = layout.segment_ids.shape
    shapes = (rows, num_tokens, QUERY_HEADS, HEAD_DIM), *[(rows, KV_HEADS, num_tokens, HEAD_DIM)] * 2
    arrays = [jnp.asarray(rng.normal(size=shape).astype(np.float32)) for shape in shapes]
    calls = {}
    for name, attention in (("masked", masked_attention), ("blocks", block_attention)):
        loss = lambda q, k, v, layout, f=attention: jnp.sum(jnp.sin(f(q, k, v, layout)))  # noqa: E731
        for what, function in (("forward", attention), ("both", jax.value_and_grad(loss, argnums=(0, 1, 2)))):
            calls[f"{name} {what}"] = functools.partial(jax.jit(function), *arrays, layout)
    return interleaved_seconds(calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096], help="tokens of a row")
    parser.add_argument("--mean", type=float, default=300, help="mean tokens of a segment, log-normal with sigma 1")
    options = parser.parse_args()
    print(f"{TOKENS} tokens, {QUERY_HEADS}/{KV_HEADS} heads of {HEAD_DIM}, float32, {jax.default_backend()}; seconds")
    print(f"{'row':>6}{'segments':>10}{'masked':>10}{'blocks':>10}{'ratio':>8}  both = forward and backward")
    for num_tokens in options.lengths:
        rng = np.random.default_rng(0)
        layout = log_normal_rows(rng, num_tokens, options.mean)
        num_segments = int(layout.segment_ids.max(axis=1).sum())
        seconds = measured(layout, rng)
        for what in ("forward", "both"):
            masked, blocks = seconds[f"masked {what}"], seconds[f"blocks {what}"]
            figures = f"{masked:>10.3f}{blocks:>10.3f}{masked / blocks:>7.1f}x"
            print(f"{num_tokens:>6}{num_segments:>10}{figures}  {what}")


if __name__ == "__main__":
    main()
