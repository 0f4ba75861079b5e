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

from app.mesh.placement import shardings_of
from app.model.decoder import DecoderDefinition
from app.model.kv_cache import (
    Cache,
    DecodeWeights,
    LayerCache,
    abstract_cache,
    abstract_decode_weights,
    constrain_cache,
    decode_step,
    prefill,
)
from app.model.token_logprobs import scaled_logits
from app.rollout.sampling import Sampler, SamplingRules, draw, draw_truncated, effective_temperature, sample_keys
from app.rollout.shape_buckets import SlotShapes
from settings.schema.rollout import DecodeLayout

OfSlots = Any
"""int32 [B], on the host or in a program."""


class RowTable(NamedTuple):
    """What a segment needs to know of each slot. On the host one array, [fields, B]."""

    token: OfSlots
    """The last one of prompt and completion; it is fed next."""
    length: OfSlots
    """Of prompt and completion so far."""
    left: OfSlots
    """Tokens that may still be drawn; 0: nothing happens in this slot."""
    uid_low: OfSlots
    uid_high: OfSlots
    sample_index: OfSlots
    policy_version: OfSlots
    """With the three before it, whose noise it draws."""


class RowStatus(NamedTuple):
    """What a segment did to each slot. On the host one array, [fields, B]."""

    token: OfSlots
    length: OfSlots
    left: OfSlots
    stopped: OfSlots
    """1 where an end-of-sequence token was drawn."""
    broken: OfSlots
    """1 where logits were not finite; the row ends without a token of that step."""
    steps: OfSlots
    """Of the segment, the same everywhere."""


class Limits(NamedTuple):
    """When a segment ends. Traced: no value compiles anything."""

    length: int
    """Tokens of each row, at most."""
    leave_when_finished: int
    """So many rows are done that were not; 0: only when all are."""
    leave_when_active: int
    """No more than so many rows are not done; 0: only when all are."""


class _Decoding(NamedTuple):
    cache: Cache
    token: Int32[Array, "B"]
    length: Int32[Array, "B"]
    left: Int32[Array, "B"]
    stopped: Bool[Array, "B"]
    broken: Bool[Array, "B"]
    drawn: Int32[Array, "3 C B"]
    """Token ids, and the bits of logprobs and logs of kept mass."""
    step: Int32[Array, ""]


def prefill_into(
    definition: DecoderDefinition,
    weights: DecodeWeights,
    pool: Cache,
    token_ids: Int32[Array, "P S"],
    lengths: Int32[Array, "P"],
    places: Int32[Array, "P"],
    count: Int32[Array, ""],
) -> Cache:
    """The pool with the caches of the first `count` prompts at their places."""
    _, fresh = prefill(definition, weights, token_ids, lengths)
    # Whole rows: what is masked is multiplied by 0, and of a NaN that an earlier prompt left, nothing else would come.
    fresh = tuple(lengthened(layer, length=pool[0].keys.shape[2]) for layer in fresh)
    return insert(pool, fresh, jnp.arange(len(places)), places, count)


def insert(
    cache: Cache, other: Cache, sources: Int32[Array, "n"], targets: Int32[Array, "n"], count: Int32[Array, ""]
) -> Cache:
    """The first `count` of the named rows of `other`, copied over those of `cache`, which may have room for more."""

    def copy(i: Array, cache: Cache) -> Cache:
        def one(into: Array, out_of: Array) -> Array:
            row = jax.lax.dynamic_slice_in_dim(out_of, sources[i], 1)
            return jax.lax.dynamic_update_slice(into, row, (targets[i], 0, 0, 0))

        return jax.tree.map(one, cache, other)

    return constrain_cache(jax.lax.fori_loop(0, count, copy, cache))


def take(cache: Cache, source: Int32[Array, ""]) -> Cache:
    """One row."""
    return constrain_cache(jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, source, 1), cache))


def read_row(
    definition: DecoderDefinition, weights: DecodeWeights, token_ids: Int32[Array, "1 S"], lengths: Int32[Array, "1"]
) -> Cache:
    """One row whose tokens are known, drawn ones among them."""
    return prefill(definition, weights, token_ids, lengths)[1]


