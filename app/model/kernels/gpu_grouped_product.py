"""Grouped matmuls as Pallas kernels for GPUs, compiled by Triton.

One program computes a tile: a part of a group's matmul, or a part of a group's matrix gradient. Its sum is float32
and stays in registers. Programs never write to the same elements, so results do not depend on their order.

Source: Gale et al. 2022, "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts", section 5.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int32

from app.model.kernels.pair_scores import product

MIN_TILE = 16
"""The smallest dim of a matmul on tensor cores."""
MAX_TILE = 128
"""Maximum number of rows, and of columns, of a tile."""
MAX_STEP = 64
"""Maximum size of the contracted dim in one step of a tile's sum."""
PARAMS = triton.CompilerParams(num_warps=8, num_stages=3)


def rows_product(
    x: Float[Array, "M I"],
    matrices: Float[Array, "E _ _"],
    sizes: Int32[Array, "E"],
    *,
    contracted: int,
) -> Float[Array, "M O"]:
    """Multiplies each row by the matrix of its group, contracting dim `contracted` of the matrices.

    Rows after the last group are left uninitialized.
    """
    (num_rows, inner), outer, num_groups = x.shape, matrices.shape[3 - contracted], len(sizes)
    rows = min(max(pl.next_power_of_2(num_rows // num_groups), MIN_TILE), MAX_TILE)
    columns, step = _tile(outer, MAX_TILE), _tile(inner, MAX_STEP)
    matrix_tile = (step, columns) if contracted == 1 else (columns, step)
    x, matrices = _pad(x, 1, step), _pad(matrices, *matrix_tile)
    # The last block of each group may have fewer rows.
    num_blocks = num_rows // rows + min(num_groups, num_rows)
    ends = jnp.cumsum(-(-sizes // rows), dtype=jnp.int32)
    block = jnp.arange(num_blocks, dtype=jnp.int32)
    group = jnp.searchsorted(ends, block, side="right", method="compare_all").astype(jnp.int32)
    own = jnp.minimum(group, num_groups - 1)
    row_ends = jnp.cumsum(sizes, dtype=jnp.int32)
    first = row_ends[own] - sizes[own] + (block - ends[own] + -(-sizes[own] // rows)) * rows
    num_own = jnp.where(group == own, row_ends[own] - first, 0)
    width = -(-outer // columns) * columns
    y = pl.pallas_call(
        functools.partial(_rows_kernel, (rows, columns, step), contracted),
        # Consecutive tiles have the same rows, so their group's matrix is cached.
        grid=(width // columns, num_blocks),
        in_specs=[pl.BlockSpec()] * 5,
        out_specs=pl.BlockSpec(),
        out_shape=jax.ShapeDtypeStruct((num_rows, width), x.dtype),
        compiler_params=PARAMS,
        name="grouped_product",
    )(x, matrices, own, first, num_own)
    return y[:, :outer]


def matrix_gradient(x: Float[Array, "M I"], dy: Float[Array, "M O"], sizes: Int32[Array, "E"]) -> Float[Array, "E I O"]:
    """Returns x^T dy of each group's rows: the gradient of the group's matrix."""
    dims = x.shape[1], dy.shape[1]
    tiles = _tile(dims[0], MAX_TILE), _tile(dims[1], MAX_TILE)
    x, dy = (_pad(array, 1, tile) for array, tile in zip((x, dy), tiles, strict=True))
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    whole = pl.pallas_call(
        _matrix_kernel,
        grid=(dy.shape[1] // tiles[1], x.shape[1] // tiles[0], len(sizes)),
        in_specs=[
            pl.BlockSpec((len(x), tiles[0]), lambda o, i, e: (0, i)),
            pl.BlockSpec((len(dy), tiles[1]), lambda o, i, e: (0, o)),
            *[pl.BlockSpec()] * 2,
        ],
        out_specs=pl.BlockSpec((None, *tiles), lambda o, i, e: (e, i, o)),
        out_shape=jax.ShapeDtypeStruct((len(sizes), x.shape[1], dy.shape[1]), x.dtype),
        compiler_params=PARAMS,
        name="grouped_matrix_gradient",
    )(x, dy, ends - sizes, sizes)
    return whole[:, : dims[0], : dims[1]]


def _rows_kernel(tile: tuple[int, int, int], contracted: int, *refs: Any) -> None:
    x, matrices, groups, firsts, num_own, y = refs
    (rows, columns, step), block = tile, pl.program_id(1)
    group, at_rows = groups[block], pl.ds(firsts[block], rows)
    at_columns = pl.ds(pl.program_id(0) * columns, columns)
    is_own = (jnp.arange(rows) < num_own[block])[:, None]

    @pl.when(num_own[block] > 0)
    def _() -> None:
        def add(i: Array, total: Array) -> Array:
            at = pl.ds(i * step, step)
            part = triton.load(x.at[at_rows, at], mask=is_own, other=0)
            if contracted == 1:
                return total + product(part, matrices[group, at, at_columns], (1, 0))
            return total + product(part, matrices[group, at_columns, at], (1, 1))

        total = jax.lax.fori_loop(0, x.shape[1] // step, add, jnp.zeros((rows, columns), jnp.float32))
        triton.store(y.at[at_rows, at_columns], total.astype(y.dtype), mask=is_own)


def _matrix_kernel(x: Any, dy: Any, firsts: Any, sizes: Any, gradient: Any) -> None:
    first, size = (numbers[pl.program_id(2)] for numbers in (firsts, sizes))

    def add(i: Array, total: Array) -> Array:
        at = pl.ds(first + i * MAX_STEP, MAX_STEP)
        is_own = (jnp.arange(MAX_STEP) < size - i * MAX_STEP)[:, None]
        a, b = (triton.load(rows.at[at, :], mask=is_own, other=0) for rows in (x, dy))
        return total + product(a, b, (0, 0))

    zeros = jnp.zeros(gradient.shape, jnp.float32)
    gradient[...] = jax.lax.fori_loop(0, pl.cdiv(size, MAX_STEP), add, zeros).astype(gradient.dtype)


def _tile(size: int, largest: int) -> int:
    """Returns the tile size along a dim: the largest power of two that divides it, from `MIN_TILE` to `largest`."""
    return min(max(size & -size, MIN_TILE), largest)


def _pad(x: Array, *multiples: int) -> Array:
    """Pads the last dims with zeros to multiples of these sizes."""
    sizes = x.shape[-len(multiples) :]
    widths = [(0, -size % multiple) for size, multiple in zip(sizes, multiples, strict=True)]
    return jnp.pad(x, [(0, 0)] * (x.ndim - len(multiples)) + widths)
