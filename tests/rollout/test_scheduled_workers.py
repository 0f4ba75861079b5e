"""Tests that real workers under every schedule generate the same samples."""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from app.mesh.device_mesh import make_submesh
from app.mesh.program_cache import CompilationCounter
from app.records.sample import Sample
from app.rollout.engine.engine import SegmentResult, SlotEngine
from app.rollout.scheduling.protocol import (
    Admit,
    Command,
    Event,
    EventRecord,
    RunSegment,
    SegmentEnded,
    Suspend,
    WorkerJoined,
    WorkerKind,
    WorkerLost,
)
from app.rollout.scheduling.schedule_metrics import schedule_metrics, slot_spans
from app.rollout.scheduling.scheduler import POLICIES, Scheduler
from app.rollout.scheduling.segment_limits import SegmentLimits
from app.rollout.sequence import RolloutSequence, SuspendedSequence
from app.rollout.workers.worker import Admission, RolloutWorker, WorkerDiedError
from app.rollout.workers.worker_pool import RolloutWorkerPool, ScheduleConfig
from settings.schema.rollout import PdsrSettings, SegmentSettings
from tests.rollout.scheduling.driving import with_constants
from tests.rollout.scheduling.invariants import check_invariants, is_finished
from tests.rollout.scheduling.length_traces import trace_from_records
from tests.rollout.scheduling.simulator import Costs, SchedulerSimulator, SimulatedWorkerSpec
from tests.rollout.test_slot_engine import (
    DEFINITION,
    FLOAT32,
    LENGTHS,
    LONGEST,
    PROMPTS,
    REQUEST,
    generate,
    new_slots,
    weights_on,
)
from tests.tiny import make_mesh, spell

EAGER = PdsrSettings(fast_limit_tokens=8, probe_limit_tokens=4, window=64)
"""Limits that even these short samples exceed."""
SHORT = SegmentSettings(min=1, max=5)
LIMIT = 16
"""Longest row of fast workers in tests of unequal workers, of which samples have up to 28."""
KINDS: tuple[WorkerKind, ...] = ("fast", "heavy", "fast")


class Mortal(SlotEngine):
    """An engine that fails after a number of segments, or once where `fails_at` says."""

    lives = math.inf
    fails_at = ""
    error: BaseException = WorkerDiedError("the process is gone")

    broken: str | None = None
    """Uid of a sample whose cache becomes NaN after its first token."""

    def _fail(self, at: str) -> None:
        if self.fails_at == at:
            self.fails_at = ""
            raise self.error

    def open(self, *arguments: Any, **named: Any) -> None:
        super().open(*arguments, **named)
        self._fail("open")

    def suspend(self, row: RolloutSequence) -> SuspendedSequence:
        self._fail("suspend")
        return super().suspend(row)

    def start_segment(self, limits: SegmentLimits) -> None:
        self._fail("start")
        for slot in self.scheduler.slots:
            if slot.row.uid == self.broken and slot.row.num_tokens:
                own = slot.blocks[-1]
                blocks = self.runner.cache
                self.runner.cache = jax.tree.map(lambda x, own=own: x.at[own].set(np.nan), blocks)
        super().start_segment(limits)

    def finish_segment(self) -> SegmentResult:
        self.lives -= 1
        if self.lives < 0:
            raise self.error
        return super().finish_segment()


@functools.cache
def engine_on(device: int, *, exact: bool = True) -> Mortal:
    """Returns an engine with four slots on one device, and few programs in either mode."""
    shapes = new_slots(4, exact=True).shapes
    return Mortal(DEFINITION, mesh_of(device), shapes, eos_ids=(), dtype=FLOAT32, exact=exact)


@functools.cache
def unequal_engine(device: int, kind: WorkerKind, *, exact: bool) -> Mortal:
    """Returns an engine of many slots for short rows (fast), or of few slots for long ones (heavy)."""
    sizes = {"fast": (8, LIMIT), "heavy": (4, None)}[kind]
    shapes = new_slots(
        sizes[0], exact=True, block_size=4, row_limit=sizes[1], rows_together=4 if exact else None
    ).shapes
    return Mortal(DEFINITION, mesh_of(device), shapes, eos_ids=(), dtype=FLOAT32, exact=exact)


@contextmanager
def dying(worker: RolloutWorker, *, lives: int, error: BaseException = Mortal.error) -> Iterator[None]:
    """Lets a worker end after so many segments, as by the death of its process."""
    assert isinstance(worker.engine, Mortal)
    worker.engine.lives, worker.engine.error = lives, error
    yield
    worker.engine.lives, worker.engine.error = math.inf, Mortal.error