def move_rows(layer: LayerCache, sources: Int32[Array, "b"]) -> LayerCache:
    """These rows of a layer."""
    return constrain_cache((jax.tree.map(lambda x: x[sources], layer),))[0]


def lengthened(layer: LayerCache, *, length: int) -> LayerCache:
    """With room for `length` tokens."""
    pad = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, length - x.shape[2]), (0, 0)))  # noqa: E731
    return constrain_cache((jax.tree.map(pad, layer),))[0]


def decode_segment(
    definition: DecoderDefinition,
    sampler: Sampler,
    segment_max: int,
    weights: DecodeWeights,
    cache: Cache,
    table: Int32[Array, "7 B"],
    limits: Int32[Array, "3"],
    rules: SamplingRules,
    seed: Int32[Array, ""],
    eos_ids: Int32[Array, "E"],
) -> tuple[Cache, Int32[Array, "6 B"], Int32[Array, "3 C B"]]:
    """Up to `segment_max` tokens of every row: the cache, a `RowStatus`, and what was drawn at each step.

    A prompt's last token is fed here, not in the prefill, so that every token of a sample, the first among them, is
    drawn from the same program.
    """
    rows, limit = RowTable(*table), Limits(*limits)
    words = jax.lax.bitcast_convert_type(jnp.stack([rows.uid_low, rows.uid_high], axis=1), jnp.uint32)
    of_row = lambda version, words, index: sample_keys(seed, version, words[None], index[None])[0]  # noqa: E731
    keys = jax.vmap(of_row)(rows.policy_version, words, rows.sample_index)
    head = definition.bind(weights.params).head
    num_active = jnp.sum(rows.left > 0)

    def goes_on(now: _Decoding) -> Array:
        active = jnp.sum(now.left > 0)
        enough = (limit.leave_when_finished > 0) & (num_active - active >= limit.leave_when_finished)
        return (now.step < limit.length) & ~enough & (active > limit.leave_when_active)

    def step(now: _Decoding) -> _Decoding:
        positions = jnp.maximum(now.length - 1, 0)
        hidden, cache = decode_step(definition, weights, now.cache, now.token, positions)
        logits = scaled_logits(hidden, head, effective_temperature(rules.temperature))
        drawn = sampler(logits, rules, jax.vmap(jax.random.fold_in)(keys, now.length))
        # Logits that are not finite leave no finite logprob.
        broken = (now.left > 0) & ~jnp.isfinite(drawn.logprobs)
        active = (now.left > 0) & ~broken
        ends = active & jnp.any(drawn.token_ids[:, None] == eos_ids, axis=1)
        bits = [jax.lax.bitcast_convert_type(x, jnp.int32) for x in (drawn.logprobs, drawn.kept_mass_logs)]
        record = jnp.stack([drawn.token_ids, *bits])[:, None]
        return _Decoding(
            cache=constrain_cache(cache),
            token=jnp.where(active, drawn.token_ids, now.token),
            length=now.length + active,
            left=jnp.where(ends | broken, 0, now.left - active),
            stopped=now.stopped | ends,
            broken=now.broken | broken,
            drawn=jax.lax.dynamic_update_slice(now.drawn, record, (0, now.step, 0)),
            step=now.step + 1,
        )

    start = _Decoding(
        cache=cache,
        token=rows.token,
        length=rows.length,
        left=rows.left,
        stopped=jnp.zeros_like(rows.left, bool),
        broken=jnp.zeros_like(rows.left, bool),
        drawn=jnp.zeros((3, segment_max, len(rows.token)), jnp.int32),
        step=jnp.int32(0),
    )
    end = jax.lax.while_loop(goes_on, step, start)
    steps = jnp.broadcast_to(end.step, end.left.shape)
    cache = _without(end.cache, end.broken)
    status = RowStatus(end.token, end.length, end.left, end.stopped, end.broken, steps)
    return cache, jnp.stack(status), end.drawn


