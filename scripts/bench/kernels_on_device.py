"""Compares the errors and times of attention and expert kernels with plain XLA on this machine's accelerator.

    python scripts/bench/kernels_on_device.py [--model Qwen2.5-1.5B] [--rows 256] [--length 832]

Kernels and XLA compute in bfloat16. Errors are relative to float32 at the highest precision; a kernel's error must be
at most 1.5 times XLA's. Decoding computes one token for each of `--rows` rows, filled to random lengths of at most
`--length`, with a paged KV cache; its read column compares the rate of reading keys and values with a plain read of as
many bytes. Scoring and update use a row of 8,192 packed tokens. Experts have the sizes of Qwen3-30B-A3B, with 8 experts
per token; their read column is the rate of reading all matrices.
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

from app.mesh.device_mesh import make_mesh
from app.model.architecture import Architecture
from app.model.attention.cached import cache_block_size, decode_block_size, extend_cache
from app.model.attention.dense import dot_product_attention
from app.model.attention.packed import PARALLEL_BLOCKING, make_block_pairs, packed_attention, platform_blocking
from app.model.attention.pairs import Blocking
from app.model.grouped_product import grouped_product
from app.model.io.families import architecture_from_config
from app.model.kv_cache import LayerCache, to_codes
from app.model.segment_layout import SegmentLayout
from app.records.text_format import format_table
from scripts.bench import ceilings
from scripts.bench.shapes import QWEN2_5, QWEN3
from settings.schema.mesh import MeshSettings

ERROR_LIMIT = 1.5
"""Maximum error of a kernel as a multiple of XLA's error."""
TOKENS = 8192
"""Number of tokens in the packed row."""
RUNS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=QWEN2_5, default="Qwen2.5-1.5B")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--length", type=int, default=832, help="tokens of the longest row")
    options = parser.parse_args()
    architecture, mesh = architecture_from_config(QWEN2_5[options.model]), make_mesh(MeshSettings())
    with jax.set_mesh(mesh):
        lines = [decoding(architecture, options.rows, options.length, is_int8=is_int8) for is_int8 in (False, True)]
        lines += packed(architecture, TOKENS)
        lines += [experts(64), experts(256), experts(1024, gradients=True)]
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, {options.model}, bfloat16")
    print(format_table(lines, header=("", "XLA", "kernel", "ratio", "error of XLA", "error of the kernel", "read")))


