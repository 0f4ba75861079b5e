"""Logprobs and entropies of target tokens from hidden states, computed without a [tokens, vocab] array."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from app.mesh.axis_rules import constrain, row_shard_size
from app.model.decoder import Decoder, LMHead
from app.model.segment_layout import SegmentLayout

LM_HEAD_SCOPE = "lm_head"
"""The name scope of the LM head in compiled programs."""


@jax.named_scope(LM_HEAD_SCOPE)
def scaled_logits(
    hidden: Float[Array, "*rows D"], head: LMHead, temperature: Float32[Array, ""] | float
) -> Float32[Array, "*rows V"]:
    """Returns the head's logits / temperature in float32, as used by both sampler and scorer."""
    return head.logits(hidden) / temperature


EntropyFn = Callable[[Array], Array]
"""log_softmax over the last dim -> entropy in nats."""


def entropy(log_softmax: Float32[Array, "*rows V"]) -> Float32[Array, "*rows"]:
    """Returns -sum(p log p)."""
    # log_normalizer - sum(p * logits) would lose digits in proportion to the square of the logits.
    return -jnp.sum(jnp.exp(log_softmax) * log_softmax, axis=-1)


def detached_entropy(log_softmax: Float32[Array, "*rows V"]) -> Float32[Array, "*rows"]:
    """Returns `entropy` without a gradient, so that nothing is kept for the backward pass."""
    return entropy(jax.lax.stop_gradient(log_softmax))


@jax.named_scope(LM_HEAD_SCOPE)
def token_logprobs(
    hidden: Float[Array, "R C D"],
    head: LMHead,
    targets: Int32[Array, "R C"],
    target_mask: Bool[Array, "R C"],
    *,
    temperature: Float32[Array, ""] | float,
    chunk: int,
    entropy_fn: EntropyFn = detached_entropy,
) -> tuple[Float32[Array, "R C"], Float32[Array, "R C"]]:
    """Returns the natural logprob of each target, and the entropy in nats of its distribution.

    The logprob is log_softmax(logits / temperature)[target] over the whole vocabulary. `chunk` tokens of every row pass
    through the head at once, forward and backward; the result does not depend on `chunk`. Chunks without targets are
    skipped, and their results are 0. The temperature gets no gradient.

    Args:
        target_mask: True where there is a target; results elsewhere are finite and undefined.
    """

    def compute_chunk(hidden: Array, table: Array, targets: Array, temperature: Array) -> tuple[Array, Array]:
        logits = scaled_logits(hidden, LMHead(table, head.soft_cap), temperature)
        logits = constrain(logits, "rows", "tokens", "vocab")
        log_normalizer = jax.nn.logsumexp(logits, axis=-1)
        # A comparison, unlike a gather, stays local if the vocabulary is split over tp.
        chosen = jnp.arange(logits.shape[-1]) == targets[..., None]
        target_logits = jnp.sum(jnp.where(chosen, logits, 0.0), axis=-1)
        return target_logits - log_normalizer, entropy_fn(logits - log_normalizer[..., None])

    num_tokens = targets.shape[1]
    chunk = min(chunk, num_tokens)
    hidden = jnp.pad(hidden, ((0, 0), (0, -num_tokens % chunk), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, -num_tokens % chunk)))
    target_mask = jnp.pad(target_mask, ((0, 0), (0, -num_tokens % chunk)))
    has_targets = target_mask.reshape(target_mask.shape[0], -1, chunk).any(axis=(0, 2))
    temperature = jnp.asarray(temperature, jnp.float32)
    # JAX declares no return type for custom_vjp functions.
    by_chunk: Any = _map_chunks(compute_chunk, chunk, hidden, head.table, targets, has_targets, temperature)
    logprobs, entropies = by_chunk
    return logprobs[:, :num_tokens], entropies[:, :num_tokens]


