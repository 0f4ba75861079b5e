"""Attention over packed rows as Pallas kernels for TPUs: forward and backward over the visible pairs of blocks.

A grid step is one pair of a query block and a key block, for the query heads that share a key head. The pairs of a
query block are consecutive, so its output stays on the chip until the last one. Scores are [keys, queries]: the softmax
then reduces over sublanes, and its statistics are rows. Operands keep their dtype; scores, softmax and sums are
float32.

Source: Dao et al. 2022, FlashAttention, algorithms 1 and 4.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from app.mesh.chips import MAX_KERNEL_BYTES
from app.model.attention.dense import MASK_VALUE, ScoreMod
from app.model.attention.pairs import Blocking, PackedInputs
from app.model.kernels.pair_scores import INFO_ROWS, is_visible, pair_scores, pair_scores_grad, product, token_info

# Reserving only the required memory, as decoding does, is not faster overall: for 1.5B on a v5e-8, prefill takes 2 %
# less time in rollouts and 4 % more in evaluations, and gradients take the same (libtpu 0.0.42.1).
COMPILER_PARAMS = pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=MAX_KERNEL_BYTES)


def attend(
    score_mod: ScoreMod, blocking: Blocking, inputs: PackedInputs
) -> tuple[Float[Array, "R T Q H"], Float32[Array, "K G N"]]:
    """Returns one device's attention output, and the log-sum-exp of the scores of each of the N = R * T queries.

    Args:
        inputs: must have at least one pair for each query block.
    """
    query, keys, values, layout, pairs, window = inputs
    *blocks, num_pairs = pairs.inside(window)
    call = TpuCall(inputs, size := blocking.block_size)
    mixed, normalizer = pl.pallas_call(
        functools.partial(_forward_kernel, score_mod, score_mod.scale_for(call.head_dim)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(call.num_kv_heads, num_pairs),
            in_specs=[call.by_query, call.by_key, call.by_key, call.query_info, call.key_info],
            out_specs=[call.by_query, call.by_query_row],
            scratch_shapes=[
                pltpu.VMEM((call.group_size, size), jnp.float32),
                pltpu.VMEM((call.group_size, size), jnp.float32),
                pltpu.VMEM((call.group_size, call.head_dim, size), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(call.query_shape, query.dtype),
            jax.ShapeDtypeStruct(call.query_shape[:3], jnp.float32),
        ],
        compiler_params=COMPILER_PARAMS,
        name="attention_forward",
    )(*blocks, window.reshape(1), *call.arrays(query, keys, values), *[token_info(layout)] * 2)
    return call.from_heads(mixed), normalizer


def attention_grads(
    score_mod: ScoreMod,
    blocking: Blocking,
    inputs: PackedInputs,
    mixed: Float[Array, "R T Q H"],
    normalizer: Float32[Array, "K G N"],
    mixed_grad: Float[Array, "R T Q H"],
) -> tuple[Float[Array, "R T Q H"], Float[Array, "R K T H"], Float[Array, "R K T H"]]:
    """Returns the gradients of one device's query, keys and values; see `blockwise.attention_grads`."""
    query, keys, values, layout, pairs, window = inputs
    *blocks, num_pairs = pairs.inside(window)
    call = TpuCall(inputs, size := blocking.block_size)
    output_grad = call.to_heads(mixed_grad)
    mean = jnp.sum(output_grad.astype(jnp.float32) * call.to_heads(mixed).astype(jnp.float32), axis=-1)
    arrays = call.arrays(query, keys, values)
    query_grad, keys_grad, values_grad = pl.pallas_call(
        functools.partial(_backward_kernel, score_mod, score_mod.scale_for(call.head_dim), call.blocks_per_row),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(call.num_kv_heads, num_pairs),
            in_specs=[
                *(call.by_query, call.by_key, call.by_key, call.query_info, call.key_info),
                *(call.by_query, call.by_query_row, call.by_query_row),
            ],
            out_specs=[call.by_query, call.whole_row, call.whole_row],
            scratch_shapes=[pltpu.VMEM((call.group_size, call.head_dim, size), jnp.float32)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(call.query_shape, query.dtype),
            *[jax.ShapeDtypeStruct(arrays[1].shape, jnp.float32)] * 2,
        ],
        compiler_params=COMPILER_PARAMS,
        name="attention_backward",
    )(
        *(*blocks, window.reshape(1), *arrays, *[token_info(layout)] * 2),
        *(output_grad.astype(query.dtype), normalizer, mean),
    )
    keys_grad, values_grad = (
        x.reshape(call.num_kv_heads, keys.shape[0], -1, call.head_dim).swapaxes(0, 1).astype(keys.dtype)
        for x in (keys_grad, values_grad)
    )
    return call.from_heads(query_grad), keys_grad, values_grad