def mesh_of(*devices: int) -> Mesh:
    return make_submesh(devices, template=make_mesh())


def workers_on(num_workers: int, *, exact: bool = True) -> list[RolloutWorker]:
    return [RolloutWorker(f"{kind}-{i}", kind, engine_on(i, exact=exact)) for i, kind in enumerate(KINDS[:num_workers])]


def scheduled(
    workers: Sequence[RolloutWorker],
    policy: str = "adaptive",
    *,
    in_turn: bool = False,
    pdsr: PdsrSettings = EAGER,
) -> RolloutWorkerPool:
    return EagerPool(workers, ScheduleConfig(policy, pdsr, SHORT, in_turn), decode_text=spell)


class EagerPool(RolloutWorkerPool):
    """Workers whose scheduler decides by lengths as soon as four samples have finished."""

    def make_scheduler(self, prompts: Iterable[str] = ()) -> Scheduler:
        return with_constants(super().make_scheduler(prompts), window_min=4)


def samples_of(made: RolloutWorkerPool) -> list[Sample]:
    return made.generate(weights_on(), PROMPTS, REQUEST)


@functools.cache
def expected() -> list[Sample]:
    """Samples in the order of the queue, generated by one worker."""
    return generate(engine_on(0))


def bits(samples: Sequence[Sample]) -> list[tuple[str, int, str, list[int], bytes]]:
    return [
        (s.uid, s.group_id, s.finish_reason, s.completion_ids.tolist(), s.behavior_logprobs.tobytes()) for s in samples
    ]


def commands_of(made: RolloutWorkerPool) -> Iterator[Command]:
    return itertools.chain.from_iterable(record.commands for record in made.records)


def admitted(made: RolloutWorkerPool) -> list[Admit]:
    return [one for command in commands_of(made) if isinstance(command, RunSegment) for one in command.admit]


