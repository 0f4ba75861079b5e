"""The slot engine, which decodes in segments; each segment has three steps: schedule, run and postprocess.

Between segments, waiting samples are admitted to free slots, and running samples may be suspended. The devices decode
a segment while the host reads the tokens of the previous segment.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from app.mesh.device_mesh import num_hosts
from app.model.decode_weights import DecodeWeights
from app.model.decoder import DecoderDefinition
from app.records.sample import Prompt
from app.rollout.counters import RolloutCounters
from app.rollout.engine.programs import SlotPrograms
from app.rollout.engine.runner import SlotRunner
from app.rollout.engine.scheduler import DecodedRow, ScheduledSegment, SlotScheduler
from app.rollout.engine.segment import RowStatus
from app.rollout.engine.shapes import BatchShape, Footprint, SlotShapes
from app.rollout.engine.slot_device import Slot
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import SamplingRules
from app.rollout.scheduling.segment_limits import SegmentLimits
from app.rollout.sequence import DecodeText, RolloutSequence, SuspendedSequence
from settings.errors import InputError


@dataclass
class SegmentResult:
    """Result of one segment. Its tokens are copied from the devices in the background until `collect`."""

    decoded: Sequence[DecodedRow]
    waited: Sequence[RolloutSequence]
    """Rows that were not decoded because they waited for KV blocks."""
    steps: int
    policy_version: int
    _slots: Sequence[Slot]
    _tokens: Array | None

    @property
    def finished(self) -> list[RolloutSequence]:
        return [one.row for one in self.decoded if one.row.finish_reason]

    @property
    def acting(self) -> list[RolloutSequence]:
        """Rows that have ended a turn and wait for their environments."""
        return [one.row for one in self.decoded if one.row.is_acting]

    def collect(self) -> None:
        """Appends the segment's tokens to its rows; later calls do nothing. Segments must be collected in order."""
        if self._tokens is None:
            return
        drawn, self._tokens = np.asarray(self._tokens), None
        for slot in self._slots:
            slot.collect_prompt_routes()
        for row, place, num_forced, num_drawn in self.decoded:
            row.segment_tokens.append(drawn[:, num_forced : num_forced + num_drawn, place].copy())
            row.segment_versions.append((self.policy_version, num_drawn))


