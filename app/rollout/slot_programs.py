"""Compiled programs of slots: a small set, compiled before the first of them is used.

A pool holds the caches of prefilled prompts, and the slots hold those of samples. Both stay on the devices and are
updated in place. The rest of a row's state is a few integers, sent to the devices and back with each segment.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Lowered
from jaxtyping import Array, Bool, Int32

from app.mesh.compiler_options import compiler_options
from app.mesh.placement import tree_shardings
from app.model.decode_weights import DecodeWeights, abstract_decode_weights
from app.model.decoder import DecoderDefinition
from app.model.prefill_and_decode import (
    DECODE_SCOPE,
    KVCache,
    LayerCache,
    abstract_cache,
    cache_shapes,
    constrain_cache,
    decode_step,
    prefill,
)
from app.model.token_logprobs import scaled_logits
from app.rollout.sampling import (
    Sampler,
    SamplingRules,
    effective_temperature,
    sample_keys,
    sample_tokens,
    sample_tokens_truncated,
    token_outcomes,
)
from app.rollout.shape_buckets import SlotShapes
from settings.schema.rollout import DecodeLayout

INSERT_SCOPE = "insert_rows"
"""The name scope of the loop over copied rows in compiled programs."""

MAX_COMPILING = 16
"""Programs that are compiled at the same time, each of which takes memory meanwhile."""

PerSlot = Any
"""int32 [B], on the host or in a program."""


class RowTable(NamedTuple):
    """State of each slot at the start of a segment; on the host, one array [fields, B]."""

    token: PerSlot
    """Last token of prompt and completion so far, fed at the next step."""
    length: PerSlot
    """Number of tokens of prompt and completion so far."""
    remaining: PerSlot
    """Number of tokens that may still be drawn; 0 if the slot is idle."""
    uid_hash_low: PerSlot
    uid_hash_high: PerSlot
    sample_index: PerSlot
    policy_version: PerSlot
    """Version in the key of the noise, together with the three fields before it."""


class RowStatus(NamedTuple):
    """State of each slot after a segment; on the host, one array [fields, B]."""

    token: PerSlot
    length: PerSlot
    remaining: PerSlot
    stopped: PerSlot
    """1 if an end-of-sequence token was drawn."""
    non_finite: PerSlot
    """1 if the logits were not finite; the row then ends without a token from that step."""
    steps: PerSlot
    """Number of steps in the segment, the same for all slots."""


class DecodeLimits(NamedTuple):
    """Conditions that end a segment. They are traced, so new values never trigger a recompilation."""

    length: int
    """Maximum number of tokens per row."""
    leave_when_finished: int
    """Number of newly finished rows at which the segment ends; 0 = no such limit."""
    leave_when_active: int
    """Number of unfinished rows at which the segment ends."""


class _DecodeState(NamedTuple):
    cache: KVCache
    token: Int32[Array, "B"]
    length: Int32[Array, "B"]
    remaining: Int32[Array, "B"]
    stopped: Bool[Array, "B"]
    non_finite: Bool[Array, "B"]
    tokens: Int32[Array, "3 C B"]
    """Token ids, bits of the logprobs, and bits of the kept-mass logs."""
    step: Int32[Array, ""]


def prefill_into_pool(
    definition: DecoderDefinition,
    weights: DecodeWeights,
    pool: KVCache,
    token_ids: Int32[Array, "P S"],
    lengths: Int32[Array, "P"],
    pool_slots: Int32[Array, "P"],
    count: Int32[Array, ""],
) -> KVCache:
    """Prefills prompts and writes the caches of the first `count` to their places in the pool."""
    _, fresh = prefill(definition, weights, token_ids, lengths)
    # Whole rows are written: masked entries are multiplied by 0, which would keep a NaN left by an earlier prompt.
    fresh = tuple(pad_cache(layer, length=pool[0].keys.shape[2]) for layer in fresh)
    return insert_rows(pool, fresh, jnp.arange(len(pool_slots)), pool_slots, count)


def insert_rows(
    cache: KVCache, other: KVCache, sources: Int32[Array, "n"], targets: Int32[Array, "n"], count: Int32[Array, ""]
) -> KVCache:
    """Copies the first `count` rows `sources` of `other` over the rows `targets` of `cache`, which may be longer."""

    def copy(i: Array, cache: KVCache) -> KVCache:
        def copy_layer(into: Array, out_of: Array) -> Array:
            row = jax.lax.dynamic_slice_in_dim(out_of, sources[i], 1)
            return jax.lax.dynamic_update_slice(into, row, (targets[i], 0, 0, 0))

        return jax.tree.map(copy_layer, cache, other)

    with jax.named_scope(INSERT_SCOPE):
        return constrain_cache(jax.lax.fori_loop(0, count, copy, cache))


def extract_row(cache: KVCache, source: Int32[Array, ""]) -> KVCache:
    """Returns one row of a cache."""
    return constrain_cache(jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, source, 1), cache))


def gather_rows(layer: LayerCache, sources: Int32[Array, "b"]) -> LayerCache:
    """Returns the rows `sources` of a layer's cache."""
    return constrain_cache((jax.tree.map(lambda x: x[sources], layer),))[0]


