"""Attention over long packed rows, computed only for pairs of blocks with visible entries.

Neither the forward nor the backward pass stores a row's [T, T] scores. A pair of blocks is skipped if all its entries
are masked by segments, sibling completions, causality or a window.

Source: Dao et al. 2022, FlashAttention, algorithms 1 and 4; here as one loop over pairs of blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from app.mesh.axis_rules import shard_map_by_dims
from app.model.attention.dense import MASK_VALUE, ScoreMod, apply_soft_cap
from app.model.attention.pairs import Blocking, BlockPairs, PackedInputs
from app.model.layers import keep_result
from app.model.segment_layout import SegmentLayout, attention_mask

# Query heads are split over devices only if the key heads they share are.
QUERY_DIMS = ("rows", "tokens", "kv_heads", "head")
KEY_DIMS = ("rows", "kv_heads", "tokens", "head")
NORMALIZER_DIMS = ("kv_heads", "head", "rows")
ROW_DIMS: Any = ("rows", "tokens")
PAIR_DIMS: Any = ("layers", "rows", "tokens")
INPUT_DIMS = PackedInputs._make(
    [
        *(QUERY_DIMS, KEY_DIMS, KEY_DIMS),
        SegmentLayout(ROW_DIMS, ROW_DIMS, ROW_DIMS),
        BlockPairs(PAIR_DIMS[:1], PAIR_DIMS, PAIR_DIMS, PAIR_DIMS[:2]),
        (),
    ]
)

ATTENTION_CHECKPOINT_NAME = "attention"
"""Name of the attention outputs in `jax.checkpoint` policies; saving them avoids a second forward loop."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def block_attention(inputs: PackedInputs, score_mod: ScoreMod, blocking: Blocking) -> Float[Array, "R T Q H"]:
    """Returns softmax(cap(scale q k^T)) v over the visible keys, and 0 on padding. T is a multiple of the block size.

    This module and each kernel implement `attend` and `attention_grads`, which run on one device's inputs.
    """
    return _forward(inputs, score_mod, blocking)[0]


def _forward(inputs: PackedInputs, score_mod: ScoreMod, blocking: Blocking) -> tuple[Array, tuple]:
    compute = _kernels(blocking.kernel).attend if blocking.kernel else attend
    mix = shard_map_by_dims(
        functools.partial(compute, score_mod, blocking), in_dims=(INPUT_DIMS,), out_dims=(QUERY_DIMS, NORMALIZER_DIMS)
    )
    mixed, normalizer = (keep_result(result, ATTENTION_CHECKPOINT_NAME) for result in mix(inputs))
    return mixed, (inputs, mixed, normalizer)


def _backward(score_mod: ScoreMod, blocking: Blocking, residuals: tuple, output_grad: Array) -> tuple[PackedInputs]:
    compute = _kernels(blocking.kernel).attention_grads if blocking.kernel else attention_grads
    gradients = shard_map_by_dims(
        functools.partial(compute, score_mod, blocking),
        in_dims=(INPUT_DIMS, QUERY_DIMS, NORMALIZER_DIMS, QUERY_DIMS),
        out_dims=(QUERY_DIMS, KEY_DIMS, KEY_DIMS),
    )
    return (PackedInputs._make([*gradients(*residuals, output_grad), None, None, None]),)


def _kernels(platform: Literal["tpu", "gpu"]) -> Any:
    # Pallas is slow to import and not needed on a CPU.
    if platform == "tpu":
        from app.model.kernels import tpu_attention as kernels
    else:
        from app.model.kernels import gpu_attention as kernels
    return kernels


block_attention.defvjp(_forward, _backward)


class PairScores(NamedTuple):
    """The float32 inputs and scores of one iteration's pairs of blocks."""

    query_blocks: Int32[Array, "pairs"]
    key_blocks: Int32[Array, "pairs"]
    scaled_query: Float32[Array, "pairs K G*size H"]
    keys: Float32[Array, "pairs K size H"]
    values: Float32[Array, "pairs K size H"]
    scores: Float32[Array, "pairs K G*size size"]
    """Soft-capped scores; MASK_VALUE for invisible keys, and for padding pairs of the last iteration."""
    soft_cap_slope: Float32[Array, "pairs K G*size size"] | None
    """The derivative of the soft cap at each score; None without a cap."""

    def weights(self, normalizer: Float32[Array, "pairs K G*size"]) -> Float32[Array, "pairs K G*size size"]:
        # The normalizer of a query without visible keys is MASK_VALUE.
        return jnp.where(self.scores > MASK_VALUE, jnp.exp(self.scores - normalizer[..., None]), 0.0)