class SlotEngine:
    """Decodes a fixed number of slots on one mesh, which contains devices of this host or of all hosts.

    Args:
        eos_ids: every token id that ends a sequence.
        exact: whether a lost cache is recomputed by replaying its tokens through the decode program that sampled them;
            otherwise by a prefill, which rounds differently.
        stop_text: converts token ids to text, to end rows with a stop string between segments; None = they continue.
        programs: programs of another engine with the same arguments; None = new programs.

    Raises:
        InputError: there are too few KV blocks for one sample.
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
        stop_text: DecodeText | None = None,
        programs: SlotPrograms | None = None,
    ):
        self.shapes = shapes
        self.exact = exact
        self.counters = RolloutCounters()
        self.programs = programs or SlotPrograms(definition, mesh, shapes, dtype=dtype, num_eos=len(eos_ids))
        self.scheduler = SlotScheduler(self.programs, self.counters, exact=exact)
        self.runner = SlotRunner(self.programs, eos_ids=eos_ids)
        self._stop_text = stop_text
        self._stop: tuple[str, ...] = ()
        self._running: tuple[ScheduledSegment, Array, Array] | None = None
        """The running segment, its `RowStatus` and its tokens."""
        self._last: SegmentResult | None = None

    # A rollout ---------------------------------------------------------------------------------------------------

    def compile(self, rules: SamplingRules, *, suspends: bool = False) -> None:
        """Compiles the programs that a rollout needs, except those already compiled.

        Args:
            suspends: whether samples may be suspended.
        """
        # The truncating sampler also handles rules that exclude no token, which saves a program.
        truncates = rules.truncates or self.programs.truncates
        recomputes = self.recomputes or (suspends and not self.exact)
        self.programs.compile(suspends=suspends, recomputes=recomputes, truncates=truncates)

    @property
    def recomputes(self) -> bool:
        """Whether prefills may have to recompute the caches of preempted rows or of rows with long observations."""
        return (self.programs.preempts or self.shapes.max_forced > 0) and not self.exact

    def open(self, weights: DecodeWeights, request: GenerationRequest, *, suspends: bool = False) -> None:
        """Starts a rollout with empty slots, after compiling any missing programs; see `compile`."""
        self.compile(request.rules, suspends=suspends)
        self._suspends, self._stop, self._last = suspends, request.stop, None
        self.runner.open(request)
        self.scheduler.open()
        self.load_weights(weights, policy_version=request.policy_version)

    def load_weights(self, weights: DecodeWeights, *, policy_version: int) -> None:
        """Replaces the weights. Rows keep their caches and PRNG keys, but cached prompts are dropped."""
        self._policy_version = policy_version
        self.runner.load_weights(weights)
        for device in self.scheduler.devices:
            device.pool.drop_prompts()

    def close(self) -> None:
        """Frees the device memory of weights and cache. Unfinished samples are lost."""
        self.runner.close()
        self.scheduler.close()
        self._running, self._last = None, None

    @property
    def active_rows(self) -> list[RolloutSequence]:
        """All rows in slots, and rows that wait for KV blocks."""
        return self.scheduler.active_rows

    @property
    def num_free_slots(self) -> int:
        return self.scheduler.num_free_slots

    # Between segments --------------------------------------------------------------------------------------------

    def check_fits(self, row: RolloutSequence) -> None:
        """Raises InputError if a row's prompt or its maximum length does not fit into a slot."""
        length = len(row.prompt.token_ids)
        self.shapes.prompt_bucket(length)
        if length + row.max_new_tokens > self.shapes.max_length:
            raise InputError(
                f"rollout.max_new_tokens: {length} prompt tokens and {row.max_new_tokens} new tokens exceed the "
                f"{self.shapes.max_length} tokens of a slot; lower this setting or data.max_prompt_length"
            )

    def prefill(self, prompts: Iterable[Prompt]) -> None:
        """Prefills prompts of upcoming samples; see `SlotScheduler.prefill`."""
        self.scheduler.prefill(prompts)
        self._carry_out()

    def admit(self, rows: Sequence[RolloutSequence | SuspendedSequence]) -> None:
        """Puts rows into free slots; rows for which there are no KV blocks wait for a later segment.

        Every row must fit into a slot; see `check_fits`.
        """
        assert self._running is None and len(rows) <= self.num_free_slots
        admitted = [one if isinstance(one, SuspendedSequence) else SuspendedSequence(one) for one in rows]
        for row, _, _ in admitted:
            if not row.started_s:
                row.started_s = time.perf_counter()
                self.counters.prompt_tokens += len(row.prompt.token_ids)
        self.scheduler.admit(admitted)
        self._carry_out()

    def forget(self, key: str) -> None:
        """Frees the KV blocks of the row with this key, which ended while it waited for its environment."""
        self.scheduler.forget(key)
        self._carry_out()

    def suspend(self, row: RolloutSequence) -> SuspendedSequence:
        """Takes an unfinished row out of its slot and returns it with its cache; its last segment must be collected."""
        assert self._running is None and self._suspends and row.is_collected
        if (queued := self.scheduler.take_queued(row)) is not None:
            return queued
        slot = next(slot for slot in self.scheduler.slots if slot.row is row)
        slot.collect_prompt_routes()
        cache = self.runner.take(slot.device, slot.blocks[: self.programs.blocks_for(slot.length)])
        self.scheduler.remove(slot)
        self._carry_out()
        return SuspendedSequence(row, cache, slot.length)

    def _carry_out(self) -> None:
        for work in self.scheduler.take_work():
            self.runner.carry_out(work)

    # A segment ---------------------------------------------------------------------------------------------------

    def start_segment(self, limits: SegmentLimits) -> None:
        """Schedules and dispatches a segment without waiting for its end.

        The segment ends when it reaches a limit, all its rows are done, or the KV blocks are full. While rows wait for
        blocks, `leave_when_finished` is at least 1.
        """
        assert self._running is None and self.active_rows
        segment = self.scheduler.schedule(limits, is_stopped=self._is_stopped)
        self._carry_out()
        self._running = segment, *self.runner.decode(segment)

    def finish_segment(self) -> SegmentResult:
        """Waits for the running segment and frees the slots of finished rows."""
        assert self._running is not None
        (segment, status, drawn), self._running = self._running, None
        after = RowStatus(*np.asarray(status))
        decoded = self.scheduler.postprocess(segment, after)
        self._carry_out()
        steps = int(after.steps[0])
        self.counters.segments += 1
        self.counters.row_steps += steps * segment.num_rows
        self.counters.generated_tokens += sum(one.num_drawn for one in decoded)
        waited, slots = [one.row for one in self.scheduler.queued], [*segment.places.values()]
        self._last = SegmentResult(decoded, waited, steps, self._policy_version, slots, drawn)
        return self._last

    def finish_stopped_rows(self) -> None:
        """Frees the slots of rows whose collected text contains a stop string. No segment may be running."""
        assert self._running is None
        for slot in self.scheduler.slots:
            if self._contains_stop(slot.row):
                self.scheduler.finish(slot, "stop")
        self._carry_out()

    def _is_stopped(self, row: RolloutSequence) -> bool:
        """Collects the last segment, then returns whether a row contains a stop string."""
        if self._last is not None:
            self._last.collect()
        return self._contains_stop(row)

    def _contains_stop(self, row: RolloutSequence) -> bool:
        return self._stop_text is not None and row.newly_contains(self._stop, self._stop_text)

    # Sizes -------------------------------------------------------------------------------------------------------

    @property
    def batch_shape(self) -> BatchShape:
        """Sizes of the largest prefill and decode batches on this host."""
        shapes = self.shapes
        lengths = shapes.max_prompt_length, shapes.max_row_length, self.programs.block_size
        hosts = num_hosts(self.programs.mesh)
        num_prompts = shapes.prefill_rows[-1] * self.programs.num_shards // hosts
        return BatchShape(num_prompts, shapes.num_slots // hosts, *lengths)

    def footprint(self) -> Footprint:
        """Returns the shapes of the weights and the KV cache on the devices, without compiling."""
        return Footprint(self.programs.abstract_weights, self.programs.abstract_pool)
