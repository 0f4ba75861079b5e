"""Logprobs and entropies of target tokens from hidden states, computed without a [tokens, vocab] array."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt8

from app.mesh.axis_rules import row_shard_size
from app.model.decoder import Decoder, LMHead
from app.model.segment_layout import SegmentLayout
from app.model.sharded_head import ShardedHead

LM_HEAD_SCOPE = "lm_head"
"""The name scope of the LM head in compiled programs."""


@jax.named_scope(LM_HEAD_SCOPE)
def scaled_logits(
    hidden: Float[Array, "*rows D"], head: LMHead, temperature: Float32[Array, ""] | float
) -> Float32[Array, "*rows V"]:
    """Returns the head's logits / temperature in float32, as used by both sampler and scorer."""
    return head.logits(hidden) / temperature


@jax.named_scope(LM_HEAD_SCOPE)
def token_logprobs(
    hidden: Float[Array, "R C D"],
    head: LMHead,
    targets: Int32[Array, "R C"],
    target_mask: Bool[Array, "R C"],
    *,
    temperature: Float32[Array, ""] | float,
    chunk: int,
    entropy_gradient: bool = False,
) -> tuple[Float32[Array, "R C"], Float32[Array, "R C"]]:
    """Returns the natural logprob of each target, and the entropy in nats of its distribution.

    The logprob is log_softmax(logits / temperature)[target] over the whole vocabulary. `chunk` tokens of every row pass
    through the head at once, forward and backward; the result does not depend on `chunk`. Chunks without targets are
    skipped, and their results are 0. The temperature gets no gradient.

    Args:
        target_mask: True where there is a target; results elsewhere are finite and undefined.
        entropy_gradient: whether the entropy has a gradient.
    """
    num_tokens = targets.shape[1]
    chunk = min(chunk, num_tokens)
    padding = ((0, 0), (0, -num_tokens % chunk))
    hidden = jnp.pad(hidden, (*padding, (0, 0)))
    targets, target_mask = jnp.pad(targets, padding), jnp.pad(target_mask, padding)
    has_targets = target_mask.reshape(target_mask.shape[0], -1, chunk).any(axis=(0, 2))
    sharded = ShardedHead(chunk, head.soft_cap, entropy_gradient, num_rows=len(targets), vocab_size=len(head.table))
    # JAX declares no return type for custom_vjp functions.
    by_token: Any = _apply_head(
        sharded, hidden, head.table, targets, has_targets, jnp.asarray(temperature, jnp.float32)
    )
    logprobs, entropies = by_token
    return logprobs[:, :num_tokens], entropies[:, :num_tokens]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply_head(head: ShardedHead, *inputs: Array) -> tuple[Array, Array]:
    """Returns logprobs and entropies. JAX cannot differentiate the loop, whose length depends on data."""
    return head.apply(*inputs)[:2]


def _apply_head_forward(head: ShardedHead, *inputs: Array) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    logprobs, entropies, normalizers = head.apply(*inputs)
    return (logprobs, entropies), (*inputs, entropies, normalizers)


def _apply_head_backward(head: ShardedHead, kept: tuple[Array, ...], grads: tuple[Array, Array]) -> tuple:
    return *head.gradients(*kept, *grads), None, None, None


_apply_head.defvjp(_apply_head_forward, _apply_head_backward)


def hidden_before_targets(hidden: Float[Array, "R T D"], logits_indices: Int32[Array, "R C"]) -> Float[Array, "R C D"]:
    """Returns the hidden state before each target; undefined where there is no target."""
    return jnp.take_along_axis(hidden, jnp.maximum(logits_indices, 0)[:, :, None], axis=1)


class CompletionLogprobs(NamedTuple):
    """The results of a forward pass for the completion tokens of packed rows."""

    logprobs: Float32[Array, "R C"]
    entropies: Float32[Array, "R C"]
    """In nats, of the distributions that the tokens were drawn from."""
    routes: Int32[Array, "L R T k"] | None
    """The routers' choices for all tokens; None without experts."""


def completion_logprobs(
    decoder: Decoder,
    *,
    token_ids: Int32[Array, "R T"],
    layout: SegmentLayout,
    logits_indices: Int32[Array, "R C"],
    targets: Int32[Array, "R C"],
    target_mask: Bool[Array, "R C"],
    recorded: UInt8[Array, "R T L k"] | None = None,
    temperature: Float32[Array, ""] | float,
    dtype: jnp.dtype,
    remat: str,
    logits_chunk: int,
    entropy_gradient: bool = False,
) -> CompletionLogprobs:
    """Returns the logprob and entropy of each completion token of packed rows; every role runs this forward pass.

    Only the hidden states at `logits_indices` (the position before each target) pass through the LM head.

    Args:
        target_mask: True where there is a target; results elsewhere are finite and undefined.
        recorded: the routes to replay, if there are experts.
        logits_chunk: number of tokens per device that pass through the LM head at once, at least one per row.
    """
    hidden, routes = decoder.hidden_and_routes(token_ids, layout, recorded=recorded, dtype=dtype, remat=remat)
    scored = token_logprobs(
        hidden_before_targets(hidden, logits_indices),
        decoder.head,
        targets,
        target_mask,
        temperature=temperature,
        chunk=max(1, logits_chunk // row_shard_size(targets.shape[0])),
        entropy_gradient=entropy_gradient,
    )
    return CompletionLogprobs(*scored, routes)