def pad_cache(layer: LayerCache, *, length: int) -> LayerCache:
    """Pads a layer's cache to `length` tokens."""
    pad = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, length - x.shape[2]), (0, 0)))  # noqa: E731
    return constrain_cache((jax.tree.map(pad, layer),))[0]


def decode_segment(
    definition: DecoderDefinition,
    sampler: Sampler,
    segment_max: int,
    weights: DecodeWeights,
    cache: KVCache,
    table: Int32[Array, "7 B"],
    limits: Int32[Array, "3"],
    rules: SamplingRules,
    seed: Int32[Array, ""],
    eos_ids: Int32[Array, "E"],
) -> tuple[KVCache, Int32[Array, "6 B"], Int32[Array, "3 C B"]]:
    """Draws up to `segment_max` tokens for every row; returns the cache, a `RowStatus` and the tokens of each step.

    A prompt's last token is fed here and not in the prefill, so that the first token of a sample is drawn by the same
    program as all others.
    """
    rows, limit = RowTable(*table), DecodeLimits(*limits)
    words = jax.lax.bitcast_convert_type(jnp.stack([rows.uid_hash_low, rows.uid_hash_high], axis=1), jnp.uint32)
    row_key = lambda version, words, index: sample_keys(seed, version, words[None], index[None])[0]  # noqa: E731
    keys = jax.vmap(row_key)(rows.policy_version, words, rows.sample_index)
    head = definition.bind(weights.params).head
    num_active = jnp.sum(rows.remaining > 0)

    def continues(now: _DecodeState) -> Array:
        active = jnp.sum(now.remaining > 0)
        enough = (limit.leave_when_finished > 0) & (num_active - active >= limit.leave_when_finished)
        return (now.step < limit.length) & ~enough & (active > limit.leave_when_active)

    def step(now: _DecodeState) -> _DecodeState:
        positions = jnp.maximum(now.length - 1, 0)
        hidden, cache = decode_step(definition, weights, now.cache, now.token, positions, now.remaining > 0)
        logits = scaled_logits(hidden, head, effective_temperature(rules.temperature))
        sampled = sampler(logits, rules, jax.vmap(jax.random.fold_in)(keys, now.length))
        active, ends, broken = token_outcomes(sampled, now.remaining > 0, eos_ids)
        bits = [jax.lax.bitcast_convert_type(x, jnp.int32) for x in (sampled.logprobs, sampled.kept_mass_logs)]
        record = jnp.stack([sampled.token_ids, *bits])[:, None]
        return _DecodeState(
            cache=constrain_cache(cache),
            token=jnp.where(active, sampled.token_ids, now.token),
            length=now.length + active,
            remaining=jnp.where(ends | broken, 0, now.remaining - active),
            stopped=now.stopped | ends,
            non_finite=now.non_finite | broken,
            tokens=jax.lax.dynamic_update_slice(now.tokens, record, (0, now.step, 0)),
            step=now.step + 1,
        )

    start = _DecodeState(
        cache=cache,
        token=rows.token,
        length=rows.length,
        remaining=rows.remaining,
        stopped=jnp.zeros_like(rows.remaining, bool),
        non_finite=jnp.zeros_like(rows.remaining, bool),
        tokens=jnp.zeros((3, segment_max, len(rows.token)), jnp.int32),
        step=jnp.int32(0),
    )
    with jax.named_scope(DECODE_SCOPE):
        end = jax.lax.while_loop(continues, step, start)
    steps = jnp.broadcast_to(end.step, end.remaining.shape)
    status = RowStatus(end.token, end.length, end.remaining, end.stopped, end.non_finite, steps)
    return _zero_rows(end.cache, end.non_finite), jnp.stack(status), end.tokens