@pytest.mark.parametrize("in_turn", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_in_exact_mode_neither_scheduler_nor_workers_change_a_bit(policy: str, in_turn: bool) -> None:
    made = scheduled(workers_on(3), policy, in_turn=in_turn)
    samples = samples_of(made)
    assert bits(samples) == bits(expected())
    last = {row.uid: event.worker for event, _ in made.records if isinstance(event, SegmentEnded) for row in event.rows}
    assert {s.uid: s.worker for s in samples} == last and all(s.elapsed_s > 0 for s in samples)
    found = schedule_metrics(made.records)
    assert found.useful_tokens == sum(LENGTHS) and found.repacked_tokens == 0
    assert 0 <= found.bubble < 1 and found.makespan_s > 0
    assert made.take_counters().generated_tokens == sum(LENGTHS)


@functools.cache
def engine_with_few_blocks(device: int, exact: bool) -> Mortal:
    """Returns an engine with blocks for little more than one of the longest samples."""
    shapes = new_slots(4, exact=True).shapes._replace(block_size=4, num_blocks=11)
    return Mortal(DEFINITION, mesh_of(device), shapes, eos_ids=(), dtype=FLOAT32, exact=exact)


@pytest.mark.parametrize("policy", ["pdsr_v2", "adaptive"])
def test_where_blocks_run_out_rows_wait_in_their_worker_and_may_be_moved_from_there(policy: str) -> None:
    workers = [RolloutWorker(f"{k}-{i}", k, engine_with_few_blocks(i, True)) for i, k in enumerate(KINDS[:2])]
    made = scheduled(workers, policy, in_turn=True)
    assert bits(samples_of(made)) == bits(generate(engine_with_few_blocks(0, True)))
    counts = made.take_counters()
    assert counts.preempted_rows > 0 and counts.generated_tokens == sum(LENGTHS)
    for ours, theirs in zip(samples_of(made), expected(), strict=True):
        assert ours.completion_ids.tolist() == theirs.completion_ids.tolist()


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("policy", ["pdsr_v1", "adaptive"])
def test_samples_grow_from_many_short_slots_into_few_long_ones(policy: str, exact: bool) -> None:
    """In exact mode they are bit for bit those of equal workers."""
    workers = [RolloutWorker(f"{k}-{i}", k, unequal_engine(i, k, exact=exact)) for i, k in enumerate(KINDS[:2])]
    fast, heavy = (worker.engine.programs for worker in workers)
    assert (fast.num_blocks - 2, heavy.num_blocks - 2) == (8 * LIMIT // 4, 4 * heavy.blocks_per_sample)
    made = scheduled(workers, policy, in_turn=True)
    compare = bits if exact else (lambda samples: [s.completion_ids.tolist() for s in samples])
    equal = new_slots(4, exact=True, block_size=4)
    assert compare(samples_of(made)) == compare(generate(equal))
    reasons = {one.why for one in commands_of(made) if isinstance(one, Suspend)}
    assert reasons & {"row limit", "breaker", "probe limit"}
    assert all(one.how == "copy" for one in admitted(made) if one.num_tokens), "rows move with their caches"
    longest = max(len(s.prompt.token_ids) + len(s.completion_ids) for s in expected())
    assert longest > LIMIT and made.take_counters().recomputed_tokens == 0


def test_long_rows_that_no_worker_is_left_for_end_the_rollout_with_the_error_of_the_lost_one() -> None:
    workers = [RolloutWorker(f"{k}-{i}", k, unequal_engine(i, k, exact=True)) for i, k in enumerate(KINDS[:2])]
    made = scheduled(workers, "adaptive", in_turn=True)
    with dying(workers[1], lives=1), pytest.raises(WorkerDiedError, match="process is gone"):
        samples_of(made)


def test_a_rollout_without_workers_for_long_rows_says_so() -> None:
    worker = RolloutWorker("fast-0", "fast", unequal_engine(0, "fast", exact=True))
    with pytest.raises(RuntimeError, match=r"longer than rollout\.workers\.fast\.max_length"):
        samples_of(scheduled([worker], "pdsr_v2", in_turn=True))


def test_a_row_that_waits_for_blocks_leaves_without_a_cache() -> None:
    fast, heavy = (RolloutWorker(k, k, engine_with_few_blocks(i, False)) for i, k in enumerate(KINDS[:2]))
    rows = [RolloutSequence(PROMPTS[0], i, LONGEST, noise_step=3, name=str(i)) for i in range(4)]
    for worker in (fast, heavy):
        worker.open(weights_on(), REQUEST, suspends=True)
    command, admissions = RunSegment("fast", (), SegmentLimits(16)), deque(Admission(row, None) for row in rows)
    while len(fast.engine.scheduler.slots) == len(fast.engine.active_rows):
        fast.start_segment(command, admissions)
        assert {report.uid for report in fast.finish_segment().rows} == {row.name for row in rows}
    [waiting, *_] = [row for row in rows if row not in [slot.row for slot in fast.engine.scheduler.slots]]
    moved = fast.suspend(waiting)
    assert moved.cache is None
    given: Future[SuspendedSequence] = Future()
    given.set_result(moved)
    heavy.start_segment(replace(command, worker="heavy"), deque([Admission(waiting, given)]))
    assert [report.num_tokens for report in heavy.finish_segment().rows] == [waiting.num_tokens] > [0]
    fast.close()
    heavy.close()


def test_suspended_rows_move_to_other_devices_with_their_caches() -> None:
    made = scheduled(workers_on(2), "pdsr_v2", in_turn=True)
    samples_of(made)
    moved = [one for one in admitted(made) if one.how == "copy"]
    assert any(isinstance(command, Suspend) for command in commands_of(made))
    assert moved and all(one.num_tokens for one in moved)
    assert schedule_metrics(made.records).repacked_tokens == 0
    compilations = CompilationCounter()
    samples_of(made)
    assert compilations.take_count() == 0
    compilations.close()


def test_workers_that_share_a_device_take_turns_on_it() -> None:
    engine = engine_on(0)
    twin = SlotEngine(
        *(DEFINITION, mesh_of(0), engine.shapes), eos_ids=(), dtype=FLOAT32, exact=True, programs=engine.programs
    )
    twins = [
        RolloutWorker(f"{kind}-0", kind, engine, device="0")
        for kind, engine in zip(KINDS, (engine, twin), strict=False)
    ]
    made = scheduled(twins, in_turn=True)
    assert bits(samples_of(made)) == bits(expected())
    busy = sorted({(span.start_s, span.worker) for span in slot_spans(made.records) if span.slot == 0})
    assert {worker for _, worker in busy} == {"fast-0", "heavy-0"}
    assert schedule_metrics(made.records).bubble >= 0.5


@pytest.mark.parametrize("policy", POLICIES)
def test_a_worker_that_dies_loses_nothing(policy: str) -> None:
    workers = workers_on(2)
    made = scheduled(workers, policy, in_turn=True)
    with dying(workers[0], lives=2):
        assert bits(samples_of(made)) == bits(expected())
    (lost,) = [record.event for record in made.records if isinstance(record.event, WorkerLost)]
    assert lost.worker == "fast-0"
    fed_again = [one for one in admitted(made) if one.how == "recompute" and one.num_tokens]
    counts = made.take_counters()
    assert counts.recomputed_tokens == sum(one.num_tokens for one in fed_again) > 0
    assert counts.generated_tokens == sum(LENGTHS)


def test_a_sample_that_breaks_is_dropped_and_teaches_nothing() -> None:
    workers, longest = workers_on(2), max(expected(), key=lambda s: len(s.completion_ids))
    for worker in workers:
        assert isinstance(worker.engine, Mortal)
        worker.engine.broken = longest.uid
    made = scheduled(workers, in_turn=True)
    samples = samples_of(made)
    for worker in workers:
        assert isinstance(worker.engine, Mortal)
        worker.engine.broken = None
    (broken,) = [s for s in samples if s.finish_reason == "dropped:non-finite logits"]
    assert broken.uid == longest.uid and 0 < len(broken.completion_ids) < len(longest.completion_ids)
    assert longest.completion_ids.tolist()[: len(broken.completion_ids)] == broken.completion_ids.tolist()
    assert bits([s for s in samples if s is not broken]) == bits([s for s in expected() if s.uid != broken.uid])
    siblings = [len(s.completion_ids) for s in samples if s.prompt is broken.prompt and s is not broken]
    assert made.learned_lengths.prompts[broken.prompt.uid] == np.mean(siblings)


def test_in_fast_mode_what_a_dead_worker_held_is_read_again() -> None:
    workers = workers_on(2, exact=False)
    made = scheduled(workers, in_turn=True)
    with dying(workers[1], lives=2):
        samples = samples_of(made)
    for ours, theirs in zip(samples, expected(), strict=True):
        np.testing.assert_array_equal(ours.completion_ids, theirs.completion_ids)
        np.testing.assert_allclose(ours.behavior_logprobs, theirs.behavior_logprobs, atol=1e-4)
    again = [one for one in admitted(made) if one.how == "recompute" and one.num_tokens]
    assert schedule_metrics(made.records).repacked_tokens == sum(one.num_tokens for one in again) > 0
    assert made.take_counters().recomputed_tokens > 0


def test_what_the_last_worker_failed_with_is_raised() -> None:
    workers = workers_on(2)
    made = scheduled(workers)
    with dying(workers[0], lives=1), dying(workers[1], lives=2), pytest.raises(WorkerDiedError, match="is gone"):
        samples_of(made)
    with pytest.raises(WorkerDiedError, match="every rollout worker has died"):
        samples_of(made)


def test_a_dead_worker_takes_part_in_no_later_rollout() -> None:
    workers = workers_on(2)
    made = scheduled(workers)
    with dying(workers[0], lives=1):
        samples_of(made)
    assert bits(samples_of(made)) == bits(expected())
    assert {event.worker for event, _ in made.records if isinstance(event, WorkerJoined)} == {"heavy-1"}


@pytest.mark.parametrize("at", ["open", "start", "suspend", "finish"])
def test_any_other_error_of_a_worker_ends_the_rollout_with_it(at: str) -> None:
    workers, error = workers_on(2), RuntimeError("RESOURCE_EXHAUSTED")
    made, engine = scheduled(workers, "pdsr_v1"), workers[0].engine
    assert isinstance(engine, Mortal)
    with dying(workers[0], lives=0 if at == "finish" else 1000, error=error):
        engine.fails_at = at
        with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
            samples_of(made)
        engine.fails_at = ""
    assert all(worker.engine.runner.weights is None for worker in workers) and engine.runner.cache == ()
    assert bits(samples_of(made)) == bits(expected())


def test_the_events_of_real_workers_replay_in_the_core() -> None:
    made = scheduled(workers_on(3), "pdsr_v2")
    replayed = made.make_scheduler()
    samples_of(made)
    for event, commands in made.records:
        assert tuple(replayed.handle(event)) == commands
        check_invariants(replayed)
    assert is_finished(replayed)
    assert {entry.uid: entry.num_tokens for entry in replayed.samples} == {
        s.uid: len(s.completion_ids) for s in expected()
    }


def test_in_turn_the_same_rollout_has_the_same_log() -> None:
    logs = []
    for _ in range(2):
        made = scheduled(workers_on(3), "pdsr_v2", in_turn=True)
        samples_of(made)
        logs.append(list(map(without_times, made.records)))
    assert logs[0] == logs[1]


def test_a_truncating_fast_limit_ends_samples_exactly_there() -> None:
    made = scheduled(workers_on(2), "pdsr_v1", pdsr=EAGER.model_copy(update={"on_fast_limit": "truncate"}))
    samples = samples_of(made)
    pairs = zip(samples, expected(), strict=True)
    cut = [(ours, full) for ours, full in pairs if len(ours.completion_ids) < len(full.completion_ids)]
    assert len(cut) == schedule_metrics(made.records).truncated > 0
    for ours, full in cut:
        assert len(ours.completion_ids) == EAGER.fast_limit_tokens and ours.finish_reason == "length"
        np.testing.assert_array_equal(ours.completion_ids, full.completion_ids[: EAGER.fast_limit_tokens])


def test_a_stream_that_nobody_reads_to_its_end_frees_the_devices() -> None:
    made = scheduled(workers_on(2))
    stream = made.stream(weights_on(), PROMPTS, REQUEST)
    assert bits([next(stream)]) == bits(expected()[:1])
    stream.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert not any(worker.engine.active_rows for worker in made.workers)
    assert bits(samples_of(made)) == bits(expected())


def test_a_later_rollout_knows_how_long_the_prompts_samples_were() -> None:
    made = scheduled(workers_on(1), in_turn=True)
    samples_of(made)
    assert {one.role for one in admitted(made)} >= {"probe"}
    samples_of(made)
    assert "probe" not in {one.role for one in admitted(made)}
    assert len(made.take_schedule_metrics()) == 2 and made.take_schedule_metrics() == []


UNFORESEEN: dict[str, list[tuple[WorkerKind, int]]] = {
    "two of unequal slots in turns": [("fast", 0), ("heavy", 0)],
    "three of unequal slots": [("fast", 0), ("heavy", 1), ("fast", 2)],
}
"""Kinds and devices of workers."""


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("pools", UNFORESEEN)
def test_the_simulator_gives_the_events_and_commands_of_real_workers(pools: str, policy: str) -> None:
    """Samples end without notice; only times and the order of the rows in a report may differ."""
    slots = {"fast": (8, LIMIT), "heavy": (4, None)} if "unequal" in pools else dict.fromkeys(KINDS, (4, None))
    shared = "0" if "turns" in pools else None
    workers = [
        RolloutWorker(f"{kind}-{i}", kind, unforeseen_engine(device, i, *slots[kind]), shared)
        for i, (kind, device) in enumerate(UNFORESEEN[pools])
    ]
    made = scheduled(workers, policy, in_turn=True)
    # With this seed, no sample ends by an end token at its very limit; a trace does not say why a sample ended.
    request = replace(REQUEST, max_new_tokens=LONGEST, seed=4)
    samples = made.generate(weights_on(), PROMPTS, request)
    assert len({len(sample.completion_ids) for sample in samples}) > 10
    clock = SchedulerSimulator(
        with_constants(Scheduler(policy, pdsr=EAGER, segment=SHORT), window_min=4),
        trace_from_records(made.records),
        [spec_of(worker) for worker in workers],
        # Segments of equal duration end in the order in which they started, as those of one thread do.
        Costs(segment_s=1.0),
        max_new=LONGEST,
    )
    assert list(map(without_times, clock.run())) == list(map(without_times, made.records))
    if "unequal" in pools:
        longest = max(len(s.prompt.token_ids) + len(s.completion_ids) for s in samples)
        assert longest > LIMIT and any(isinstance(command, Suspend) for command in commands_of(made))


def spec_of(worker: RolloutWorker) -> SimulatedWorkerSpec:
    """Returns the worker for the virtual clock."""
    shapes = worker.engine.shapes
    return SimulatedWorkerSpec(
        *(worker.name, worker.kind, shapes.num_slots, shapes.batch_buckets[:-1], worker.device),
        capacity=worker.engine.programs.capacity,
        max_length=shapes.row_limit,
    )


def without_times(record: EventRecord) -> tuple[Event, Sequence[Command]]:
    """Returns the event and the commands, with rows in the order of their uids; workers report them by slot."""
    event = replace(record.event, at=0.0)
    if isinstance(event, SegmentEnded):
        event = replace(event, seconds=0.0, rows=tuple(sorted(event.rows, key=attrgetter("uid"))))
    return event, record.commands


@functools.cache
def unforeseen_engine(device: int, number: int, num_slots: int, row_limit: int | None) -> SlotEngine:
    """Returns an engine in fast mode with a tenth of the vocabulary as end tokens; `number` distinguishes twins."""
    eos_ids = range(0, DEFINITION.architecture.vocab_size, 10)
    shapes = new_slots(num_slots, exact=False, block_size=4, row_limit=row_limit).shapes
    return SlotEngine(DEFINITION, mesh_of(device), shapes, eos_ids=eos_ids, dtype=FLOAT32, exact=False)