def _without(cache: Cache, broken: Bool[Array, "B"]) -> Cache:
    """Zeros in the rows that broke: a NaN that stayed would break whoever comes into the slot next, masked or not."""
    first = jnp.argsort(~broken)

    def clear(i: Array, cache: Cache) -> Cache:
        empty = lambda x: jnp.zeros_like(x, shape=(1, *x.shape[1:]))  # noqa: E731
        return jax.tree.map(lambda x: jax.lax.dynamic_update_slice(x, empty(x), (first[i], 0, 0, 0)), cache)

    return constrain_cache(jax.lax.fori_loop(0, jnp.sum(broken), clear, cache))


Name = tuple[Any, ...]
"""Of a program: what it does, and the sizes that it does it for."""

Program = tuple[Callable[..., Any], tuple, dict[str, Any]]
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
        self._compiled: dict[Name, Callable[..., Any]] = {}
        self._served: set[tuple[bool, bool, bool]] = set()
        self.truncates = False
        """Some of them cut tokens off."""

    def __getitem__(self, name: Name) -> Callable[..., Any]:
        return self._compiled[name]

    def names(self, *, suspends: bool, rereads: bool, truncates: bool) -> list[Name]:
        """Of all programs that `compile` is there for."""
        return list(self._wanted(suspends=suspends, rereads=rereads, truncates=truncates))

    def compile(self, *, suspends: bool, rereads: bool, truncates: bool) -> None:
        """All that will be needed and is not there yet.

        Args:
            suspends: samples will be taken out of their slots before they are done.
            rereads: some of them will go on without their caches.
            truncates: the sampling rules cut tokens off.
        """
        if (suspends, rereads, truncates) in self._served:
            return
        self._served.add((suspends, rereads, truncates))
        self.truncates |= truncates
        wanted = self._wanted(suspends=suspends, rereads=rereads, truncates=truncates)
        with jax.set_mesh(self._mesh):
            for name, (function, arguments, options) in wanted.items():
                if name not in self._compiled:
                    self._compiled[name] = jax.jit(function, **options).lower(*arguments).compile()

    def lowered(self, *, truncates: bool) -> dict[str, Lowered]:
        """The programs that take most memory: the longest prefill, and decoding with all slots full."""
        shapes = self._shapes
        wanted = {
            "prefill": self._prefilling(shapes.prefill_rows[-1], shapes.max_prompt_length),
            "decode": self._decoding(shapes.num_slots, shapes.max_length, truncates=truncates),
        }
        with jax.set_mesh(self._mesh):
            return {name: jax.jit(run, **options).lower(*args) for name, (run, args, options) in wanted.items()}

    def abstract_cache(self, rows: int, length: int) -> Cache:
        """Shapes of `rows` rows with room for `length` tokens, on their shardings."""
        arch = self._definition.architecture
        one: Any = jax.ShapeDtypeStruct((rows, arch.num_kv_heads, length, arch.head_dim), self._dtype)
        return abstract_cache((LayerCache(one, one),) * arch.num_layers, self._mesh)

    @property
    def abstract_pool(self) -> Cache:
        return self.abstract_cache(self._shapes.num_pooled, self._shapes.max_prompt_length)

    @functools.cached_property
    def abstract_weights(self) -> DecodeWeights:
        return abstract_decode_weights(self._definition, self._mesh, self._dtype, self._decode_layout)

    def _whole(self, *shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self._mesh, PartitionSpec()))

    def _wanted(self, *, suspends: bool, rereads: bool, truncates: bool) -> dict[Name, Program]:
        shapes, slots, top = self._shapes, self._shapes.num_slots, self._shapes.max_length
        wanted: dict[Name, Program] = {("open",): self._opening()}
        for length in shapes.prompt_rungs:
            wanted |= {("prefill", rows, length): self._prefilling(rows, length) for rows in shapes.prefill_rows}
        for length in shapes.cache_rungs:
            wanted["insert", length] = self._inserting(self.abstract_cache(slots, length), self.abstract_pool)
        for rows, length in self.decoding_sizes:
            wanted["decode", rows, length, truncates] = self._decoding(rows, length, truncates=truncates)
        for shorter, longer in zip(shapes.cache_rungs, shapes.cache_rungs[1:], strict=False):
            function = lambda layer, length=longer: lengthened(layer, length=length)  # noqa: E731
            wanted["grow", shorter] = self._by_layer(function, (slots, shorter), (slots, longer))
        for smaller, larger in zip(shapes.batch_rungs, shapes.batch_rungs[1:], strict=False):
            wanted["compact", larger] = self._by_layer(move_rows, (larger, top), (smaller, top), self._whole(smaller))
        for smaller in shapes.batch_rungs[:-1]:
            wanted["expand", smaller] = self._by_layer(move_rows, (smaller, top), (slots, top), self._whole(slots))
        row = self.abstract_cache(1, top)
        if suspends:
            full = self.abstract_cache(slots, top)
            wanted["take",] = take, (full, self._whole()), {"out_shardings": shardings_of(row)}
            wanted["put",] = self._inserting(full, row)
        if rereads:
            arguments = (self.abstract_weights, *self._tokens(1, top))
            wanted["read",] = _bound(read_row, self._definition), arguments, {"out_shardings": shardings_of(row)}
        return wanted

    @property
    def decoding_sizes(self) -> list[tuple[int, int]]:
        """(rows, room) of each decode program: fewer rows than slots always have the full room."""
        shapes = self._shapes
        full = [(shapes.num_slots, length) for length in shapes.cache_rungs]
        return full + [(rows, shapes.max_length) for rows in shapes.batch_rungs[:-1]]

    def _opening(self) -> Program:
        shapes = (self.abstract_pool, self.abstract_cache(self._shapes.num_slots, self._shapes.cache_rungs[0]))
        empty = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)  # noqa: E731
        return empty, (), {"out_shardings": shardings_of(shapes)}

    def _prefilling(self, rows: int, length: int) -> Program:
        pool = self.abstract_pool
        arguments = (self.abstract_weights, pool, *self._tokens(rows, length), self._whole(rows), self._whole())
        return _bound(prefill_into, self._definition), arguments, _updating(1, pool)

    def _tokens(self, rows: int, length: int) -> tuple[Any, Any]:
        return self._whole(rows, length), self._whole(rows)

    def _inserting(self, cache: Cache, other: Cache) -> Program:
        indices = self._whole(self._shapes.num_slots)
        return insert, (cache, other, indices, indices, self._whole()), _updating(0, cache)

    def _by_layer(
        self, function: Callable[..., Any], before: tuple[int, int], after: tuple[int, int], *more: Any
    ) -> Program:
        """Of one layer at a time, so that there is never more than one too many."""
        arguments = (self.abstract_cache(*before)[0], *more)
        return function, arguments, {"out_shardings": shardings_of(self.abstract_cache(*after)[0])}

    def _decoding(self, rows: int, length: int, *, truncates: bool) -> Program:
        cache, scalar = self.abstract_cache(rows, length), self._whole(dtype=jnp.float32)
        rules = SamplingRules(scalar, self._whole(), scalar, scalar)  # pyright: ignore[reportArgumentType]
        arguments = (
            *(self.abstract_weights, cache, self._whole(len(RowTable._fields), rows)),
            *(self._whole(len(Limits._fields)), rules, self._whole(), self._whole(self._num_eos)),
        )
        whole = self._whole().sharding
        options = {"donate_argnums": 1, "out_shardings": (shardings_of(cache), whole, whole)}
        sampler: Sampler = draw_truncated if truncates else draw
        return _bound(decode_segment, self._definition, sampler, self._shapes.segment_max), arguments, options


def _bound(function: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    return lambda *arguments: function(*first, *arguments)


def _updating(number: int, cache: Cache) -> dict[str, Any]:
    """Options of a program that gives back its argument of this number, updated in place."""
    return {"donate_argnums": number, "out_shardings": shardings_of(cache)}


def as_arrays(rules: SamplingRules) -> SamplingRules:
    """As compiled programs take them."""
    scalar = np.float32
    arrays = scalar(rules.temperature), np.int32(rules.top_k), scalar(rules.top_p), scalar(rules.min_p)
    return SamplingRules(*arrays)  # pyright: ignore[reportArgumentType]