def _forward_kernel(score_mod: ScoreMod, scale: float, *refs: Any) -> None:
    query_block, key_block, window, query, key, value, query_info, key_info, mixed, normalizer, highest, total, sums = (
        refs
    )
    grid_step = pl.program_id(1)
    starts, ends = _block_edges(query_block, grid_step)

    @pl.when(starts)
    def _() -> None:
        highest[...] = jnp.full_like(highest, MASK_VALUE)
        total[...] = jnp.zeros_like(total)
        sums[...] = jnp.zeros_like(sums)

    visible = _visible_mask(query_info[...], key_info[...], query_block[grid_step] - key_block[grid_step], window[0])
    for head in range(query.shape[0]):
        row = pl.ds(head, 1)
        scores = pair_scores(score_mod, scale, key[...], query[head])
        scores = jnp.where(visible, scores, MASK_VALUE)
        new_highest = jnp.maximum(highest[row, :], jnp.max(scores, axis=0, keepdims=True))
        shrink = jnp.exp(highest[row, :] - new_highest)
        weights = jnp.exp(scores - new_highest)
        highest[row, :] = new_highest
        total[row, :] = total[row, :] * shrink + jnp.sum(weights, axis=0, keepdims=True)
        sums[head] = sums[head] * shrink + product(value[...], weights.astype(value.dtype), (0, 0))

    @pl.when(ends)
    def _() -> None:
        for head in range(query.shape[0]):
            row = pl.ds(head, 1)
            mixed[head] = (sums[head] / total[row, :]).T.astype(mixed.dtype)
        normalizer[...] = highest[...] + jnp.log(total[...])


def _backward_kernel(score_mod: ScoreMod, scale: float, blocks_per_row: int, *refs: Any) -> None:
    query_block, key_block, window, query, key, value, query_info, key_info, output_grad, normalizer, mean, *outputs = (
        refs
    )
    query_grad, keys_grad, values_grad, sums = outputs
    grid_step = pl.program_id(1)
    starts, ends = _block_edges(query_block, grid_step)
    size = key.shape[0]
    in_row = pl.ds(pl.multiple_of(key_block[grid_step] % blocks_per_row * size, size), size)

    @pl.when(starts)
    def _() -> None:
        sums[...] = jnp.zeros_like(sums)

    # Pairs are causal and ordered by query: a key block's first pair is with its own queries.
    @pl.when(query_block[grid_step] == key_block[grid_step])
    def _() -> None:
        keys_grad[in_row, :] = values_grad[in_row, :] = jnp.zeros(key.shape, jnp.float32)

    visible = _visible_mask(query_info[...], key_info[...], query_block[grid_step] - key_block[grid_step], window[0])
    new_keys_grad = new_values_grad = jnp.zeros(key.shape, jnp.float32)
    for head in range(query.shape[0]):
        row = pl.ds(head, 1)
        scores = pair_scores(score_mod, scale, key[...], query[head])
        weights = jnp.where(visible, jnp.exp(scores - normalizer[row, :]), 0.0)
        weights_grad = product(value[...], output_grad[head], (1, 1))
        scores_grad = pair_scores_grad(score_mod, scores, weights, weights_grad - mean[row, :]).astype(key.dtype)
        new_values_grad += product(weights.astype(key.dtype), output_grad[head], (1, 0))
        new_keys_grad += product(scores_grad, query[head], (1, 0))
        sums[head] += product(key[...], scores_grad, (0, 0))
    keys_grad[in_row, :] += new_keys_grad * scale
    values_grad[in_row, :] += new_values_grad

    @pl.when(ends)
    def _() -> None:
        for head in range(query.shape[0]):
            query_grad[head] = (sums[head] * scale).T.astype(query_grad.dtype)


