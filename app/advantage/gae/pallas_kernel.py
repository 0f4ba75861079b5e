"""GAE with a constant decay as a Pallas kernel for GPU (Triton) and TPU (Mosaic): scan, advantages and returns.

Time is split into tiles of C x C steps: C chunks of C steps. With tables of decay^distance, a tile takes two products,

    own = inputs @ within                       contribution of the step's own chunk
    A   = own + later @ (own[:, 0] x behind)    plus that of later chunks of the tile
            + far * carry                       plus that of later tiles,

without serial steps; each tile passes its carry to the one before it. On a GPU, one program processes a row's tiles in
a loop with the carry in registers; on a TPU, the last, sequential grid dimension does, with the carry in VMEM.

Tested in interpret mode on a CPU, and lowered for both platforms there; not yet timed on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float32

from app.advantage.gae.chunked import decay_powers
from app.advantage.gae.recurrence import GaeOutput, RecurrenceTerms

GPU_TILE = 64
TPU_TILE = 128
"""Edge of a tile, the largest number of steps per chunk; a TPU's registers and matrix unit need 128."""
HIGHEST = jax.lax.Precision.HIGHEST
Tables = tuple[Array, Array, Array, Array]


def solve_on_gpu(terms: RecurrenceTerms, *, interpret: bool = False) -> GaeOutput:
    """Solves terms with a constant decay and no mask, with one program per row."""
    num_tokens = terms.rewards.shape[1]
    edge = next(edge for edge in (16, 32, GPU_TILE) if edge == GPU_TILE or edge * edge >= num_tokens)
    inputs, values, tables = (
        _tiled(terms.deltas, edge),
        _tiled(terms.values, edge),
        _tables(terms.one_minus_decay, edge),
    )
    rows, tiles = inputs.shape[:2]
    row = pl.BlockSpec((None, tiles, edge, edge), lambda b: (b, 0, 0, 0))

    def kernel(*refs: jax.Array) -> None:
        own, value, within, later, behind, far, advantages, returns = refs
        tables = within[...], later[...], behind[...], far[...]

        def step(nth: Array, carry: Array) -> Array:
            tile = tiles - 1 - nth
            solved, carry = _solve_tile(own[tile], carry, tables)
            advantages[tile] = solved
            returns[tile] = solved + value[tile]
            return carry

        jax.lax.fori_loop(0, tiles, step, jnp.zeros((1, 1), jnp.float32))

    solved = pl.pallas_call(
        kernel,
        grid=(rows,),
        in_specs=[row] * 2 + [pl.BlockSpec(table.shape, lambda b: (0, 0)) for table in tables],
        out_specs=[row] * 2,
        out_shape=[jax.ShapeDtypeStruct(inputs.shape, jnp.float32)] * 2,
        # Without this, Pallas would use Mosaic's GPU lowering, which needs a whole row in shared memory.
        compiler_params=plgpu.CompilerParams(),
        interpret=interpret,
    )(inputs, values, *tables)
    return _unpad_output(terms, *solved)


def solve_on_tpu(terms: RecurrenceTerms, *, interpret: bool = False) -> GaeOutput:
    """Solves terms with a constant decay and no mask; the grid visits the tiles of a row from the last to the first."""
    inputs, values, tables = (
        _tiled(terms.deltas, TPU_TILE),
        _tiled(terms.values, TPU_TILE),
        _tables(terms.one_minus_decay, TPU_TILE),
    )
    rows, tiles = inputs.shape[:2]
    tile = pl.BlockSpec((None, None, TPU_TILE, TPU_TILE), lambda b, nth: (b, tiles - 1 - nth, 0, 0))

    def kernel(*refs: jax.Array) -> None:
        own, value, within, later, behind, far, advantages, returns, carry = refs

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            carry[...] = jnp.zeros_like(carry)

        tables = within[...], later[...], behind[...], far[...]
        advantages[...], carry[...] = _solve_tile(own[...], carry[...], tables)
        returns[...] = advantages[...] + value[...]

    solved = pl.pallas_call(
        kernel,
        grid=(rows, tiles),
        in_specs=[tile] * 2 + [pl.BlockSpec(table.shape, lambda b, nth: (0, 0)) for table in tables],
        out_specs=[tile] * 2,
        out_shape=[jax.ShapeDtypeStruct(inputs.shape, jnp.float32)] * 2,
        scratch_shapes=[pltpu.VMEM((1, 1), jnp.float32)],
        interpret=interpret,
    )(inputs, values, *tables)
    return _unpad_output(terms, *solved)


KERNELS: Mapping[str, Callable[..., GaeOutput]] = MappingProxyType({"gpu": solve_on_gpu, "tpu": solve_on_tpu})
"""Kernels by platform, as JAX names it: (terms, interpret=False) -> advantages and returns."""


def _solve_tile(
    inputs: Float32[Array, "C C"], carry: Float32[Array, "1 1"], tables: Tables
) -> tuple[Float32[Array, "C C"], Float32[Array, "1 1"]]:
    """Returns the advantages of a tile (chunks by steps) and the next carry: the advantage of the tile's first step."""
    within, later, behind, far = tables
    is_first_step = jax.lax.broadcasted_iota(jnp.int32, inputs.shape, 1) == 0
    is_first_chunk = jax.lax.broadcasted_iota(jnp.int32, inputs.shape, 0) == 0
    own = jnp.dot(inputs, within, precision=HIGHEST)
    first_steps = jnp.sum(jnp.where(is_first_step, own, 0.0), axis=1, keepdims=True)
    solved = own + jnp.dot(later, first_steps * behind, precision=HIGHEST) + far * carry
    return solved, jnp.sum(jnp.where(is_first_step & is_first_chunk, solved, 0.0), keepdims=True)


def _tables(one_minus_decay: Float32[Array, ""], edge: int) -> Tables:
    """Returns the powers of the decay in the module docstring: within, later and far [C, C], behind [1, C]."""
    log_decay = jnp.log1p(-one_minus_decay)
    steps = decay_powers(log_decay, edge + 1)
    chunks = decay_powers(edge * log_decay, edge)
    at = jnp.arange(edge)
    apart = at[:, None] - at[None, :]
    within = jnp.where(apart >= 0, steps[jnp.maximum(apart, 0)], 0.0)
    later = jnp.where(apart < 0, chunks[jnp.maximum(-apart - 1, 0)], 0.0)
    behind = steps[edge - at][None, :]
    return within, later, behind, chunks[edge - 1 - at][:, None] * behind


def _tiled(x: Float32[Array, "B T"], edge: int) -> Float32[Array, "B tiles C C"]:
    """Splits rows into tiles; zeros pad the last tile and contribute nothing."""
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % (edge * edge))))
    return padded.reshape(len(x), -1, edge, edge)


def _unpad_output(terms: RecurrenceTerms, advantages: Array, returns: Array) -> GaeOutput:
    rows, num_tokens = terms.rewards.shape
    return GaeOutput(*(x.reshape(rows, -1)[:, :num_tokens] for x in (advantages, returns)))