def _loop_over_pairs(
    score_mod: ScoreMod, blocking: Blocking, inputs: PackedInputs
) -> tuple[tuple[Array, Array, Array], Array, Callable[[Array], PairScores]]:
    """Returns blocks of query, keys and values, the number of iterations, and a function iteration -> its scores.

    The G query heads that share a key head are stacked, so the scores of a pair take one matmul per key head.
    """
    size, at_once, _ = blocking
    query = _to_query_blocks(inputs.query, inputs.keys.shape[1], size)
    keys, values = _to_key_blocks(inputs.keys, size), _to_key_blocks(inputs.values, size)
    layout = SegmentLayout(*(x.reshape(-1, size) for x in inputs.layout))
    *pairs, num_pairs = inputs.pairs.inside(inputs.window)
    by_iteration = [jnp.pad(blocks, (0, -blocks.size % at_once)).reshape(-1, at_once) for blocks in pairs]

    def pair_scores(iteration: Array) -> PairScores:
        blocks = query_blocks, key_blocks = [x[iteration] for x in by_iteration]
        scaled = query[query_blocks].astype(jnp.float32) * score_mod.scale_for(query.shape[-1])
        of_keys, of_values = (x[key_blocks].astype(jnp.float32) for x in (keys, values))
        scores = apply_soft_cap(jnp.einsum("pkmh,pknh->pkmn", scaled, of_keys), score_mod.soft_cap)
        slope = None if score_mod.soft_cap is None else 1 - jnp.square(scores / score_mod.soft_cap)
        by_head = scores.reshape(*of_keys.shape[:2], -1, size, size)
        at_queries, at_keys = (SegmentLayout(*(x[numbers] for x in layout)) for numbers in blocks)
        visible = attention_mask(at_queries, at_keys, (query_blocks - key_blocks)[:, None] * size, inputs.window)
        visible &= (iteration * at_once + jnp.arange(at_once) < num_pairs)[:, None, None]
        masked = jnp.where(visible[:, None, None], by_head, MASK_VALUE).reshape(scores.shape)
        return PairScores(query_blocks, key_blocks, scaled, of_keys, of_values, masked, slope)

    return (query, keys, values), (num_pairs + at_once - 1) // at_once, pair_scores


