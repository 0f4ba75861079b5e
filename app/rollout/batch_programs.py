"""Compiled programs for one batch: rows copy the caches of their prompts and decode together until all are done."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, Key

from app.mesh.axis_rules import constrain
from app.model.decode_weights import DecodeWeights
from app.model.decoder import DecoderDefinition
from app.model.experts import pack_routes
from app.model.kv_cache import KVCache, constrain_cache
from app.model.prefill_and_decode import DECODE_SCOPE, decode_step
from app.rollout.sampling.token_sampling import Sampler, SamplingRules, draw_tokens, token_outcomes


class BatchDecodeState(NamedTuple):
    """State of the decode loop. A row is done after an end-of-sequence token or its last allowed token."""

    cache: KVCache
    token_ids: Int32[Array, "B C"]
    logprobs: Float32[Array, "B C"]
    kept_mass_logs: Float32[Array, "B C"]
    lengths: Int32[Array, "B"]
    """Number of tokens drawn so far."""
    done: Bool[Array, "B"]
    stopped: Bool[Array, "B"]
    """True if an end-of-sequence token was drawn."""
    non_finite: Bool[Array, "B"]
    """True if the logits were not finite; the row then ends without a token from that step."""
    routes: Int32[Array, "B C words"] | None
    """Routes of the token before each one drawn, except the first, if they are recorded."""


class RowConstants(NamedTuple):
    """Per-row values that do not change during decoding."""

    prompt_index: Int32[Array, "B"]
    """Index of the row's prompt among the prefilled prompts."""
    prompt_lengths: Int32[Array, "B"]
    keys: Key[Array, "B"]
    max_new_tokens: Int32[Array, "B"]


def init_decode_state(
    hidden: Float[Array, "P D"],
    cache: KVCache,
    rows: RowConstants,
    *,
    cache_length: int,
    num_new: int,
    num_route_words: int = 0,
) -> tuple[Float[Array, "B D"], BatchDecodeState]:
    """Copies each prompt's cache to the rows of its samples, padded to `cache_length` tokens."""

    def insert(x: Array) -> Array:
        return jnp.pad(x[rows.prompt_index], ((0, 0), (0, 0), (0, cache_length - x.shape[2]), (0, 0)))

    cache = constrain_cache(jax.tree.map(insert, cache))
    empty = rows.max_new_tokens == 0
    buffer = constrain(jnp.zeros((rows.prompt_index.shape[0], num_new), jnp.float32), "rows", "tokens")
    words = jnp.zeros((*buffer.shape, num_route_words), jnp.int32)
    slots = BatchDecodeState(
        cache=cache,
        token_ids=buffer.astype(jnp.int32),
        logprobs=buffer,
        kept_mass_logs=jnp.zeros_like(buffer),
        lengths=jnp.zeros_like(rows.prompt_index),
        done=empty,
        stopped=jnp.zeros_like(empty),
        non_finite=jnp.zeros_like(empty),
        routes=constrain(words, "rows", "tokens", "routes") if num_route_words else None,
    )
    return constrain(hidden[rows.prompt_index], "rows", "activation"), slots


def make_decode_loop(
    definition: DecoderDefinition, sampler: Sampler
) -> Callable[..., tuple[BatchDecodeState, Bool[Array, ""]]]:
    """Returns the on-device loop over the tokens of a segment, for one kind of sampler.

    The argument `steps` of the loop holds the first token and the end (exclusive) of the segment, counted from the
    batch's first token, so that one program serves all segments. Its second result is True once all rows are done.
    """

    def loop(
        weights: DecodeWeights,
        hidden: Float[Array, "B D"],
        rows: RowConstants,
        *,
        slots: BatchDecodeState,
        steps: Int32[Array, "2"],
        rules: SamplingRules,
        eos_ids: Int32[Array, "ids"],
    ) -> tuple[BatchDecodeState, Bool[Array, ""]]:
        head = definition.bind(weights.params).head

        def draw_next(hidden: Array, state: BatchDecodeState) -> BatchDecodeState:
            positions = rows.prompt_lengths + state.lengths
            sampled = draw_tokens(sampler, hidden, head, rules, rows.keys, positions)
            active, ends, broken = token_outcomes(sampled, ~state.done, eos_ids)
            writes = (jnp.arange(state.token_ids.shape[1]) == state.lengths[:, None]) & active[:, None]
            lengths = state.lengths + active
            return state._replace(
                token_ids=jnp.where(writes, sampled.token_ids[:, None], state.token_ids),
                logprobs=jnp.where(writes, sampled.logprobs[:, None], state.logprobs),
                kept_mass_logs=jnp.where(writes, sampled.kept_mass_logs[:, None], state.kept_mass_logs),
                lengths=lengths,
                done=state.done | ends | broken | (lengths >= rows.max_new_tokens),
                stopped=state.stopped | ends,
                non_finite=state.non_finite | broken,
            )

        def step(carry: tuple[Array, BatchDecodeState]) -> tuple[Array, BatchDecodeState]:
            number, slots = carry
            last = jnp.maximum(slots.lengths - 1, 0)
            token_ids = jnp.take_along_axis(slots.token_ids, last[:, None], axis=1)[:, 0]
            positions = rows.prompt_lengths + last
            hidden, cache, chosen = decode_step(definition, weights, slots.cache, token_ids, positions, ~slots.done)
            routes = slots.routes
            if routes is not None and chosen is not None:
                routes = jax.lax.dynamic_update_slice(routes, pack_routes(chosen)[:, None], (0, number, 0))
            return number + 1, draw_next(hidden, slots._replace(cache=constrain_cache(cache), routes=routes))

        def continues(carry: tuple[Array, BatchDecodeState]) -> Bool[Array, ""]:
            number, slots = carry
            return (number < end) & ~jnp.all(slots.done)

        first, end = steps
        # A prompt's last hidden state gives the first token; every other token comes from its predecessor. The cache
        # is not an operand of the condition, because XLA would copy it.
        drawn = slots._replace(cache=())
        drawn = jax.lax.cond(first == 0, lambda drawn: draw_next(hidden, drawn), lambda drawn: drawn, drawn)
        slots = drawn._replace(cache=slots.cache)
        with jax.named_scope(DECODE_SCOPE):
            _, slots = jax.lax.while_loop(continues, step, (jnp.maximum(first, 1), slots))
        return slots, jnp.all(slots.done)

    return loop
