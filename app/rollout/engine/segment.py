"""Decodes a segment: the state of its rows before and after it, and the loop over decode steps on the devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from app.model.decode_weights import DecodeWeights
from app.model.decoder import DecoderDefinition
from app.model.experts import pack_routes
from app.model.kv_cache import KVCache, constrain_cache
from app.model.prefill_and_decode import DECODE_SCOPE, decode_step
from app.rollout.sampling.token_sampling import (
    SampledTokens,
    Sampler,
    SamplingRules,
    draw_tokens,
    sample_key,
    token_outcomes,
)
from app.rollout.scheduling.segment_limits import SegmentLimits

NOT_FORCED = -1
"""Marks a step whose token is sampled, not forced."""

PerSlot = Any
"""int32 [B]: a numpy array on the host, a JAX array in a program."""


class RowTable(NamedTuple):
    """State of each slot at the start of a segment; on the host, one array [fields, B]."""

    token: PerSlot
    """Last token of prompt and completion so far, fed at the next step."""
    length: PerSlot
    """Number of tokens of prompt and completion so far."""
    remaining: PerSlot
    """Number of tokens that may still follow, forced ones included; 0 if the slot is idle."""
    uid_hash_low: PerSlot
    uid_hash_high: PerSlot
    sample_index: PerSlot
    policy_version: PerSlot
    """Policy version for the PRNG key. The key is derived from the seed and the last four fields."""


class RowStatus(NamedTuple):
    """State of each slot after a segment; on the host, one array [fields, B]."""

    token: PerSlot
    length: PerSlot
    remaining: PerSlot
    stopped: PerSlot
    """1 if an EOS token was sampled."""
    non_finite: PerSlot
    """1 if the logits were not finite; the row then ends without a token from that step."""
    steps: PerSlot
    """Number of steps in the segment, the same for all slots."""


class RowGroups(NamedTuple):
    """Splits the rows of a batch into groups of equal size, each with equally many rows of every device."""

    num_groups: int
    num_shards: int

    def split(self, x: Array) -> Array:
        """Splits [B, ...] into [groups, rows of a group, ...]."""
        by_device = x.reshape(self.num_shards, self.num_groups, -1, *x.shape[1:])
        return jnp.moveaxis(by_device, 1, 0).reshape(self.num_groups, -1, *x.shape[1:])

    def join(self, x: Array) -> Array:
        """Returns the rows of all groups in the order of the batch: the inverse of `split`."""
        by_group = x.reshape(self.num_groups, self.num_shards, -1, *x.shape[2:])
        return jnp.moveaxis(by_group, 0, 1).reshape(-1, *x.shape[2:])


class _DecodeState(NamedTuple):
    cache: KVCache
    token: Int32[Array, "B"]
    length: Int32[Array, "B"]
    remaining: Int32[Array, "B"]
    stopped: Bool[Array, "B"]
    non_finite: Bool[Array, "B"]
    tokens: Int32[Array, "fields C B"]
    """Tokens so far, with the fields of `RolloutSequence.segment_tokens`."""
    step: Int32[Array, ""]


@dataclass(frozen=True)
class SegmentDecoder:
    """Decodes segments; its fields are compile-time constants."""

    definition: DecoderDefinition
    sampler: Sampler
    segment_max: int
    """Maximum length of a segment, in tokens per row."""
    groups: RowGroups | None
    """Groups of rows that a decode step computes one after another; None = all rows together."""
    num_route_words: int
    """Number of 32-bit words for a token's routes (its experts); 0 = routes are not recorded."""

    def decode_segment(
        self,
        weights: DecodeWeights,
        cache: KVCache,
        table: Int32[Array, "7 B"],
        blocks: Int32[Array, "B M"],
        forced: Int32[Array, "F B"],
        limits: Int32[Array, "3"],
        rules: SamplingRules,
        seed: Int32[Array, ""],
        eos_ids: Int32[Array, "ids"],
    ) -> tuple[KVCache, Int32[Array, "6 B"], Int32[Array, "fields C B"]]:
        """Samples up to `segment_max` tokens per row; returns the cache, a `RowStatus` and the tokens of each step.

        A prompt's last token is fed here rather than in the prefill, so that the first token of a sample comes from the
        same program as all others. Known tokens (observations, and tokens whose cache was lost) are also fed here; they
        never end a row.

        Args:
            table: fields of `RowTable`.
            blocks: indices of each row's blocks on its device, with room for all tokens of the segment.
            forced: known tokens of the first steps, then `NOT_FORCED`; F is the maximum number of known tokens.
            limits: fields of `SegmentLimits`. They are traced, so new values never trigger a recompilation.
        """
        rows, limit = RowTable(*table), SegmentLimits(*limits)
        hashes = jnp.stack([rows.uid_hash_low, rows.uid_hash_high], axis=1)
        words = jax.lax.bitcast_convert_type(hashes, jnp.uint32)
        keys = jax.vmap(sample_key, in_axes=(None, 0, 0, 0))(seed, rows.policy_version, words, rows.sample_index)
        head = self.definition.bind(weights.params).head
        num_active = jnp.sum(rows.remaining > 0)

        def continues(now: _DecodeState) -> Array:
            active = jnp.sum(now.remaining > 0)
            enough = (limit.leave_when_finished > 0) & (num_active - active >= limit.leave_when_finished)
            return (now.step < limit.length) & ~enough & (active > limit.leave_when_active)

        def draw(cache: KVCache, rows: tuple[Array, ...]) -> tuple[KVCache, tuple[SampledTokens, Array | None]]:
            token, length, remaining, keys, blocks = rows
            positions = jnp.maximum(length - 1, 0)
            decoded = decode_step(self.definition, weights, cache, token, positions, remaining > 0, blocks)
            hidden, cache, routes = decoded
            words = pack_routes(routes) if self.num_route_words and routes is not None else None
            return constrain_cache(cache), (draw_tokens(self.sampler, hidden, head, rules, keys, length), words)

        def step(now: _DecodeState) -> _DecodeState:
            drawn = now.token, now.length, now.remaining, keys, blocks
            if self.groups is None:
                cache, (sampled, words) = draw(now.cache, drawn)
            else:
                cache, results = jax.lax.scan(draw, now.cache, jax.tree.map(self.groups.split, drawn))
                sampled, words = jax.tree.map(self.groups.join, results)
            sampled, is_drawn = _force(sampled, forced, now)
            active, ends, broken = token_outcomes(sampled, now.remaining > 0, eos_ids)
            ends &= is_drawn
            return _DecodeState(
                cache=cache,
                token=jnp.where(active, sampled.token_ids, now.token),
                length=now.length + active,
                remaining=jnp.where(ends | broken, 0, now.remaining - active),
                stopped=now.stopped | ends,
                non_finite=now.non_finite | broken,
                tokens=jax.lax.dynamic_update_slice(now.tokens, _to_record(sampled, words), (0, now.step, 0)),
                step=now.step + 1,
            )

        with jax.named_scope(DECODE_SCOPE):
            end = jax.lax.while_loop(continues, step, self._start(cache, rows))
        steps = jnp.broadcast_to(end.step, end.remaining.shape)
        status = RowStatus(end.token, end.length, end.remaining, end.stopped, end.non_finite, steps)
        return constrain_cache(end.cache), jnp.stack(status), end.tokens

    def _start(self, cache: KVCache, rows: RowTable) -> _DecodeState:
        return _DecodeState(
            cache=cache,
            token=rows.token,
            length=rows.length,
            remaining=rows.remaining,
            stopped=jnp.zeros_like(rows.remaining, bool),
            non_finite=jnp.zeros_like(rows.remaining, bool),
            tokens=jnp.zeros((3 + self.num_route_words, self.segment_max, len(rows.token)), jnp.int32),
            step=jnp.int32(0),
        )


def _force(
    sampled: SampledTokens, forced: Int32[Array, "F B"], now: _DecodeState
) -> tuple[SampledTokens, Bool[Array, "B"]]:
    """Replaces sampled tokens by this step's forced ones; also returns the mask of rows that were sampled."""
    if not len(forced):
        return sampled, jnp.ones_like(now.stopped)
    known = jax.lax.dynamic_index_in_dim(forced, jnp.minimum(now.step, len(forced) - 1), keepdims=False)
    is_drawn = (known == NOT_FORCED) | (now.step >= len(forced))
    return sampled._replace(token_ids=jnp.where(is_drawn, sampled.token_ids, known)), is_drawn


def _to_record(sampled: SampledTokens, words: Int32[Array, "B words"] | None) -> Int32[Array, "fields 1 B"]:
    """Returns the fields of `RolloutSequence.segment_tokens` for one step of all rows."""
    bits = [jax.lax.bitcast_convert_type(x, jnp.int32) for x in (sampled.logprobs, sampled.kept_mass_logs)]
    record = jnp.stack([sampled.token_ids, *bits])[:, None]
    return record if words is None else jnp.concatenate([record, words.T[:, None]])
