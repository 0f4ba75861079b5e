"""What runs on the devices for slots: few programs, all compiled before the first is used.

A pool holds the caches of prefilled prompts, the slots those of samples. Both stay on the devices and are updated in
place; what else there is to know about a row are a few integers that go in and come out with each segment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Lowered
from jaxtyping import Array, Bool, Int32

from app.mesh.placement import tree_shardings
from app.model.decoder import DecoderDefinition
from app.model.kv_cache import (
    DecodeWeights,
    KVCache,
    LayerCache,
    abstract_cache,
    abstract_decode_weights,
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
)
from app.rollout.shape_buckets import SlotShapes
from settings.schema.rollout import DecodeLayout

PerSlot = Any
"""int32 [B], on the host or in a program."""


class RowTable(NamedTuple):
    """What a segment needs to know of each slot. On the host one array, [fields, B]."""

    token: PerSlot
    """The last one of prompt and completion; it is fed next."""
    length: PerSlot
    """Of prompt and completion so far."""
    remaining: PerSlot
    """Tokens that may still be drawn; 0: nothing happens in this slot."""
    uid_hash_low: PerSlot
    uid_hash_high: PerSlot
    sample_index: PerSlot
    policy_version: PerSlot
    """With the three before it, whose noise it draws."""


class RowStatus(NamedTuple):
    """What a segment did to each slot. On the host one array, [fields, B]."""

    token: PerSlot
    length: PerSlot
    remaining: PerSlot
    stopped: PerSlot
    """1 where an end-of-sequence token was drawn."""
    non_finite: PerSlot
    """1 where logits were not finite; the row ends without a token of that step."""
    steps: PerSlot
    """Of the segment, the same everywhere."""


class DecodeLimits(NamedTuple):
    """When a segment ends. Traced: no value compiles anything."""

    length: int
    """Tokens of each row, at most."""
    leave_when_finished: int
    """So many rows are done that were not; 0: only when all are."""
    leave_when_active: int
    """No more than so many rows are not done; 0: only when all are."""


class _DecodeState(NamedTuple):
    cache: KVCache
    token: Int32[Array, "B"]
    length: Int32[Array, "B"]
    remaining: Int32[Array, "B"]
    stopped: Bool[Array, "B"]
    non_finite: Bool[Array, "B"]
    tokens: Int32[Array, "3 C B"]
    """Token ids, and the bits of logprobs and logs of kept mass."""
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
    """The pool with the caches of the first `count` prompts at their places."""
    _, fresh = prefill(definition, weights, token_ids, lengths)
    # Whole rows: what is masked is multiplied by 0, and of a NaN that an earlier prompt left, nothing else would come.
    fresh = tuple(pad_cache(layer, length=pool[0].keys.shape[2]) for layer in fresh)
    return insert_rows(pool, fresh, jnp.arange(len(pool_slots)), pool_slots, count)


def insert_rows(
    cache: KVCache, other: KVCache, sources: Int32[Array, "n"], targets: Int32[Array, "n"], count: Int32[Array, ""]
) -> KVCache:
    """The first `count` of the named rows of `other`, copied over those of `cache`, which may have room for more."""

    def copy(i: Array, cache: KVCache) -> KVCache:
        def one(into: Array, out_of: Array) -> Array:
            row = jax.lax.dynamic_slice_in_dim(out_of, sources[i], 1)
            return jax.lax.dynamic_update_slice(into, row, (targets[i], 0, 0, 0))

        return jax.tree.map(one, cache, other)

    return constrain_cache(jax.lax.fori_loop(0, count, copy, cache))


def extract_row(cache: KVCache, source: Int32[Array, ""]) -> KVCache:
    """One row."""
    return constrain_cache(jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, source, 1), cache))


def prefill_row(
    definition: DecoderDefinition, weights: DecodeWeights, token_ids: Int32[Array, "1 S"], lengths: Int32[Array, "1"]
) -> KVCache:
    """One row whose tokens are known, drawn ones among them."""
    return prefill(definition, weights, token_ids, lengths)[1]


def gather_rows(layer: LayerCache, sources: Int32[Array, "b"]) -> LayerCache:
    """These rows of a layer."""
    return constrain_cache((jax.tree.map(lambda x: x[sources], layer),))[0]


def pad_cache(layer: LayerCache, *, length: int) -> LayerCache:
    """With room for `length` tokens."""
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
    """Up to `segment_max` tokens of every row: the cache, a `RowStatus`, and what was drawn at each step.

    A prompt's last token is fed here, not in the prefill, so that every token of a sample, the first among them, is
    drawn from the same program.
    """
    rows, limit = RowTable(*table), DecodeLimits(*limits)
    words = jax.lax.bitcast_convert_type(jnp.stack([rows.uid_hash_low, rows.uid_hash_high], axis=1), jnp.uint32)
    of_row = lambda version, words, index: sample_keys(seed, version, words[None], index[None])[0]  # noqa: E731
    keys = jax.vmap(of_row)(rows.policy_version, words, rows.sample_index)
    head = definition.bind(weights.params).head
    num_active = jnp.sum(rows.remaining > 0)

    def goes_on(now: _DecodeState) -> Array:
        active = jnp.sum(now.remaining > 0)
        enough = (limit.leave_when_finished > 0) & (num_active - active >= limit.leave_when_finished)
        return (now.step < limit.length) & ~enough & (active > limit.leave_when_active)

    def step(now: _DecodeState) -> _DecodeState:
        positions = jnp.maximum(now.length - 1, 0)
        hidden, cache = decode_step(definition, weights, now.cache, now.token, positions)
        logits = scaled_logits(hidden, head, effective_temperature(rules.temperature))
        drawn = sampler(logits, rules, jax.vmap(jax.random.fold_in)(keys, now.length))
        # Logits that are not finite leave no finite logprob.
        broken = (now.remaining > 0) & ~jnp.isfinite(drawn.logprobs)
        active = (now.remaining > 0) & ~broken
        ends = active & jnp.any(drawn.token_ids[:, None] == eos_ids, axis=1)
        bits = [jax.lax.bitcast_convert_type(x, jnp.int32) for x in (drawn.logprobs, drawn.kept_mass_logs)]
        record = jnp.stack([drawn.token_ids, *bits])[:, None]
        return _DecodeState(
            cache=constrain_cache(cache),
            token=jnp.where(active, drawn.token_ids, now.token),
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
    end = jax.lax.while_loop(goes_on, step, start)
    steps = jnp.broadcast_to(end.step, end.remaining.shape)
    cache = _zero_rows(end.cache, end.non_finite)
    status = RowStatus(end.token, end.length, end.remaining, end.stopped, end.non_finite, steps)
    return cache, jnp.stack(status), end.tokens


def _zero_rows(cache: KVCache, mask: Bool[Array, "B"]) -> KVCache:
    """Zeros in the rows that broke: a NaN that stayed would break whoever comes into the slot next, masked or not."""
    first = jnp.argsort(~mask)

    def clear(i: Array, cache: KVCache) -> KVCache:
        empty = lambda x: jnp.zeros_like(x, shape=(1, *x.shape[1:]))  # noqa: E731
        return jax.tree.map(lambda x: jax.lax.dynamic_update_slice(x, empty(x), (first[i], 0, 0, 0)), cache)

    return constrain_cache(jax.lax.fori_loop(0, jnp.sum(mask), clear, cache))


ProgramName = tuple[Any, ...]
"""Of a program: what it does, and the sizes that it does it for."""

ProgramSpec = tuple[Callable[..., Any], tuple, dict[str, Any]]
"""A function, the shapes of its arguments, and options of `jax.jit`."""


class SlotPrograms:
    """The compiled programs of slots of given shapes, by name."""

    def __init__(
        self,
        definition: DecoderDefinition,
        mesh: Mesh,
        shapes: SlotShapes,
        *,
        dtype: jnp.dtype,
        num_eos: int,
        decode_layout: DecodeLayout = "gathered",
    ):
        self._definition = definition
        self._mesh = mesh
        self._shapes = shapes
        self._dtype = dtype
        self._num_eos = num_eos
        self._decode_layout: DecodeLayout = decode_layout
        self._compiled: dict[ProgramName, Callable[..., Any]] = {}
        self._compiled_for: set[tuple[bool, bool, bool]] = set()
        self.truncates = False
        """Some of them cut tokens off."""

    def __getitem__(self, name: ProgramName) -> Callable[..., Any]:
        return self._compiled[name]

    def names(self, *, suspends: bool, recomputes: bool, truncates: bool) -> list[ProgramName]:
        """Of all programs that `compile` is there for."""
        return list(self._program_specs(suspends=suspends, recomputes=recomputes, truncates=truncates))

    def compile(self, *, suspends: bool, recomputes: bool, truncates: bool) -> None:
        """All that will be needed and is not there yet.

        Args:
            suspends: samples will be taken out of their slots before they are done.
            rereads: some of them will go on without their caches.
            truncates: the sampling rules cut tokens off.
        """
        if (suspends, recomputes, truncates) in self._compiled_for:
            return
        self._compiled_for.add((suspends, recomputes, truncates))
        self.truncates |= truncates
        wanted = self._program_specs(suspends=suspends, recomputes=recomputes, truncates=truncates)
        with jax.set_mesh(self._mesh):
            for name, (function, arguments, options) in wanted.items():
                if name not in self._compiled:
                    self._compiled[name] = jax.jit(function, **options).lower(*arguments).compile()

    def lower_programs(self, *, truncates: bool) -> dict[str, Lowered]:
        """The programs that take most memory: the longest prefill, and decoding with all slots full."""
        shapes = self._shapes
        wanted = {
            "prefill": self._prefill_program(shapes.prefill_rows[-1], shapes.max_prompt_length),
            "decode": self._decode_program(shapes.num_slots, shapes.max_length, truncates=truncates),
        }
        with jax.set_mesh(self._mesh):
            return {name: jax.jit(run, **options).lower(*args) for name, (run, args, options) in wanted.items()}

    def abstract_cache(self, rows: int, length: int) -> KVCache:
        """Shapes of `rows` rows with room for `length` tokens, on their shardings."""
        arch = self._definition.architecture
        one: Any = jax.ShapeDtypeStruct((rows, arch.num_kv_heads, length, arch.head_dim), self._dtype)
        return abstract_cache((LayerCache(one, one),) * arch.num_layers, self._mesh)

    @property
    def abstract_pool(self) -> KVCache:
        return self.abstract_cache(self._shapes.num_pooled_prompts, self._shapes.max_prompt_length)

    @functools.cached_property
    def abstract_weights(self) -> DecodeWeights:
        return abstract_decode_weights(self._definition, self._mesh, self._dtype, self._decode_layout)

    def _replicated(self, *shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self._mesh, PartitionSpec()))

    def _program_specs(self, *, suspends: bool, recomputes: bool, truncates: bool) -> dict[ProgramName, ProgramSpec]:
        shapes, slots, top = self._shapes, self._shapes.num_slots, self._shapes.max_length
        wanted: dict[ProgramName, ProgramSpec] = {("open",): self._empty_program()}
        for length in shapes.prompt_buckets:
            wanted |= {("prefill", rows, length): self._prefill_program(rows, length) for rows in shapes.prefill_rows}
        for length in shapes.cache_buckets:
            wanted["insert", length] = self._insert_program(self.abstract_cache(slots, length), self.abstract_pool)
        for rows, length in self.decode_sizes:
            wanted["decode", rows, length, truncates] = self._decode_program(rows, length, truncates=truncates)
        for shorter, longer in zip(shapes.cache_buckets, shapes.cache_buckets[1:], strict=False):
            function = lambda layer, length=longer: pad_cache(layer, length=length)  # noqa: E731
            wanted["grow", shorter] = self._layer_program(function, (slots, shorter), (slots, longer))
        for smaller, larger in zip(shapes.batch_buckets, shapes.batch_buckets[1:], strict=False):
            wanted["compact", larger] = self._layer_program(
                gather_rows, (larger, top), (smaller, top), self._replicated(smaller)
            )
        for smaller in shapes.batch_buckets[:-1]:
            wanted["expand", smaller] = self._layer_program(
                gather_rows, (smaller, top), (slots, top), self._replicated(slots)
            )
        row = self.abstract_cache(1, top)
        if suspends:
            full = self.abstract_cache(slots, top)
            wanted["take",] = extract_row, (full, self._replicated()), {"out_shardings": tree_shardings(row)}
            wanted["put",] = self._insert_program(full, row)
        if recomputes:
            arguments = (self.abstract_weights, *self._abstract_tokens(1, top))
            wanted["read",] = (
                _bind_arguments(prefill_row, self._definition),
                arguments,
                {"out_shardings": tree_shardings(row)},
            )
        return wanted

    @property
    def decode_sizes(self) -> list[tuple[int, int]]:
        """(rows, room) of each decode program: fewer rows than slots always have the full room."""
        shapes = self._shapes
        full = [(shapes.num_slots, length) for length in shapes.cache_buckets]
        return full + [(rows, shapes.max_length) for rows in shapes.batch_buckets[:-1]]

    def _empty_program(self) -> ProgramSpec:
        shapes = (self.abstract_pool, self.abstract_cache(self._shapes.num_slots, self._shapes.cache_buckets[0]))
        empty = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)  # noqa: E731
        return empty, (), {"out_shardings": tree_shardings(shapes)}

    def _prefill_program(self, rows: int, length: int) -> ProgramSpec:
        pool = self.abstract_pool
        arguments = (
            self.abstract_weights,
            pool,
            *self._abstract_tokens(rows, length),
            self._replicated(rows),
            self._replicated(),
        )
        return _bind_arguments(prefill_into_pool, self._definition), arguments, _donate_options(1, pool)

    def _abstract_tokens(self, rows: int, length: int) -> tuple[Any, Any]:
        return self._replicated(rows, length), self._replicated(rows)

    def _insert_program(self, cache: KVCache, other: KVCache) -> ProgramSpec:
        indices = self._replicated(self._shapes.num_slots)
        return insert_rows, (cache, other, indices, indices, self._replicated()), _donate_options(0, cache)

    def _layer_program(
        self, function: Callable[..., Any], before: tuple[int, int], after: tuple[int, int], *more: Any
    ) -> ProgramSpec:
        """Of one layer at a time, so that there is never more than one too many."""
        arguments = (self.abstract_cache(*before)[0], *more)
        return function, arguments, {"out_shardings": tree_shardings(self.abstract_cache(*after)[0])}

    def _decode_program(self, rows: int, length: int, *, truncates: bool) -> ProgramSpec:
        cache, scalar = self.abstract_cache(rows, length), self._replicated(dtype=jnp.float32)
        rules = SamplingRules(scalar, self._replicated(), scalar, scalar)  # pyright: ignore[reportArgumentType]
        arguments = (
            *(self.abstract_weights, cache, self._replicated(len(RowTable._fields), rows)),
            *(self._replicated(len(DecodeLimits._fields)), rules, self._replicated(), self._replicated(self._num_eos)),
        )
        whole = self._replicated().sharding
        options = {"donate_argnums": 1, "out_shardings": (tree_shardings(cache), whole, whole)}
        sampler: Sampler = sample_tokens_truncated if truncates else sample_tokens
        return _bind_arguments(decode_segment, self._definition, sampler, self._shapes.segment_max), arguments, options


def _bind_arguments(function: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    return lambda *arguments: function(*first, *arguments)


def _donate_options(number: int, cache: KVCache) -> dict[str, Any]:
    """Options of a program that gives back its argument of this number, updated in place."""
    return {"donate_argnums": number, "out_shardings": tree_shardings(cache)}


def rules_to_arrays(rules: SamplingRules) -> SamplingRules:
    """As compiled programs take them."""
    scalar = np.float32
    arrays = scalar(rules.temperature), np.int32(rules.top_k), scalar(rules.top_p), scalar(rules.min_p)
    return SamplingRules(*arrays)  # pyright: ignore[reportArgumentType]
