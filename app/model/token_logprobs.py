"""Hidden states -> logprobs and entropies of chosen tokens, without ever holding [tokens, vocab]."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from app.mesh.axis_rules import constrain, rows_per_device
from app.model.decoder import Decoder, Head
from app.model.segment_layout import RowLayout


def scaled_logits(
    hidden: Float[Array, "*rows D"], head: Head, temperature: Float32[Array, ""] | float
) -> Float32[Array, "*rows V"]:
    """The head's logits / temperature, in float32: the one definition that sampler and scorer share."""
    return head.logits(hidden) / temperature


Entropy = Callable[[Array], Array]
"""log_softmax over the last dim -> entropy in nats."""


def entropy(log_softmax: Float32[Array, "*rows V"]) -> Float32[Array, "*rows"]:
    """-sum(p log p)."""
    # Not log_normalizer - sum(p * logits): that loses digits with the square of the logits.
    return -jnp.sum(jnp.exp(log_softmax) * log_softmax, axis=-1)


def measured_entropy(log_softmax: Float32[Array, "*rows V"]) -> Float32[Array, "*rows"]:
    """`entropy` as a measurement: without a gradient, so that the backward pass holds nothing for it."""
    return entropy(jax.lax.stop_gradient(log_softmax))


def token_logprobs(
    hidden: Float[Array, "R C D"],
    head: Head,
    targets: Int32[Array, "R C"],
    mask: Bool[Array, "R C"],
    *,
    temperature: Float32[Array, ""] | float,
    chunk: int,
    entropy_of: Entropy = measured_entropy,
) -> tuple[Float32[Array, "R C"], Float32[Array, "R C"]]:
    """Natural logprob of each target, and the entropy in nats of the distribution it was drawn from.

    log_softmax(logits / temperature)[target] over the whole vocabulary. `chunk` tokens of every row pass the head at
    once, forward and backward; the result does not depend on it. Nothing is computed for chunks without any target,
    whose results are 0. No gradient flows to the temperature.

    Args:
        mask: True where there is a target; what stands elsewhere is finite and means nothing.
    """

    def of_chunk(hidden: Array, table: Array, targets: Array, temperature: Array) -> tuple[Array, Array]:
        logits = scaled_logits(hidden, Head(table, head.soft_cap), temperature)
        logits = constrain(logits, "rows", "tokens", "vocab")
        log_normalizer = jax.nn.logsumexp(logits, axis=-1)
        # A comparison instead of a gather: it stays local where the vocabulary is split over tp.
        chosen = jnp.arange(logits.shape[-1]) == targets[..., None]
        target_logits = jnp.sum(jnp.where(chosen, logits, 0.0), axis=-1)
        return target_logits - log_normalizer, entropy_of(logits - log_normalizer[..., None])

    num_tokens = targets.shape[1]
    chunk = min(chunk, num_tokens)
    hidden = jnp.pad(hidden, ((0, 0), (0, -num_tokens % chunk), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, -num_tokens % chunk)))
    mask = jnp.pad(mask, ((0, 0), (0, -num_tokens % chunk)))
    has_targets = mask.reshape(mask.shape[0], -1, chunk).any(axis=(0, 2))
    temperature = jnp.asarray(temperature, jnp.float32)
    # JAX's own types say nothing of what it returns.
    by_chunk: Any = _by_chunk(of_chunk, chunk, hidden, head.table, targets, has_targets, temperature)
    logprobs, entropies = by_chunk
    return logprobs[:, :num_tokens], entropies[:, :num_tokens]