def attend(
    score_mod: ScoreMod, blocking: Blocking, inputs: PackedInputs
) -> tuple[Float[Array, "R T Q H"], Float32[Array, "K G N"]]:
    """Returns one device's attention output, and the log-sum-exp of the scores of each of the N = R * T queries."""
    query, num_kv_heads = inputs.query, inputs.keys.shape[1]
    (by_block, *_), num_iterations, pair_scores = _loop_over_pairs(score_mod, blocking, inputs)

    def add(iteration: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        mixed, highest, total = sums
        scores = pair_scores(iteration)
        blocks = scores.query_blocks
        new_highest = highest.at[blocks].max(scores.scores.max(axis=-1))
        # Pairs computed together may share a query block, which must be rescaled only once.
        touched = blocks if blocking.pairs_per_iteration == 1 else slice(None)
        shrink = jnp.exp(highest[touched] - new_highest[touched])
        weights = scores.weights(new_highest[blocks])
        mixed = mixed.at[touched].multiply(shrink[..., None])
        mixed = mixed.at[blocks].add(jnp.einsum("pkmn,pknh->pkmh", weights, scores.values))
        total = total.at[touched].multiply(shrink).at[blocks].add(weights.sum(axis=-1))
        return mixed, new_highest, total

    shape = by_block.shape
    none = jnp.zeros(shape, jnp.float32), jnp.full(shape[:-1], MASK_VALUE), jnp.zeros(shape[:-1], jnp.float32)
    mixed, highest, total = jax.lax.fori_loop(0, num_iterations, add, none)
    total = jnp.where(total > 0, total, 1.0)
    # [blocks, K, G * size] -> [K, G, N], with the tokens of all rows in order.
    group_size = query.shape[2] // num_kv_heads
    normalizer = (highest + jnp.log(total)).reshape(-1, num_kv_heads, group_size, blocking.block_size)
    normalizer = normalizer.transpose(1, 2, 0, 3).reshape(*normalizer.shape[1:3], -1)
    return _from_query_blocks(mixed / total[..., None], query), normalizer


def attention_grads(
    score_mod: ScoreMod,
    blocking: Blocking,
    inputs: PackedInputs,
    mixed: Float[Array, "R T Q H"],
    normalizer: Float32[Array, "K G N"],
    mixed_grad: Float[Array, "R T Q H"],
) -> tuple[Float[Array, "R T Q H"], Float[Array, "R K T H"], Float[Array, "R K T H"]]:
    """Returns the gradients of one device's query, keys and values, given the output's gradient `mixed_grad`.

    `mixed` and `normalizer` are the results of `attend`. Each iteration recomputes its scores.
    """
    query, keys, values, *_ = inputs
    blocks, num_iterations, pair_scores = _loop_over_pairs(score_mod, blocking, inputs)
    mixed, mixed_grad = (
        _to_query_blocks(x, keys.shape[1], blocking.block_size).astype(jnp.float32) for x in (mixed, mixed_grad)
    )
    by_block = normalizer.reshape(*normalizer.shape[:2], -1, blocking.block_size).transpose(2, 0, 1, 3)
    normalizer = by_block.reshape(mixed.shape[:-1])
    mean = jnp.sum(mixed_grad * mixed, axis=-1)

    def add(iteration: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        query_grad, keys_grad, values_grad = sums
        query_blocks, key_blocks, *_ = scores = pair_scores(iteration)
        weights, output_grad = scores.weights(normalizer[query_blocks]), mixed_grad[query_blocks]
        weights_grad = jnp.einsum("pkmh,pknh->pkmn", output_grad, scores.values)
        scores_grad = weights * (weights_grad - mean[query_blocks][..., None])
        scores_grad = scores_grad if scores.soft_cap_slope is None else scores_grad * scores.soft_cap_slope
        return (
            query_grad.at[query_blocks].add(jnp.einsum("pkmn,pknh->pkmh", scores_grad, scores.keys)),
            keys_grad.at[key_blocks].add(jnp.einsum("pkmn,pkmh->pknh", scores_grad, scores.scaled_query)),
            values_grad.at[key_blocks].add(jnp.einsum("pkmn,pkmh->pknh", weights, output_grad)),
        )

    none = tuple(jnp.zeros(x.shape, jnp.float32) for x in blocks)
    query_grad, keys_grad, values_grad = jax.lax.fori_loop(0, num_iterations, add, none)
    query_grad = query_grad * score_mod.scale_for(query.shape[-1])
    return (
        _from_query_blocks(query_grad, query),
        _from_key_blocks(keys_grad, keys),
        _from_key_blocks(values_grad, values),
    )


def _to_query_blocks(x: Float[Array, "R T Q H"], num_kv_heads: int, size: int) -> Float[Array, "blocks K G*size H"]:
    grouped = x.reshape(-1, size, num_kv_heads, x.shape[2] // num_kv_heads, x.shape[3])
    return grouped.transpose(0, 2, 3, 1, 4).reshape(grouped.shape[0], num_kv_heads, -1, x.shape[3])


def _from_query_blocks(x: Float[Array, "blocks K G*size H"], like: Float[Array, "R T Q H"]) -> Float[Array, "R T Q H"]:
    num_blocks, num_kv_heads, _, head_dim = x.shape
    grouped = x.reshape(num_blocks, num_kv_heads, like.shape[2] // num_kv_heads, -1, head_dim)
    return grouped.transpose(0, 3, 1, 2, 4).reshape(like.shape).astype(like.dtype)


def _to_key_blocks(x: Float[Array, "R K T H"], size: int) -> Float[Array, "blocks K size H"]:
    rows, num_kv_heads, _, head_dim = x.shape
    return x.reshape(rows, num_kv_heads, -1, size, head_dim).swapaxes(1, 2).reshape(-1, num_kv_heads, size, head_dim)


def _from_key_blocks(x: Float[Array, "blocks K size H"], like: Float[Array, "R K T H"]) -> Float[Array, "R K T H"]:
    return x.reshape(like.shape[0], -1, *x.shape[1:]).swapaxes(1, 2).reshape(like.shape).astype(like.dtype)