def _zero_rows(cache: KVCache, mask: Bool[Array, "B"]) -> KVCache:
    """Zeroes the masked rows: a NaN left in a slot would break the next row there, even at masked positions."""
    first = jnp.argsort(~mask)

    def clear(i: Array, cache: KVCache) -> KVCache:
        empty = lambda x: jnp.zeros_like(x, shape=(1, *x.shape[1:]))  # noqa: E731
        return jax.tree.map(lambda x: jax.lax.dynamic_update_slice(x, empty(x), (first[i], 0, 0, 0)), cache)

    return constrain_cache(jax.lax.fori_loop(0, jnp.sum(mask), clear, cache))


ProgramName = tuple[Any, ...]
"""Operation of a program, followed by its sizes."""

ProgramSpec = tuple[Callable[..., Any], tuple, dict[str, Any]]
"""A function, the shapes of its arguments, and options of `jax.jit`."""


@dataclass(eq=False)
class SlotPrograms:
    """Compiled programs for slots of given shapes, by name."""

    definition: DecoderDefinition
    mesh: Mesh
    shapes: SlotShapes
    _: KW_ONLY
    dtype: jnp.dtype
    num_eos: int
    decode_layout: DecodeLayout = "gathered"
    truncates: bool = field(default=False, init=False)
    """Whether the decode programs support truncating rules."""
    _compiled: dict[ProgramName, Callable[..., Any]] = field(default_factory=dict, init=False)
    _compiled_for: set[tuple[bool, bool, bool]] = field(default_factory=set, init=False)

    def __getitem__(self, name: ProgramName) -> Callable[..., Any]:
        return self._compiled[name]

    def compile(self, *, suspends: bool, recomputes: bool, truncates: bool) -> None:
        """Compiles the required programs that are not compiled yet.

        Args:
            suspends: whether samples may leave their slots before they are done.
            recomputes: whether suspended samples may continue without caches, which a prefill then recomputes.
            truncates: whether the sampling rules can exclude tokens.
        """
        if (suspends, recomputes, truncates) in self._compiled_for:
            return
        self._compiled_for.add((suspends, recomputes, truncates))
        self.truncates |= truncates
        with jax.set_mesh(self.mesh):
            specs = self.program_specs(suspends=suspends, recomputes=recomputes, truncates=truncates)
            lowered = {
                name: self._jit(function, **options).lower(*arguments)
                for name, (function, arguments, options) in specs.items()
                if name not in self._compiled
            }
        # XLA compiles outside of Python's lock.
        with ThreadPoolExecutor(min(MAX_COMPILING, os.cpu_count() or 1)) as pool:
            self._compiled |= zip(lowered, pool.map(Lowered.compile, lowered.values()), strict=True)

    def lower_programs(self, *, truncates: bool) -> dict[str, Lowered]:
        """Lowers the programs that take the most memory: the longest prefill, and decoding with all slots full."""
        shapes = self.shapes
        specs = {
            "prefill": self._prefill_program(shapes.prefill_rows[-1], shapes.max_prompt_length),
            "decode": self._decode_program(shapes.num_slots, shapes.max_length, truncates=truncates),
        }
        with jax.set_mesh(self.mesh):
            return {name: self._jit(run, **options).lower(*args) for name, (run, args, options) in specs.items()}

    def _jit(self, function: Callable[..., Any], **options: Any) -> Any:
        return jax.jit(function, compiler_options=compiler_options(self.mesh), **options)

    def abstract_cache(self, rows: int, length: int) -> KVCache:
        """Returns the shapes and shardings of a cache with `rows` rows of `length` tokens."""
        return abstract_cache(cache_shapes(self.definition.architecture, rows, length, self.dtype), self.mesh)

    @property
    def abstract_pool(self) -> KVCache:
        return self.abstract_cache(self.shapes.num_pooled_prompts, self.shapes.max_prompt_length)

    @functools.cached_property
    def abstract_weights(self) -> DecodeWeights:
        return abstract_decode_weights(self.definition, self.mesh, self.dtype, self.decode_layout)

    def _replicated(self, *shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, PartitionSpec()))

    def program_specs(self, *, suspends: bool, recomputes: bool, truncates: bool) -> dict[ProgramName, ProgramSpec]:
        """Returns the specifications of the programs that `compile` compiles, by name."""
        shapes, num_slots, longest = self.shapes, self.shapes.num_slots, self.shapes.max_length
        empty = self.abstract_pool, self.abstract_cache(num_slots, shapes.cache_buckets[0])
        zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), empty)  # noqa: E731
        specs: dict[ProgramName, ProgramSpec] = {("open",): (zeros, (), {"out_shardings": tree_shardings(empty)})}
        for length in shapes.prompt_buckets:
            specs |= {("prefill", rows, length): self._prefill_program(rows, length) for rows in shapes.prefill_rows}
        for length in shapes.cache_buckets:
            specs["insert", length] = self._insert_program(self.abstract_cache(num_slots, length), self.abstract_pool)
            specs["decode", num_slots, length, truncates] = self._decode_program(num_slots, length, truncates=truncates)
        for shorter, longer in zip(shapes.cache_buckets, shapes.cache_buckets[1:], strict=False):
            pad = functools.partial(pad_cache, length=longer)
            specs["grow", shorter] = self._layer_program(pad, (num_slots, shorter), (num_slots, longer))
        # Batches with fewer rows than slots always have caches of the full length.
        for rows, larger in zip(shapes.batch_buckets, shapes.batch_buckets[1:], strict=False):
            specs["decode", rows, longest, truncates] = self._decode_program(rows, longest, truncates=truncates)
            for name, before, after in (("compact", larger, rows), ("expand", rows, num_slots)):
                specs[name, before] = self._layer_program(
                    gather_rows, (before, longest), (after, longest), self._replicated(after)
                )
        row = self.abstract_cache(1, longest)
        row_options = {"out_shardings": tree_shardings(row)}
        if suspends:
            full = self.abstract_cache(num_slots, longest)
            specs["take",] = extract_row, (full, self._replicated()), row_options
            specs["put",] = self._insert_program(full, row)
        if recomputes:
            read = lambda *arguments: prefill(self.definition, *arguments)[1]  # noqa: E731
            ids = self._replicated(1, longest), self._replicated(1)
            specs["read",] = read, (self.abstract_weights, *ids), row_options
        return specs

    def _prefill_program(self, rows: int, length: int) -> ProgramSpec:
        pool = self.abstract_pool
        ids, places = (self._replicated(rows, length), self._replicated(rows)), self._replicated(rows)
        arguments = self.abstract_weights, pool, *ids, places, self._replicated()
        return functools.partial(prefill_into_pool, self.definition), arguments, _donate_options(1, pool)

    def _insert_program(self, cache: KVCache, other: KVCache) -> ProgramSpec:
        indices = self._replicated(self.shapes.num_slots)
        return insert_rows, (cache, other, indices, indices, self._replicated()), _donate_options(0, cache)

    def _layer_program(
        self, function: Callable[..., Any], before: tuple[int, int], after: tuple[int, int], *more: Any
    ) -> ProgramSpec:
        """Returns a program that changes one layer, so that only one layer at a time is in memory twice."""
        arguments = (self.abstract_cache(*before)[0], *more)
        return function, arguments, {"out_shardings": tree_shardings(self.abstract_cache(*after)[0])}

    def _decode_program(self, rows: int, length: int, *, truncates: bool) -> ProgramSpec:
        cache, scalar = self.abstract_cache(rows, length), self._replicated(dtype=jnp.float32)
        rules = SamplingRules(scalar, self._replicated(), scalar, scalar)  # pyright: ignore[reportArgumentType]
        arguments = (
            *(self.abstract_weights, cache, self._replicated(len(RowTable._fields), rows)),
            *(self._replicated(len(DecodeLimits._fields)), rules, self._replicated(), self._replicated(self.num_eos)),
        )
        whole = self._replicated().sharding
        options = {"donate_argnums": 1, "out_shardings": (tree_shardings(cache), whole, whole)}
        sampler: Sampler = sample_tokens_truncated if truncates else sample_tokens
        bound = functools.partial(decode_segment, self.definition, sampler, self.shapes.segment_max)
        return bound, arguments, options


def _donate_options(number: int, cache: KVCache) -> dict[str, Any]:
    """Returns the `jax.jit` options for updating the cache, which is argument `number`, in place."""
    return {"donate_argnums": number, "out_shardings": tree_shardings(cache)}


def rules_to_arrays(rules: SamplingRules) -> SamplingRules:
    """Converts sampling rules to the dtypes that compiled programs expect."""
    scalar = np.float32
    arrays = scalar(rules.temperature), np.int32(rules.top_k), scalar(rules.top_p), scalar(rules.min_p)
    return SamplingRules(*arrays)  # pyright: ignore[reportArgumentType]
