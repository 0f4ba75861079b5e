"""Measures the limits of this machine: the speed of float32 matmuls and the memory bandwidth.

python scripts/bench/ceilings.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

SIZE = 2048
COPIED_BYTES = 1 << 30
RUNS = 7


def median_seconds(call: Callable[[], jax.Array]) -> float:
    """Returns the median seconds of `RUNS` calls; an earlier call compiles."""
    call().block_until_ready()
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        call().block_until_ready()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def matmul_flops_per_s(size: int = SIZE) -> float:
    """Returns the FLOP/s of a float32 matmul of two [size, size] matrices, which takes 2 size^3 FLOPs."""
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.float32)
    product = jax.jit(lambda a, b: jnp.matmul(a, b, precision="highest"))
    return 2 * size**3 / median_seconds(lambda: product(x, x))


def read_bytes_per_s(num_bytes: int = COPIED_BYTES) -> float:
    """Returns the bytes per second at which a sum reads an array larger than any cache, as decoding reads weights."""
    x = jnp.ones(num_bytes // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    return num_bytes / median_seconds(lambda: total(x))


def main() -> None:
    print(f"float32 product of {SIZE} x {SIZE} matrices: {matmul_flops_per_s() / 1e9:.0f} GFLOP/s")
    print(f"reading {COPIED_BYTES >> 20} MiB: {read_bytes_per_s() / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()
