"""The threshold search of `app.rollout.sampling.truncation` as a Pallas kernel for TPUs.

Values and weights of a few rows stay in on-chip memory, and each grid step determines one bit of their thresholds.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32, Num

from app.rollout.sampling.threshold_codes import lowest_code, value_of_code

ROWS, LANES = 8, 128
"""Shape of a vector register: `ROWS` rows are searched together, with their scalars broadcast to all lanes."""
NUM_SUMS = 8
"""Number of independent partial sums per row: in a single sum, each addition would wait for the previous one."""
OTHER_BYTES = 2**20
"""On-chip memory for everything except values and weights."""


def _block_bytes(vocab_size: int) -> int:
    return 4 * ROWS * -(-vocab_size // LANES) * LANES


def num_buffers(vocab_size: int, available_bytes: int) -> int:
    """Returns how many times (0 to 2) the values and weights of `ROWS` rows fit into on-chip memory."""
    return min(2, max(0, available_bytes - OTHER_BYTES) // (2 * _block_bytes(vocab_size)))


def search(
    values: Num[Array, "B V"],
    weights: Int32[Array, "B V"] | None,
    limits: Int32[Array, "B"],
    *,
    num_bits: int,
    available_bytes: int,
) -> Int32[Array, "B"]:
    """Returns the codes of the values that `truncation.lowest_reached` finds in the rows of one device."""
    num_rows, vocab_size = values.shape
    padding = -num_rows % ROWS
    by_tokens = [jnp.pad(x, ((0, padding), (0, 0))) for x in (values, weights) if x is not None]
    held = jnp.broadcast_to(jnp.pad(limits, (0, padding), constant_values=1)[:, None], (num_rows + padding, LANES))
    count = num_buffers(vocab_size, available_bytes)
    buffers = pl.Buffered(count)
    by_token = pl.BlockSpec((ROWS, vocab_size), lambda block, bit: (block, 0), pipeline_mode=buffers)
    by_row = pl.BlockSpec((ROWS, LANES), lambda block, bit: (block, 0))
    found = pl.pallas_call(
        _kernel,
        grid=(len(held) // ROWS, num_bits),
        in_specs=[by_row, *[by_token] * len(by_tokens)],
        out_specs=by_row,
        out_shape=jax.ShapeDtypeStruct(held.shape, jnp.int32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            # Keep the limit small: memory that the kernel reserves cannot hold weights that the compiler prefetches.
            vmem_limit_bytes=2 * count * _block_bytes(vocab_size) + OTHER_BYTES,
        ),
        name="threshold_by_count" if weights is None else "threshold_by_weight",
    )(held, *by_tokens)
    return found[:num_rows, 0]


def _kernel(limits: Any, values: Any, *weights_and_found: Any) -> None:
    *weights, found = weights_and_found
    grid_step = pl.program_id(1)

    @pl.when(grid_step == 0)
    def _() -> None:
        found[...] = jnp.full_like(found, lowest_code(values.dtype))

    bit = jnp.int32(1) << (pl.num_programs(1) - 1 - grid_step)
    # Values without this bit are too low if the weight above the greatest of them reaches the limit.
    greatest = value_of_code(found[:, :1] + bit - 1, values.dtype)
    vocab_size = values.shape[1]
    step = -(-vocab_size // (NUM_SUMS * LANES)) * LANES
    above = jnp.zeros((ROWS, 1), jnp.int32)
    for start in range(0, vocab_size, step):
        part = slice(start, min(start + step, vocab_size))
        is_above = values[:, part] > greatest
        above += jnp.sum(jnp.where(is_above, weights[0][:, part] if weights else 1, 0), axis=1, keepdims=True)
    found[...] += jnp.where(above >= limits[...], bit, 0)