def _block_edges(query_block: Any, grid_step: Array) -> tuple[Array, Array]:
    """Returns whether a grid step is the first of its query block, and whether it is the last."""
    last = pl.num_programs(1) - 1
    before, after = query_block[jnp.maximum(grid_step - 1, 0)], query_block[jnp.minimum(grid_step + 1, last)]
    is_first = (grid_step == 0) | (before != query_block[grid_step])
    return is_first, (grid_step == last) | (after != query_block[grid_step])


def _visible_mask(
    queries: Int32[Array, "I size"], keys: Int32[Array, "I size"], blocks_apart: Array, window: Array
) -> Bool[Array, "keys queries"]:
    """Returns whether each query (column) sees each key (row); the same rule as `attention_mask`."""
    size = keys.shape[1]
    by_key = keys.T
    shape = (size, size)
    later = jax.lax.broadcasted_iota(jnp.int32, shape, 0) - jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return is_visible(
        (queries[1:2], queries[2:3], queries[3:4]),
        (by_key[:, 0:1], by_key[:, 3:4]),
        later <= blocks_apart * size,
        window,
    )


class TpuCall:
    """Shapes and block specs for a kernel call. Heads come before tokens, and a device's rows are concatenated."""

    def __init__(self, inputs: PackedInputs, size: int):
        self.rows, self.num_tokens, num_query_heads, self.head_dim = inputs.query.shape
        self.num_kv_heads = inputs.keys.shape[1]
        self.group_size = num_query_heads // self.num_kv_heads
        self.query_shape = (self.num_kv_heads, self.group_size, self.rows * self.num_tokens, self.head_dim)
        self.blocks_per_row = self.num_tokens // size
        group, head = self.group_size, self.head_dim
        self.by_query = pl.BlockSpec((None, group, size, head), lambda k, p, q, *_: (k, 0, q[p], 0))
        self.by_query_row = pl.BlockSpec((None, group, size), lambda k, p, q, *_: (k, 0, q[p]))
        self.by_key = pl.BlockSpec((None, size, head), lambda k, p, q, kb, *_: (k, kb[p], 0))
        self.query_info = pl.BlockSpec((INFO_ROWS, size), lambda k, p, q, *_: (0, q[p]))
        self.key_info = pl.BlockSpec((INFO_ROWS, size), lambda k, p, q, kb, *_: (0, kb[p]))
        per_row = self.blocks_per_row
        self.whole_row = pl.BlockSpec(
            (None, self.num_tokens, head), lambda k, p, q, *_: (k, q[p] // per_row, 0), pipeline_mode=pl.Buffered(1)
        )

    def arrays(self, query: Array, keys: Array, values: Array) -> tuple[Array, Array, Array]:
        keys, values = (x.swapaxes(0, 1).reshape(self.num_kv_heads, -1, self.head_dim) for x in (keys, values))
        return self.to_heads(query), keys, values

    def to_heads(self, x: Float[Array, "R T Q H"]) -> Float[Array, "K G N H"]:
        return x.reshape(-1, self.num_kv_heads, self.group_size, self.head_dim).transpose(1, 2, 0, 3)

    def from_heads(self, x: Float[Array, "K G N H"]) -> Float[Array, "R T Q H"]:
        return x.transpose(2, 0, 1, 3).reshape(self.rows, self.num_tokens, -1, self.head_dim)
