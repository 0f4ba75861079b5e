"""Slots on one mesh, decoded segment by segment.

Between segments, waiting samples are admitted to free slots, others may be suspended, and the remaining rows are
compacted. A segment runs on the devices while the host reads the tokens of the previous one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int32

from app.model.decode_weights import DecodeWeights
from app.model.decoder import DecoderDefinition
from app.model.prefill_and_decode import KVCache
from app.records.sample import Prompt
from app.rollout.batch_engine import BatchShape, Footprint
from app.rollout.counters import RolloutCounters
from app.rollout.request import GenerationRequest
from app.rollout.sampling import SamplingRules, finish_reason, hash_uids
from app.rollout.sequence import RolloutSequence, SuspendedSequence
from app.rollout.shape_buckets import SlotShapes
from app.rollout.slot_programs import DecodeLimits, RowStatus, RowTable, SlotPrograms, rules_to_arrays
from app.rollout.stop_strings import DecodeText
from settings.errors import InputError
from settings.schema.rollout import DecodeLayout


@dataclass(frozen=True)
class SegmentResult:
    """Result of one segment. Until `collect`, its tokens are being copied from the devices."""

    decoded: Sequence[tuple[int, RolloutSequence, int]]
    """(slot, row, number of drawn tokens) for every row that was unfinished before the segment."""
    steps: int
    num_rows: int
    """Number of rows decoded at each step, including empty ones."""
    policy_version: int
    _tokens: Array

    @property
    def finished(self) -> list[RolloutSequence]:
        return [row for _, row, _ in self.decoded if row.finish_reason]

    def collect(self) -> None:
        """Appends the tokens of the segment to its rows. Must be called once per segment, in order."""
        drawn = np.asarray(self._tokens)
        for slot, row, count in self.decoded:
            row.segment_tokens.append(drawn[:, :count, slot].copy())
            row.segment_versions.append((self.policy_version, count))


class SlotEngine:
    """A fixed number of slots for one decoder on one mesh of this host's devices.

    Args:
        eos_ids: every token id that ends a sequence.
        exact: whether a suspended sample without a cache replays its tokens through the program that drew them;
            otherwise a prefill recomputes the cache, which rounds differently.
        decode_text: converts token ids to text, to find stop strings between segments; None = only when they are cut.
        programs: programs of another engine with the same arguments, shared so that they are compiled only once.
        decode_layout: layout of the weights; see `DecodeWeights`.
    """

    def __init__(
        self,
        definition: DecoderDefinition,
        mesh: Mesh,
        shapes: SlotShapes,
        *,
        eos_ids: Sequence[int],
        dtype: jnp.dtype,
        exact: bool,
        decode_text: DecodeText | None = None,
        programs: SlotPrograms | None = None,
        decode_layout: DecodeLayout = "gathered",
    ):
        self.shapes = shapes
        self.exact = exact
        self.counters = RolloutCounters()
        self.programs = programs or SlotPrograms(
            definition, mesh, shapes, dtype=dtype, num_eos=len(eos_ids), decode_layout=decode_layout
        )
        self._eos_ids = np.asarray(eos_ids, np.int32)
        self._decode_text = decode_text
        self._weights: Any = ()
        self._pool: KVCache = ()
        self._cache: KVCache = ()
        self.on_token_replayed: Callable[[], None] | None = None
        """Called after each replayed token, in the thread that admits rows."""
        self._rows: list[RolloutSequence | None] = []
        self._running: tuple[list[tuple[int, RolloutSequence]], Array, Array] | None = None

    # A rollout ---------------------------------------------------------------------------------------------------

    def compile(self, rules: SamplingRules, *, suspends: bool = False) -> None:
        """Compiles the programs that a rollout needs, except those already compiled.

        Args:
            suspends: whether samples may be suspended.
        """
        # The truncating sampler also serves rules that exclude no token, which saves a program.
        truncates = rules.truncates or self.programs.truncates
        self.programs.compile(suspends=suspends, recomputes=suspends and not self.exact, truncates=truncates)

    def open(self, weights: DecodeWeights, request: GenerationRequest, *, suspends: bool = False) -> None:
        """Starts a rollout with empty slots, after compiling any missing programs."""
        self.compile(request.rules, suspends=suspends)
        self._truncates, self._suspends = self.programs.truncates, suspends
        self._rules, self._seed = rules_to_arrays(request.rules), np.int32(request.seed)
        self._stop = request.stop
        self._pool, self._cache = self.programs["open",]()
        self._pooled: dict[bytes, int] = {}
        self._cache_length = self.shapes.cache_buckets[0]
        self._rows = [None] * self.shapes.num_slots
        self._table = np.zeros((len(RowTable._fields), self.shapes.num_slots), np.int32)
        self.load_weights(weights, policy_version=request.policy_version)

    def load_weights(self, weights: DecodeWeights, *, policy_version: int) -> None:
        """Replaces the weights. Rows keep their caches and noise keys.

        Prompts of rows admitted later are prefilled again.
        """
        self._weights, self._policy_version = weights, policy_version
        self._pooled.clear()

    def close(self) -> None:
        """Frees the devices. Unfinished samples and the caches of suspended ones are lost."""
        self._pool = self._cache = self._weights = ()
        self._rows, self._running = [], None

    @property
    def is_open(self) -> bool:
        """Whether the engine holds weights."""
        return bool(self._weights)

    @property
    def active_rows(self) -> list[RolloutSequence]:
        """Rows in slots; all of them are unfinished."""
        return [row for row in self._rows if row is not None]

    @property
    def num_free_slots(self) -> int:
        return self.shapes.num_slots - len(self.active_rows)

    # Between segments --------------------------------------------------------------------------------------------

    def check_fits(self, row: RolloutSequence) -> None:
        """Raises InputError if a row does not fit into a slot."""
        length = len(row.prompt.token_ids)
        self.shapes.prompt_bucket(length)
        if length + row.max_new_tokens > self.shapes.max_length:
            raise InputError(
                f"rollout.max_new_tokens: {length} + {row.max_new_tokens} tokens of prompt and completion are more "
                f"than the {self.shapes.max_length} that fit into a slot; lower this setting or data.max_prompt_length"
            )

    def has_prefilled(self, prompt: Prompt) -> bool:
        return _prompt_key(prompt) in self._pooled

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        """Prefills the distinct prompts that are not in the pool, and evicts the least recently used prompts."""
        wanted = {_prompt_key(prompt): prompt for prompt in prompts}
        assert len(wanted) <= self.shapes.num_pooled_prompts
        for key in [key for key in wanted if key in self._pooled]:
            self._pooled[key] = self._pooled.pop(key)
        by_bucket: dict[int, list[bytes]] = {}
        for key, prompt in wanted.items():
            if key not in self._pooled:
                by_bucket.setdefault(self.shapes.prompt_bucket(len(prompt.token_ids)), []).append(key)
        most = self.shapes.prefill_rows[-1]
        for bucket, keys in by_bucket.items():
            for first in range(0, len(keys), most):
                self._prefill(bucket, keys[first : first + most], wanted)

    def _prefill(self, prompt_length: int, keys: Sequence[bytes], wanted: dict[bytes, Prompt]) -> None:
        num_rows = next(rows for rows in self.shapes.prefill_rows if rows >= len(keys))
        ids, lengths, places = np.zeros((num_rows, prompt_length), np.int32), np.zeros(num_rows, np.int32), []
        for i, key in enumerate(keys):
            prompt = wanted[key]
            lengths[i] = len(prompt.token_ids)
            ids[i, : lengths[i]] = prompt.token_ids
            free = set(range(self.shapes.num_pooled_prompts)) - set(self._pooled.values())
            places.append(
                min(free) if free else self._pooled.pop(next(old for old in self._pooled if old not in wanted))
            )
            self._pooled[key] = places[-1]
        run = self.programs["prefill", num_rows, prompt_length]
        self._pool = run(self._weights, self._pool, ids, lengths, _pad_indices(places, num_rows), np.int32(len(places)))
        self.counters.prefilled_tokens += int(lengths.sum())

    def admit(self, rows: Sequence[RolloutSequence | SuspendedSequence]) -> None:
        """Puts rows into free slots. Prompts that are not in the pool are prefilled first.

        Raises:
            InputError: a row does not fit into a slot.
        """
        assert self._running is None and len(rows) <= self.num_free_slots
        if not rows:
            return
        for row in rows:
            self.check_fits(row.row if isinstance(row, SuspendedSequence) else row)
        self._expand()
        fresh = []
        for row in rows:
            if isinstance(row, RolloutSequence):
                fresh.append(row)
            elif row.cache is None and (self.exact or not row.row.num_tokens):
                fresh.append(row.row)
            else:
                self._insert_suspended(row)
        for first in range(0, len(fresh), self.shapes.num_pooled_prompts):
            self._insert(fresh[first : first + self.shapes.num_pooled_prompts])
        self._replay_tokens([row for row in fresh if row.num_tokens])

    def _insert(self, rows: Sequence[RolloutSequence]) -> None:
        """Inserts rows with the caches of their prompts, which must all fit into the pool."""
        self.prefill([row.prompt for row in rows])
        self.counters.prompt_tokens += sum(len(row.prompt.token_ids) for row in rows if not row.started_s)
        slots = [self._assign_slot(row) for row in rows]
        sources = _pad_indices([self._pooled[_prompt_key(row.prompt)] for row in rows], self.shapes.num_slots)
        targets = _pad_indices(slots, self.shapes.num_slots)
        self._cache = self.programs["insert", self._cache_length](
            self._cache, self._pool, sources, targets, np.int32(len(rows))
        )

    def _replay_tokens(self, rows: Sequence[RolloutSequence]) -> None:
        """Feeds the tokens of rows again after their prompts, one per segment, and ignores what these segments draw.

        All other rows are idle: at most they write cache entries that later steps overwrite before reading them.
        """
        table, known = self._table.copy(), [(self._rows.index(row), row, row.token_ids) for row in rows]
        columns = RowTable(*table)
        columns.remaining[:] = 0
        for slot, row, _ in known:
            table[:, slot] = _table_column(row, 0)
        steps = max((row.num_tokens for row in rows), default=0)
        for count in range(steps):
            for slot, row, ids in known:
                fed = min(count, len(ids))
                columns.token[slot] = ids[fed - 1] if fed else columns.token[slot]
                columns.length[slot] = len(row.prompt.token_ids) + fed
                columns.remaining[slot] = count < len(ids)
            # A copy, because the devices may still be reading the table when the host changes it.
            status, _ = self._decode(table.copy(), DecodeLimits(length=1, leave_when_finished=0, leave_when_active=0))
            if self.on_token_replayed is not None:
                status.block_until_ready()
                self.on_token_replayed()
        self.counters.row_steps += steps * len(self._rows)
        self.counters.recomputed_tokens += sum(row.num_tokens for row in rows)

    def _insert_suspended(self, suspended: SuspendedSequence) -> None:
        row, cache = suspended
        self._grow_cache(self.shapes.max_length)
        if cache is None:
            ids = np.concatenate([row.prompt.token_ids, row.token_ids])
            padded = np.zeros((1, self.shapes.max_length), np.int32)
            padded[0, : len(ids)] = ids
            cache = self.programs["read",](self._weights, padded, np.asarray([len(ids)], np.int32))
            self.counters.recomputed_tokens += len(ids)
        places = _pad_indices([0], self.shapes.num_slots), _pad_indices([self._assign_slot(row)], self.shapes.num_slots)
        self._cache = self.programs["put",](self._cache, cache, *places, np.int32(1))

    def _assign_slot(self, row: RolloutSequence) -> int:
        """Assigns the first free slot to a row and returns it."""
        assert row.is_collected
        slot = self._rows.index(None)
        row.started_s = row.started_s or time.perf_counter()
        self._rows[slot] = row
        self._table[:, slot] = _table_column(row, row.num_tokens)
        return slot

    def suspend(self, rows: Sequence[RolloutSequence]) -> list[SuspendedSequence]:
        """Takes unfinished samples out of their slots. Their last segment must have been collected."""
        assert self._running is None and self._suspends
        if not rows:
            return []
        self._expand()
        self._grow_cache(self.shapes.max_length)
        suspended = []
        for row in rows:
            slot = self._rows.index(row)
            suspended.append(SuspendedSequence(row, self.programs["take",](self._cache, np.int32(slot))))
            self._rows[slot] = None
            self._table[:, slot] = 0
        return suspended

    @property
    def compact_size(self) -> int:
        """Number of rows of the smallest program that holds all active rows."""
        return next(size for size in self.shapes.batch_buckets if size >= len(self.active_rows))

    def compact(self) -> None:
        """Compacts the active rows, if a smaller program can hold them."""
        while self.compact_size < len(self._rows):
            self._grow_cache(self.shapes.max_length)
            size, active = len(self._rows), [i for i, row in enumerate(self._rows) if row is not None]
            smaller = max(bucket for bucket in self.shapes.batch_buckets if bucket < size)
            self._move(_pad_indices(active, smaller), len(active), program=("compact", size))

    def _expand(self) -> None:
        size = len(self._rows)
        if size < self.shapes.num_slots:
            self._move(_pad_indices(list(range(size)), self.shapes.num_slots), size, program=("expand", size))

    def _move(self, sources: np.ndarray, count: int, *, program: tuple) -> None:
        """Moves slot `sources[i]` to slot i; slots from `count` on become empty."""
        self._run_by_layer(program, sources)
        self._rows = [self._rows[source] if i < count else None for i, source in enumerate(sources)]
        self._table = self._table[:, sources]
        self._table[:, count:] = 0

    def _grow_cache(self, length: int) -> None:
        while self._cache_length < length:
            self._run_by_layer(("grow", self._cache_length))
            self._cache_length = next(size for size in self.shapes.cache_buckets if size > self._cache_length)

    def _run_by_layer(self, program: tuple, *arguments: np.ndarray) -> None:
        run, layers = self.programs[program], list(self._cache)
        # No other reference to the old layers may exist, or the devices would hold two caches.
        self._cache = ()
        for i in range(len(layers)):
            layers[i] = run(layers[i], *arguments)
        self._cache = tuple(layers)

    # A segment ---------------------------------------------------------------------------------------------------

    def start_segment(self, *, length: int, leave_when_finished: int = 0, leave_when_active: int = 0) -> None:
        """Dispatches a segment and returns at once.

        The segment ends after `length` tokens of each row, when all rows are done, or when the caches are full (they
        grow before the next segment).

        Args:
            leave_when_finished: number of newly finished rows at which it ends, because samples need slots; 0 = never.
            leave_when_active: number of active rows at which it ends, because they fit into a smaller program.
        """
        assert self._running is None and self.active_rows
        rows = [(slot, row) for slot, row in enumerate(self._rows) if row is not None]
        length = min(length, self.shapes.segment_max, self._steps_until_full())
        status, drawn = self._decode(self._table, DecodeLimits(length, leave_when_finished, leave_when_active))
        for array in (status, drawn):
            array.copy_to_host_async()
        self._running = rows, status, drawn

    def _decode(self, table: Int32[np.ndarray, "7 B"], limits: DecodeLimits) -> tuple[Array, Array]:
        """Dispatches the decode program; returns the `RowStatus` and the drawn tokens."""
        self._cache, status, drawn = self.programs["decode", len(self._rows), self._cache_length, self._truncates](
            *(self._weights, self._cache, table, np.asarray(limits, np.int32)),
            *(self._rules, self._seed, self._eos_ids),
        )
        return status, drawn

    def _steps_until_full(self) -> int:
        """Returns how many tokens all rows can draw before one needs a longer cache. Grows a full cache."""
        table = RowTable(*self._table)
        while True:
            # The last drawn token is not fed, so it needs no cache entry.
            steps = self._cache_length - table.length + 1
            short = (table.remaining > 0) & (table.remaining > steps)
            least = int(steps[short].min()) if short.any() else self.shapes.segment_max
            if least > 0:
                return least
            self._grow_cache(self._cache_length + 1)

    def finish_segment(self) -> SegmentResult:
        """Waits for the running segment and frees the slots of finished rows."""
        assert self._running is not None
        (rows, status, drawn), self._running = self._running, None
        after = RowStatus(*np.asarray(status))
        counts = after.length - RowTable(*self._table).length
        for slot, row in rows:
            row.num_tokens += int(counts[slot])
            row.num_segments += 1
            if after.remaining[slot] == 0:
                self._finish_row(slot, row, finish_reason(after.stopped[slot], after.non_finite[slot]))
        self._table[:3] = after.token, after.length, after.remaining
        steps, num_rows = int(after.steps[0]), len(self._rows)
        decoded = [(slot, row, int(counts[slot])) for slot, row in rows]
        self.counters.count_segment(steps=steps, num_rows=num_rows, num_generated=sum(n for _, _, n in decoded))
        return SegmentResult(decoded, steps, num_rows, self._policy_version, drawn)

    def _finish_row(self, slot: int, row: RolloutSequence, reason: str) -> None:
        row.finish_reason, row.elapsed_s = reason, time.perf_counter() - row.started_s
        self._rows[slot] = None

    def finish_stopped_rows(self) -> None:
        """Frees the slots of rows whose collected text contains a stop string. No segment may be running."""
        assert self._running is None
        for slot, row in enumerate(self._rows):
            if row is not None and self._decode_text and row.newly_contains(self._stop, self._decode_text):
                self._finish_row(slot, row, "stop")
                self._table[:, slot] = 0

    # Sizes -------------------------------------------------------------------------------------------------------

    @property
    def batch_shape(self) -> BatchShape:
        """Largest batch shape of the engine."""
        shapes = self.shapes
        lengths = shapes.max_prompt_length, shapes.max_length, shapes.segment_max
        return BatchShape(shapes.prefill_rows[-1], shapes.num_slots, *lengths)

    def footprint(self) -> Footprint:
        """Returns the arrays on the devices when all slots are full. Compiles nothing."""
        slots = self.programs.abstract_cache(self.shapes.num_slots, self.shapes.max_length)
        return Footprint(self.programs.abstract_weights, self.programs.abstract_pool, slots)


def _table_column(row: RolloutSequence, num_tokens: int) -> RowTable:
    """Returns the table entry of a row whose first `num_tokens` tokens are in its slot."""
    ids = row.token_ids[:num_tokens] if num_tokens else row.prompt.token_ids
    low, high = hash_uids([row.prompt.uid])[0].view(np.int32)
    return RowTable(
        token=int(ids[-1]) if len(ids) else 0,
        length=len(row.prompt.token_ids) + num_tokens,
        remaining=row.max_new_tokens - num_tokens,
        uid_hash_low=low,
        uid_hash_high=high,
        sample_index=row.sample_index,
        policy_version=row.noise_step,
    )


def _prompt_key(prompt: Prompt) -> bytes:
    """Returns a key that is equal for prompts with equal tokens."""
    return prompt.token_ids.tobytes()


def _pad_indices(indices: Sequence[int], size: int) -> Int32[np.ndarray, "size"]:
    """Pads indices with zeros, which the programs ignore."""
    return np.asarray([*indices, *[0] * (size - len(indices))], np.int32)