ChunkFn = Callable[[Array, Array, Array, Array], tuple[Array, Array]]
"""(hidden [R, chunk, D], table [V, D], targets [R, chunk], temperature) -> (logprobs, entropies), [R, chunk] each."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _map_chunks(
    chunk_fn: ChunkFn,
    chunk_size: int,
    hidden: Float[Array, "R C D"],
    table: Float[Array, "V D"],
    targets: Int32[Array, "R C"],
    has_targets: Bool[Array, "chunks"],
    temperature: Float32[Array, ""],
) -> tuple[Float32[Array, "R C"], Float32[Array, "R C"]]:
    """Applies a function to the chunks with targets, one after another; the results of other chunks are 0.

    JAX cannot differentiate a loop of data-dependent length; the custom backward pass keeps only the inputs.
    """

    def write(i: Array, results: tuple[Array, Array]) -> tuple[Array, Array]:
        first = chunks[i] * chunk_size
        new = chunk_fn(
            _slice_tokens(hidden, first, chunk_size), table, _slice_tokens(targets, first, chunk_size), temperature
        )
        return _update_tokens(results[0], new[0], first), _update_tokens(results[1], new[1], first)

    chunks, num_chunks = _order_chunks(has_targets)
    none = jnp.zeros(targets.shape, jnp.float32), jnp.zeros(targets.shape, jnp.float32)
    return jax.lax.fori_loop(0, num_chunks, write, none)


def _map_chunks_forward(
    chunk_fn: ChunkFn, chunk_size: int, *inputs: Array
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    return _map_chunks(chunk_fn, chunk_size, *inputs), inputs


def _map_chunks_backward(
    chunk_fn: ChunkFn, chunk_size: int, inputs: tuple[Array, ...], result_grads: tuple[Array, Array]
) -> tuple:
    hidden, table, targets, has_targets, temperature = inputs

    def add(i: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        first = chunks[i] * chunk_size

        def recompute(hidden: Array, table: Array) -> tuple[Array, Array]:
            return chunk_fn(hidden, table, _slice_tokens(targets, first, chunk_size), temperature)

        _, pull = jax.vjp(recompute, _slice_tokens(hidden, first, chunk_size), table)
        hidden_grad, table_grad = pull(tuple(_slice_tokens(x, first, chunk_size) for x in result_grads))
        return _update_tokens(sums[0], hidden_grad, first), constrain(sums[1] + table_grad, "vocab", "embed")

    chunks, num_chunks = _order_chunks(has_targets)
    none = jnp.zeros_like(hidden), jnp.zeros_like(table)
    hidden_grads, table_grad = jax.lax.fori_loop(0, num_chunks, add, none)
    return hidden_grads, table_grad, None, None, None


_map_chunks.defvjp(_map_chunks_forward, _map_chunks_backward)


def _slice_tokens(x: Array, first: Array, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, first, size, axis=1)


def _update_tokens(x: Array, part: Array, first: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, first, axis=1)


def _order_chunks(has_targets: Bool[Array, "n"]) -> tuple[Int32[Array, "n"], Int32[Array, ""]]:
    """Returns the chunk indices, chunks with targets first, and the number of chunks with targets."""
    return jnp.argsort(~has_targets, stable=True), jnp.sum(has_targets, dtype=jnp.int32)


def hidden_before_targets(hidden: Float[Array, "R T D"], logits_indices: Int32[Array, "R C"]) -> Float[Array, "R C D"]:
    """Returns the hidden state before each target; undefined where there is no target."""
    return jnp.take_along_axis(hidden, jnp.maximum(logits_indices, 0)[:, :, None], axis=1)


def completion_logprobs(
    decoder: Decoder,
    *,
    token_ids: Int32[Array, "R T"],
    layout: SegmentLayout,
    logits_indices: Int32[Array, "R C"],
    targets: Int32[Array, "R C"],
    target_mask: Bool[Array, "R C"],
    temperature: Float32[Array, ""] | float,
    dtype: jnp.dtype,
    remat: str,
    logits_chunk: int,
    entropy_fn: EntropyFn = detached_entropy,
) -> tuple[Float32[Array, "R C"], Float32[Array, "R C"]]:
    """Returns the logprob and entropy of each completion token of packed rows; every role runs this forward pass.

    Only the hidden states at `logits_indices` (the position before each target) pass through the LM head.

    Args:
        target_mask: True where there is a target; results elsewhere are finite and undefined.
        logits_chunk: number of tokens per device that pass through the LM head at once, at least one per row.
    """
    hidden = decoder.hidden(token_ids, layout, dtype=dtype, remat=remat)
    return token_logprobs(
        hidden_before_targets(hidden, logits_indices),
        decoder.head,
        targets,
        target_mask,
        temperature=temperature,
        chunk=max(1, logits_chunk // row_shard_size(targets.shape[0])),
        entropy_fn=entropy_fn,
    )