OfChunk = Callable[[Array, Array, Array, Array], tuple[Array, Array]]
"""(hidden [R, chunk, D], table [V, D], targets [R, chunk], temperature) -> (logprobs, entropies), [R, chunk] each."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_chunk(
    of_chunk: OfChunk,
    size: int,
    hidden: Float[Array, "R C D"],
    table: Float[Array, "V D"],
    targets: Int32[Array, "R C"],
    has_targets: Bool[Array, "chunks"],
    temperature: Float32[Array, ""],
) -> tuple[Float32[Array, "R C"], Float32[Array, "R C"]]:
    """`of_chunk` of the chunks that have targets, one after another; 0 for the others.

    Loops as long as there are such chunks, which only a derivative by hand allows. It keeps the inputs alone.
    """

    def write(i: Array, results: tuple[Array, Array]) -> tuple[Array, Array]:
        first = chunks[i] * size
        new = of_chunk(_part(hidden, first, size), table, _part(targets, first, size), temperature)
        return _with_part(results[0], new[0], first), _with_part(results[1], new[1], first)

    chunks, num_chunks = _in_front(has_targets)
    none = jnp.zeros(targets.shape, jnp.float32), jnp.zeros(targets.shape, jnp.float32)
    return jax.lax.fori_loop(0, num_chunks, write, none)


def _by_chunk_forward(of_chunk: OfChunk, size: int, *inputs: Array) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    return _by_chunk(of_chunk, size, *inputs), inputs


def _by_chunk_backward(
    of_chunk: OfChunk, size: int, inputs: tuple[Array, ...], by_results: tuple[Array, Array]
) -> tuple:
    hidden, table, targets, has_targets, temperature = inputs

    def add(i: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        first = chunks[i] * size

        def again(hidden: Array, table: Array) -> tuple[Array, Array]:
            return of_chunk(hidden, table, _part(targets, first, size), temperature)

        _, pull = jax.vjp(again, _part(hidden, first, size), table)
        by_part, by_table = pull(tuple(_part(x, first, size) for x in by_results))
        return _with_part(sums[0], by_part, first), constrain(sums[1] + by_table, "vocab", "embed")

    chunks, num_chunks = _in_front(has_targets)
    none = jnp.zeros_like(hidden), jnp.zeros_like(table)
    by_hidden, by_table = jax.lax.fori_loop(0, num_chunks, add, none)
    return by_hidden, by_table, None, None, None


_by_chunk.defvjp(_by_chunk_forward, _by_chunk_backward)


def _part(x: Array, first: Array, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, first, size, axis=1)


def _with_part(x: Array, part: Array, first: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, first, axis=1)


def _in_front(wanted: Bool[Array, "n"]) -> tuple[Int32[Array, "n"], Int32[Array, ""]]:
    """Indices with those wanted first, in order, and how many they are."""
    return jnp.argsort(~wanted, stable=True), jnp.sum(wanted, dtype=jnp.int32)


def before_targets(hidden: Float[Array, "R T D"], score_index: Int32[Array, "R C"]) -> Float[Array, "R C D"]:
    """The hidden state that stands before each target; any where there is none."""
    return jnp.take_along_axis(hidden, jnp.maximum(score_index, 0)[:, :, None], axis=1)


def completion_logprobs(
    decoder: Decoder,
    *,
    token_ids: Int32[Array, "R T"],
    layout: RowLayout,
    score_index: Int32[Array, "R C"],
    targets: Int32[Array, "R C"],
    mask: Bool[Array, "R C"],
    temperature: Float32[Array, ""] | float,
    dtype: jnp.dtype,
    remat: str,
    logits_chunk: int,
    entropy_of: Entropy = measured_entropy,
) -> tuple[Float32[Array, "R C"], Float32[Array, "R C"]]:
    """Logprob and entropy of each completion token of packed rows: one forward pass for every role.

    Only the hidden states at `score_index` (the position before each target) meet the LM head.

    Args:
        mask: True where there is a target, whoever wrote it; what stands elsewhere is finite and means nothing.
        logits_chunk: tokens of each device that pass the LM head at once, but at least one of each row.
    """
    hidden = decoder.hidden(token_ids, layout, dtype=dtype, remat=remat)
    return token_logprobs(
        before_targets(hidden, score_index),
        decoder.head,
        targets,
        mask,
        temperature=temperature,
        chunk=max(1, logits_chunk // rows_per_device(targets.shape[0])),
        entropy_of=entropy_of,
    )
