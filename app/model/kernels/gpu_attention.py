"""Attention over packed rows as Pallas kernels for GPUs, compiled by Triton: forward and backward over pairs of blocks.

One program computes a block of queries of one head, or the gradients of a block of keys for one query head: it loops
over the pairs of its block, and its sums stay in registers. Operands keep their dtype; scores, softmax and sums are
float32. Programs never write to the same elements, so results do not depend on their order.

cuDNN's attention, which `jax.nn.dot_product_attention` can call, does not support shared prompts: they would need a
[tokens, tokens] bias, and every pair would be computed.

Source: Dao 2023, FlashAttention-2, algorithms 1 and 2.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Float32

from app.model.attention.dense import MASK_VALUE, ScoreMod
from app.model.attention.pairs import Blocking, PackedInputs
from app.model.kernels.pair_scores import is_visible, pair_scores, pair_scores_grad, product, token_info

MIN_HEAD_DIM = 16
"""The smallest inner dim of a matmul on tensor cores."""
QUERY_PARAMS = triton.CompilerParams(num_warps=4, num_stages=2)
KEYS_PARAMS = triton.CompilerParams(num_warps=8, num_stages=2)
"""The gradients of keys and values need eight warps: their accumulators do not fit in the registers of four."""


def attend(
    score_mod: ScoreMod, blocking: Blocking, inputs: PackedInputs
) -> tuple[Float[Array, "R T Q H"], Float32[Array, "K G N"]]:
    """Returns one device's attention output, and the log-sum-exp of the scores of each of the N = R * T queries.

    Args:
        inputs: must have at least one pair for each query block.
    """
    query, keys, values, layout, pairs, window = inputs
    call = GpuCall(inputs, blocking.block_size)
    by_query, _ = _pair_lists(*pairs.inside(window), call.num_blocks)
    mixed, normalizer = pl.pallas_call(
        functools.partial(_forward_kernel, score_mod, score_mod.scale_for(call.head_dim)),
        grid=call.grid,
        in_specs=[call.query_block, call.key_row, call.key_row, *[pl.BlockSpec()] * 4],
        out_specs=[call.query_block, call.query_numbers],
        out_shape=[
            jax.ShapeDtypeStruct(call.query_shape, query.dtype),
            jax.ShapeDtypeStruct(call.numbers_shape, jnp.float32),
        ],
        compiler_params=QUERY_PARAMS,
        name="attention_forward",
    )(
        *(call.by_token(query), call.padded(keys), call.padded(values), token_info(layout), window.reshape(1)),
        *by_query,
    )
    return call.from_tokens(mixed), normalizer.reshape(keys.shape[1], -1, normalizer.shape[1])


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
    call = GpuCall(inputs, blocking.block_size)
    mean = jnp.einsum("rtqh,rtqh->qrt", mixed_grad, mixed, preferred_element_type=jnp.float32)
    arrays = (
        *(call.by_token(query), call.padded(keys), call.padded(values), call.by_token(mixed_grad.astype(query.dtype))),
        *(normalizer.reshape(call.numbers_shape), mean.reshape(call.numbers_shape)),
        *(token_info(layout), window.reshape(1)),
    )
    by_query, by_key = _pair_lists(*pairs.inside(window), call.num_blocks)
    query_grad = pl.pallas_call(
        functools.partial(_query_kernel, score_mod, score_mod.scale_for(call.head_dim)),
        in_specs=[
            *(call.query_block, call.key_row, call.key_row, call.query_block),
            *(call.query_numbers, call.query_numbers, *[pl.BlockSpec()] * 4),
        ],
        out_specs=call.query_block,
        out_shape=jax.ShapeDtypeStruct(call.query_shape, query.dtype),
        grid=call.grid,
        compiler_params=QUERY_PARAMS,
        name="attention_backward_query",
    )(*arrays, *by_query)
    by_query_head = jax.ShapeDtypeStruct((*query.shape[::2], keys.shape[2], call.query_shape[2]), jnp.float32)
    parts = pl.pallas_call(
        functools.partial(_keys_kernel, score_mod, score_mod.scale_for(call.head_dim)),
        in_specs=[
            *(call.query_row, call.key_block, call.key_block, call.query_row),
            *(call.row_numbers, call.row_numbers, *[pl.BlockSpec()] * 4),
        ],
        out_specs=[call.grad_block, call.grad_block],
        out_shape=[by_query_head, by_query_head],
        grid=call.grid,
        compiler_params=KEYS_PARAMS,
        name="attention_backward_keys",
    )(*arrays, *by_key)
    keys_grad, values_grad = (
        x.reshape(*keys.shape[:2], -1, *x.shape[2:]).sum(axis=2)[..., : keys.shape[3]].astype(keys.dtype) for x in parts
    )
    return call.from_tokens(query_grad), keys_grad, values_grad


def _forward_kernel(score_mod: ScoreMod, scale: float, *refs: Any) -> None:
    query, keys, values, info, window, starts, key_blocks, mixed, normalizer = refs
    size, block = query.shape[0], pl.program_id(0)
    own = query[...]

    def add(pair: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest, total, mixed = sums
        tokens = _tokens_in_row(key_blocks[pair], size, keys.shape[0])
        scores = pair_scores(score_mod, scale, own, keys[tokens, :])
        scores = jnp.where(_visible_mask(info, block, key_blocks[pair], size, window[0]), scores, MASK_VALUE)
        new_highest = jnp.maximum(highest, jnp.max(scores, axis=1))
        shrink, weights = jnp.exp(highest - new_highest), jnp.exp(scores - new_highest[:, None])
        mixed = mixed * shrink[:, None] + product(weights.astype(values.dtype), values[tokens, :], (1, 0))
        return new_highest, total * shrink + jnp.sum(weights, axis=1), mixed

    none = jnp.full(size, MASK_VALUE, jnp.float32), jnp.zeros(size, jnp.float32), jnp.zeros(own.shape, jnp.float32)
    highest, total, sums = jax.lax.fori_loop(starts[block], starts[block + 1], add, none)
    mixed[...] = (sums / total[:, None]).astype(mixed.dtype)
    normalizer[...] = highest + jnp.log(total)


def _query_kernel(score_mod: ScoreMod, scale: float, *refs: Any) -> None:
    query, keys, values, output_grad, normalizer, mean, info, window, starts, key_blocks, query_grad = refs
    size, block = query.shape[0], pl.program_id(0)
    own, own_grad, own_normalizer, own_mean = query[...], output_grad[...], normalizer[...], mean[...]

    def add(pair: Array, total: Array) -> Array:
        tokens = _tokens_in_row(key_blocks[pair], size, keys.shape[0])
        key = keys[tokens, :]
        visible = _visible_mask(info, block, key_blocks[pair], size, window[0])
        scores = pair_scores(score_mod, scale, own, key)
        weights = jnp.where(visible, jnp.exp(scores - own_normalizer[:, None]), 0.0)
        weights_grad = product(own_grad, values[tokens, :], (1, 1))
        grad = pair_scores_grad(score_mod, scores, weights, weights_grad - own_mean[:, None])
        return total + product(grad.astype(key.dtype), key, (1, 0))

    none = jnp.zeros(own.shape, jnp.float32)
    query_grad[...] = (jax.lax.fori_loop(starts[block], starts[block + 1], add, none) * scale).astype(query_grad.dtype)


def _keys_kernel(score_mod: ScoreMod, scale: float, *refs: Any) -> None:
    query, keys, values, output_grad, normalizer, mean, info, window, starts, query_blocks, keys_grad, values_grad = (
        refs
    )
    size, block = keys.shape[0], pl.program_id(0)
    key, value = keys[...], values[...]

    def add(pair: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        tokens = _tokens_in_row(query_blocks[pair], size, query.shape[0])
        queries, queries_grad = query[tokens, :], output_grad[tokens, :]
        # [keys, queries], so that no matmul has to transpose weights.
        visible = _visible_mask(info, query_blocks[pair], block, size, window[0], keys_first=True)
        scores = pair_scores(score_mod, scale, key, queries)
        weights = jnp.where(visible, jnp.exp(scores - normalizer[tokens][None, :]), 0.0)
        weights_grad = product(value, queries_grad, (1, 1))
        grad = pair_scores_grad(score_mod, scores, weights, weights_grad - mean[tokens][None, :])
        return (
            sums[0] + product(grad.astype(key.dtype), queries, (1, 0)),
            sums[1] + product(weights.astype(value.dtype), queries_grad, (1, 0)),
        )

    none = jnp.zeros(key.shape, jnp.float32), jnp.zeros(key.shape, jnp.float32)
    key_sum, values_grad[...] = jax.lax.fori_loop(starts[block], starts[block + 1], add, none)
    keys_grad[...] = key_sum * scale


def _visible_mask(
    info: Any, query_block: Array, key_block: Array, size: int, window: Array, *, keys_first: bool = False
) -> Bool[Array, "size size"]:
    """Returns whether each query sees each key, as [queries, keys] or [keys, queries]."""
    queries = slice(None), None
    keys = None, slice(None)
    if keys_first:
        queries, keys = keys, queries
    at_query, at_key = pl.ds(query_block * size, size), pl.ds(key_block * size, size)
    order = jnp.arange(size)
    return is_visible(
        (info[1, at_query][queries], info[2, at_query][queries], info[3, at_query][queries]),
        (info[0, at_key][keys], info[3, at_key][keys]),
        order[keys] - order[queries] <= (query_block - key_block) * size,
        window,
    )


def _tokens_in_row(block: Array, size: int, num_tokens: int) -> Any:
    """Returns the index range of a block's tokens in its row."""
    return pl.ds(block % (num_tokens // size) * size, size)


def _pair_lists(
    query_blocks: Array, key_blocks: Array, num_pairs: Array, num_blocks: int
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Returns the key blocks of each query block, and the query blocks of each key block.

    Each result is a pair of arrays: the offsets (the start of each block's list, and the end of the last), and all
    lists, concatenated.
    """
    is_pair = jnp.arange(len(query_blocks)) < num_pairs
    query_blocks, key_blocks = (jnp.where(is_pair, blocks, num_blocks) for blocks in (query_blocks, key_blocks))

    def starts(blocks: Array) -> Array:
        return jnp.searchsorted(blocks, jnp.arange(num_blocks + 1), method="compare_all").astype(jnp.int32)

    by_key = jnp.argsort(key_blocks, stable=True)
    return (starts(query_blocks), key_blocks), (starts(key_blocks[by_key]), query_blocks[by_key])


class GpuCall:
    """Shapes and block specs of a kernel call.

    A device's rows are concatenated, and head dims are padded to a power of 2.
    """

    def __init__(self, inputs: PackedInputs, size: int):
        rows, num_tokens, num_heads, self.head_dim = inputs.query.shape
        self.rows, group, per_row = rows, num_heads // inputs.keys.shape[1], num_tokens // size
        self.num_blocks = rows * per_row
        self.grid = (self.num_blocks, num_heads)
        head = max(MIN_HEAD_DIM, pl.next_power_of_2(self.head_dim))
        self.query_shape = (rows * num_tokens, num_heads, head)
        self.numbers_shape = (num_heads, rows * num_tokens)
        self.query_block = pl.BlockSpec((size, None, head), lambda i, h: (i, h, 0))
        self.query_row = pl.BlockSpec((num_tokens, None, head), lambda i, h: (i // per_row, h, 0))
        self.query_numbers = pl.BlockSpec((None, size), lambda i, h: (h, i))
        self.row_numbers = pl.BlockSpec((None, num_tokens), lambda i, h: (h, i // per_row))
        self.key_block = pl.BlockSpec((None, None, size, head), lambda i, h: (i // per_row, h // group, i % per_row, 0))
        self.key_row = pl.BlockSpec((None, None, num_tokens, head), lambda i, h: (i // per_row, h // group, 0, 0))
        self.grad_block = pl.BlockSpec((None, None, size, head), lambda i, h: (i // per_row, h, i % per_row, 0))

    def padded(self, x: Float[Array, "*dims H"]) -> Float[Array, "*dims padded"]:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, self.query_shape[2] - x.shape[-1])])

    def by_token(self, x: Float[Array, "R T Q H"]) -> Float[Array, "N Q padded"]:
        return self.padded(x).reshape(self.query_shape)

    def from_tokens(self, x: Float[Array, "N Q padded"]) -> Float[Array, "R T Q H"]:
        return x[..., : self.head_dim].reshape(self.rows, -1, x.shape[1], self.head_dim)