def interleaved_seconds(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Returns the median seconds of each call; calls alternate, and a first round that compiles is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for run in range(RUNS + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            if run > 0:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def log_normal_row(rng: np.random.Generator, num_tokens: int, mean: float) -> SegmentLayout:
    """Returns a full packed row of segments with log-normal lengths (sigma 1); the last segment is cut to fit."""
    segment_ids, positions = np.zeros((2, 1, num_tokens), np.int32)
    first = segment = 0
    while first < num_tokens:
        length = max(8, round(rng.lognormal(math.log(mean) - 0.5, 1.0)))
        last, segment = min(first + length, num_tokens), segment + 1
        segment_ids[0, first:last], positions[0, first:last] = segment, np.arange(last - first)
        first = last
    return SegmentLayout(jnp.asarray(segment_ids), jnp.zeros((1, num_tokens), jnp.int32), jnp.asarray(positions))


def relative_error(found: Any, right: Any) -> float:
    differences, sizes = zip(
        *(
            (np.linalg.norm(np.asarray(x, np.float64) - np.asarray(y, np.float64)), np.linalg.norm(np.asarray(y)))
            for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True)
        ),
        strict=True,
    )
    return math.hypot(*differences) / math.hypot(*sizes)


def line(what: str, calls: dict[str, Callable[[], Any]], right: Any, read_bytes: int = 0) -> tuple[str, ...]:
    """Returns a row of the printed table.

    Args:
        calls: functions that run XLA and the kernel, in this order.
        right: the correct result.
        read_bytes: number of bytes that the kernel must read; 0 if not compared.
    """
    errors = [relative_error(call(), right) for call in calls.values()]
    assert errors[1] <= ERROR_LIMIT * errors[0], (what, errors)
    plain, kernel = interleaved_seconds(calls).values()
    read = ""
    if read_bytes:
        read = f"{read_bytes / kernel / 1e9:,.0f} of {ceilings.read_bytes_per_s(read_bytes) / 1e9:,.0f} GB/s"
    figures = *(f"{seconds * 1e3:.3f} ms" for seconds in (plain, kernel)), f"{plain / kernel:.2f}x"
    return what, *figures, *(f"{error:.1e}" for error in errors), read


def decoding(architecture: Architecture, num_rows: int, length: int, *, is_int8: bool) -> tuple[str, ...]:
    rng, a = np.random.default_rng(0), architecture
    size = cache_block_size(a, length, jnp.bfloat16, is_large=True)
    kernel_size = decode_block_size(a, size, jnp.bfloat16)
    assert kernel_size is not None, "no kernel for this device"
    width = -(-length // size)
    shape = num_rows * width + 1, a.num_kv_heads, size, a.head_dim
    exact = LayerCache(*(jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16) for _ in range(2)))
    pool = to_codes(exact) if is_int8 else exact
    query, key, value = (
        jnp.asarray(rng.standard_normal((num_rows, *shape), np.float32), jnp.bfloat16)
        for shape in ((1, a.num_query_heads, a.head_dim), *[(a.num_kv_heads, 1, a.head_dim)] * 2)
    )
    tables = jnp.asarray(1 + rng.permutation(num_rows * width).reshape(num_rows, width), jnp.int32)
    lengths = rng.integers(length // 4, length, num_rows)
    positions, active = jnp.asarray(lengths, jnp.int32), jnp.ones(num_rows, bool)

    def attend(block_size: int | None) -> Callable[[], Array]:
        arrays = positions, active, tables
        compute = lambda pool: extend_cache(query, key, value, pool, *arrays, block_size=block_size)  # noqa: E731
        step = jax.jit(compute, donate_argnums=0)
        # The pool is updated in place, like in a rollout.
        kept = [jax.tree.map(jnp.copy, pool)]

        def call() -> Array:
            mixed, kept[0] = step(kept[0])
            return mixed

        return call

    @jax.jit
    def oracle() -> Array:
        whole = [jnp.moveaxis(x.astype(jnp.float32)[tables], 1, 2) for x in (exact.keys, exact.values)]
        whole = [x.reshape(num_rows, a.num_kv_heads, width * size, a.head_dim) for x in whole]
        write = jax.vmap(lambda row, new, position: row.at[:, position].set(new[:, 0].astype(jnp.float32)))
        keys, values = (write(x, one, positions) for x, one in zip(whole, (key, value), strict=True))
        visible = jnp.arange(width * size) <= positions[:, None]
        return dot_product_attention(query.astype(jnp.float32), keys, values, visible[:, None])

    with jax.default_matmul_precision("highest"):
        right = oracle()
    bytes_of_token = sum(x.nbytes for x in jax.tree.leaves(pool)) / (len(pool.keys) * size)
    calls = {"XLA": attend(None), "kernel": attend(kernel_size)}
    kind = "int8" if is_int8 else "bfloat16"
    return line(f"decode {num_rows} rows, {kind} blocks of {size}", calls, right, int(lengths.sum() * bytes_of_token))


def experts(num_tokens: int, *, gradients: bool = False) -> tuple[str, ...]:
    rng, a = np.random.default_rng(0), architecture_from_config(QWEN3["Qwen3-30B-A3B"])
    assert a.num_experts is not None
    num_experts, inner, outer = a.num_experts, a.model_dim, a.mlp_dim
    num_rows = num_tokens * a.experts_per_token
    sizes = jnp.asarray(rng.multinomial(num_rows, rng.dirichlet(np.full(num_experts, 2.0))), jnp.int32)
    shapes = (num_rows, inner), (num_experts, inner, outer), (num_rows, outer)
    whole = [jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes[: 2 + gradients]]
    arrays = [x.astype(jnp.bfloat16) for x in whole]

    def call(product: Callable[..., Array]) -> Callable[..., Any]:
        def compute(x: Array, matrices: Array, *cotangent: Array) -> Any:
            y, backward = jax.vjp(lambda x, matrices: product(x, matrices, sizes), x, matrices)
            return (y, backward(*cotangent)) if cotangent else y

        return jax.jit(compute)

    with jax.default_matmul_precision("highest"):
        right = call(jax.lax.ragged_dot)(*[x.astype(jnp.float32) for x in arrays])
    calls = {
        name: functools.partial(call(product), *arrays)
        for name, product in (("XLA", jax.lax.ragged_dot), ("kernel", grouped_product))
    }
    what = f"{num_rows:,} rows of {num_experts} experts, forward" + (" and backward" if gradients else "")
    return line(what, calls, right, 0 if gradients else arrays[1].nbytes)


def packed(architecture: Architecture, num_tokens: int) -> list[tuple[str, ...]]:
    rng, a = np.random.default_rng(0), architecture
    layout = log_normal_row(rng, num_tokens, mean=500)
    shapes = (1, num_tokens, a.num_query_heads, a.head_dim), *[(1, a.num_kv_heads, num_tokens, a.head_dim)] * 2
    whole = [jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in (*shapes, shapes[0])]
    arrays = [x.astype(jnp.bfloat16) for x in whole]

    def attention(blocking: Blocking) -> Callable[..., Array]:
        return lambda query, keys, values: packed_attention(
            query, keys, values, layout, pairs=make_block_pairs(layout, [None], blocking), blocking=blocking
        )

    def gradients(blocking: Blocking) -> Callable[..., Any]:
        def both(query: Array, keys: Array, values: Array, cotangent: Array) -> Any:
            mixed, backward = jax.vjp(attention(blocking), query, keys, values)
            return mixed, backward(cotangent)

        return both

    kernel = platform_blocking(num_tokens, a.head_dim, jnp.bfloat16, group_size=a.num_query_heads // a.num_kv_heads)
    assert kernel.kernel, "no kernel for this device"
    lines = []
    for what, function, count in (("forward", attention, 3), ("forward and backward", gradients, 4)):
        with jax.default_matmul_precision("highest"):
            right = jax.jit(function(PARALLEL_BLOCKING))(*[x.astype(jnp.float32) for x in arrays[:count]])
        calls = {
            name: functools.partial(jax.jit(function(blocking)), *arrays[:count])
            for name, blocking in (("XLA", PARALLEL_BLOCKING), ("kernel", kernel))
        }
        lines.append(line(f"{num_tokens:,} packed tokens, {what}", calls, right))
    return lines


if __name__ == "__main__":
    main()
