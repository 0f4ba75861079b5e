"""One decay for all steps, as a Pallas kernel for GPU (Triton) and TPU (Mosaic): differences, scan and returns at once.

Time is cut into tiles of C x C steps, C chunks of C steps. With decay^distance in tables a tile is two matrix products,

    own = inputs @ within                       what each step gets from its own chunk
    A   = own + later @ (own[:, 0] x behind)    and from the tile's chunks behind it
            + far * carry                       and from what is behind the tile,

with nothing serial in it; tiles hand the carry to the one in front. On a GPU a program walks a row with the carry in
registers; on a TPU the last, sequential dimension of the grid walks it with the carry in VMEM.

Run in interpret mode on a CPU only: neither lowering has been compiled for or timed on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float32

from app.advantage.gae.chunked import powers_of
from app.advantage.gae.terms import Credit, Terms

GPU_TILE = 64
TPU_TILE = 128
"""Steps of a chunk at most: a tile's edge. A TPU's registers and matrix unit want 128, no less."""
HIGHEST = jax.lax.Precision.HIGHEST
Tables = tuple[Array, Array, Array, Array]


def fused_on_gpu(terms: Terms, *, interpret: bool = False) -> Credit:
    """The advantages of terms whose decay is one number; a program for each row."""
    edge = next(edge for edge in (16, 32, GPU_TILE) if edge == GPU_TILE or edge * edge >= terms.rewards.shape[1])
    inputs = _tiled(terms, edge)
    rows, tiles = inputs[0].shape[:2]
    row = pl.BlockSpec((None, tiles, edge, edge), lambda b: (b, 0, 0, 0))

    def kernel(*refs: jax.Array) -> None:
        reward, value, next_value, discount, within, later, behind, far, advantages, returns = refs
        tables = within[...], later[...], behind[...], far[...]

        def step(nth: Array, carry: Array) -> Array:
            tile = tiles - 1 - nth
            deltas = reward[tile] + discount[...] * next_value[tile] - value[tile]
            solved, carry = _solve_tile(deltas, carry, tables)
            advantages[tile] = solved
            returns[tile] = solved + value[tile]
            return carry

        jax.lax.fori_loop(0, tiles, step, jnp.zeros((1, 1), jnp.float32))

    numbers = _numbers(terms, edge)
    solved = pl.pallas_call(
        kernel,
        grid=(rows,),
        in_specs=[row] * 3 + [pl.BlockSpec(number.shape, lambda b: (0, 0)) for number in numbers],
        out_specs=[row] * 2,
        out_shape=[jax.ShapeDtypeStruct(inputs[0].shape, jnp.float32)] * 2,
        interpret=interpret,
    )(*inputs, *numbers)
    return _credit(terms, *solved)


def fused_on_tpu(terms: Terms, *, interpret: bool = False) -> Credit:
    """The advantages of terms whose decay is one number; the grid walks the tiles of a row from the back."""
    inputs = _tiled(terms, TPU_TILE)
    rows, tiles = inputs[0].shape[:2]
    tile = pl.BlockSpec((None, None, TPU_TILE, TPU_TILE), lambda b, nth: (b, tiles - 1 - nth, 0, 0))

    def kernel(*refs: jax.Array) -> None:
        reward, value, next_value, discount, within, later, behind, far, advantages, returns, carry = refs

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            carry[...] = jnp.zeros_like(carry)

        deltas = reward[...] + discount[...] * next_value[...] - value[...]
        tables = within[...], later[...], behind[...], far[...]
        advantages[...], carry[...] = _solve_tile(deltas, carry[...], tables)
        returns[...] = advantages[...] + value[...]

    numbers = _numbers(terms, TPU_TILE)
    solved = pl.pallas_call(
        kernel,
        grid=(rows, tiles),
        in_specs=[tile] * 3 + [pl.BlockSpec(number.shape, lambda b, nth: (0, 0)) for number in numbers],
        out_specs=[tile] * 2,
        out_shape=[jax.ShapeDtypeStruct(inputs[0].shape, jnp.float32)] * 2,
        scratch_shapes=[pltpu.VMEM((1, 1), jnp.float32)],
        interpret=interpret,
    )(*inputs, *numbers)
    return _credit(terms, *solved)


KERNELS: Mapping[str, Callable[..., Credit]] = MappingProxyType({"gpu": fused_on_gpu, "tpu": fused_on_tpu})
"""By platform, as `jax.default_backend` names it: (terms, interpret=False) -> credit."""


def _solve_tile(
    deltas: Float32[Array, "C C"], carry: Float32[Array, "1 1"], tables: Tables
) -> tuple[Float32[Array, "C C"], Float32[Array, "1 1"]]:
    """The advantages of a tile (chunks by steps), and that of its first step, which the tile in front needs."""
    within, later, behind, far = tables
    is_first_step = jax.lax.broadcasted_iota(jnp.int32, deltas.shape, 1) == 0
    is_first_chunk = jax.lax.broadcasted_iota(jnp.int32, deltas.shape, 0) == 0
    own = jnp.dot(deltas, within, precision=HIGHEST)
    first_steps = jnp.sum(jnp.where(is_first_step, own, 0.0), axis=1, keepdims=True)
    solved = own + jnp.dot(later, first_steps * behind, precision=HIGHEST) + far * carry
    return solved, jnp.sum(jnp.where(is_first_step & is_first_chunk, solved, 0.0), keepdims=True)


def _numbers(terms: Terms, edge: int) -> tuple[Array, ...]:
    """What is the same for all tiles: the discount [1, 1] and the tables."""
    discount = terms.discounts if terms.discounts.ndim == 0 else jnp.ones((), jnp.float32)
    return discount.reshape(1, 1), *_tables(terms.decays, edge)


def _tables(decay: Float32[Array, ""], edge: int) -> Tables:
    """Powers of the decay: within [C, C], later [C, C], behind [1, C] and far [C, C] of the module's formula."""
    steps = powers_of(decay, edge + 1)
    chunks = powers_of(steps[edge], edge)
    at = jnp.arange(edge)
    apart = at[:, None] - at[None, :]
    within = jnp.where(apart >= 0, steps[jnp.maximum(apart, 0)], 0.0)
    later = jnp.where(apart < 0, chunks[jnp.maximum(-apart - 1, 0)], 0.0)
    behind = steps[edge - at][None, :]
    return within, later, behind, chunks[edge - 1 - at][:, None] * behind


def _tiled(terms: Terms, edge: int) -> list[Float32[Array, "B tiles C C"]]:
    """Rewards, values and next values; filled up behind the end with zeros, which hand nothing on."""
    rows, num_tokens = terms.rewards.shape
    padding = ((0, 0), (0, -num_tokens % (edge * edge)))
    next_values = terms.next_values if terms.discounts.ndim == 0 else terms.discounts * terms.next_values
    parts = (terms.rewards, terms.values, next_values)
    return [jnp.pad(part, padding).reshape(rows, -1, edge, edge) for part in parts]


def _credit(terms: Terms, advantages: Array, returns: Array) -> Credit:
    rows, num_tokens = terms.rewards.shape
    advantages, returns = (x.reshape(rows, -1)[:, :num_tokens] for x in (advantages, returns))
    return Credit(advantages, returns) if terms.mask is None else terms.credit(advantages)
