"""Real workers under the scheduler: the same samples, whoever decodes them, wherever and however often they move."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Event
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from app.mesh.submesh import make_submesh
from app.records.sample import Sample
from app.rollout.scheduling.events import (
    Admit,
    Command,
    Commit,
    EventRecord,
    RunSegment,
    SegmentEnded,
    Suspend,
    WorkerJoined,
    WorkerKind,
    WorkerLost,
)
from app.rollout.scheduling.metrics import schedule_metrics, slot_spans
from app.rollout.scheduling.scheduler import POLICIES, Scheduler
from app.rollout.slot_engine import SegmentResult as RanSegment
from app.rollout.slot_engine import SlotEngine
from app.rollout.worker_pool import RolloutWorkerPool, ScheduleConfig
from app.rollout.workers import RolloutWorker
from app.tracking.compilation_counter import CompilationCounter
from scripts.bench.cost_model import CostModel
from scripts.bench.length_traces import trace_from_records
from scripts.bench.simulated_slots import ProgramSizes
from scripts.bench.simulator import SchedulerSimulator, SimulatedWorkerSpec
from settings.schema.rollout import PdsrSettings, SegmentSettings
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

EAGER = PdsrSettings(fast_limit_tokens=8, probe_limit_tokens=4, window=64, window_min=4)
"""Limits so low that these short samples run into them."""
SHORT = SegmentSettings(min=1, max=5, overhead_steps=0.5)
KINDS: tuple[WorkerKind, ...] = ("fast", "heavy", "fast")


class Mortal(SlotEngine):
    """Fails once it has no lives left: each segment takes one."""

    lives = math.inf
    sleep: Event | None = None
    """Until it is set, no segment ends."""

    broken: str | None = None
    """Uid of a sample whose cache becomes NaN once it has a token."""

    def start_segment(self, **limits: int) -> None:
        for slot, row in enumerate(self._rows):
            if row is not None and row.uid == self.broken and row.num_tokens:
                self._cache = jax.tree.map(lambda x, slot=slot: x.at[slot].set(np.nan), self._cache)
        super().start_segment(**limits)

    def finish_segment(self) -> RanSegment:
        if self.sleep is not None:
            self.sleep.wait()
        self.lives -= 1
        if self.lives < 0:
            raise RuntimeError("the device is gone")
        return super().finish_segment()


@functools.cache
def engine_on(device: int, *, exact: bool = True) -> Mortal:
    """Four slots on one device, of few programs in either mode."""
    shapes = new_slots(4, exact=True).shapes
    return Mortal(DEFINITION, mesh_of(device), shapes, eos_ids=(), dtype=FLOAT32, exact=exact)


@contextmanager
def dying(worker: RolloutWorker, *, lives: int) -> Iterator[None]:
    assert isinstance(worker.engine, Mortal)
    worker.engine.lives = lives
    yield
    worker.engine.lives = math.inf


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
    lease_s: float | None = None,
    **clock: Any,
) -> RolloutWorkerPool:
    return RolloutWorkerPool(workers, ScheduleConfig(policy, pdsr, SHORT, in_turn, lease_s), decode_text=spell, **clock)


def samples_of(made: RolloutWorkerPool) -> list[Sample]:
    return made.generate(weights_on(), PROMPTS, REQUEST)


@functools.cache
def expected() -> list[Sample]:
    """In the order of the queue, on one worker's slots."""
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
@pytest.mark.parametrize("num_workers", [1, 3])
def test_in_exact_mode_neither_scheduler_nor_workers_change_a_bit(policy: str, num_workers: int, in_turn: bool) -> None:
    made = scheduled(workers_on(num_workers), policy, in_turn=in_turn)
    samples = samples_of(made)
    assert bits(samples) == bits(expected())
    last = {row.uid: event.worker for event, _ in made.records if isinstance(event, SegmentEnded) for row in event.rows}
    assert {s.uid: s.worker for s in samples} == last and all(s.elapsed_s > 0 for s in samples)
    found = schedule_metrics(made.records)
    assert found.useful_tokens == sum(LENGTHS) and found.wasted_tokens == 0
    assert 0 <= found.bubble < 1 and found.makespan_s > 0
    assert made.take_counters().generated_tokens == sum(LENGTHS)


def test_suspended_rows_move_to_other_devices_with_their_caches() -> None:
    made = scheduled(workers_on(2), "pdsr_v2", in_turn=True)
    samples_of(made)
    moved = [one for one in admitted(made) if one.how == "copy"]
    assert any(isinstance(command, Suspend) for command in commands_of(made))
    assert {one.source for one in moved} >= {"fast-0"} and all(one.num_tokens for one in moved)
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


@pytest.mark.parametrize("in_turn", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_worker_that_dies_loses_nothing(policy: str, in_turn: bool) -> None:
    workers = workers_on(2)
    made = scheduled(workers, policy, in_turn=in_turn)
    with dying(workers[0], lives=2):
        assert bits(samples_of(made)) == bits(expected())
    (lost,) = [record.event for record in made.records if isinstance(record.event, WorkerLost)]
    assert lost.worker == "fast-0" and "the device is gone" in lost.why
    fed_again = [one for one in admitted(made) if one.how == "replay"]
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
    assert made.length_history[broken.prompt.uid] == np.mean(siblings)


def test_a_worker_that_falls_asleep_is_given_up_until_it_wakes() -> None:
    workers = workers_on(2)
    sleeper = workers[1].engine
    assert isinstance(sleeper, Mortal)
    sleeper.sleep = Event()
    made = scheduled(workers, lease_s=2.0)
    assert bits(samples_of(made)) == bits(expected())
    (lost,) = [record.event for record in made.records if isinstance(record.event, WorkerLost)]
    assert lost.worker == "heavy-1" and "silent for 2.0 s" in lost.why
    assert bits(samples_of(made)) == bits(expected())
    assert {record.event.worker for record in made.records if isinstance(record.event, WorkerJoined)} == {"fast-0"}
    sleeper.sleep.set()
    for thread in made._stalled.values():
        thread.join()
    sleeper.sleep = None
    assert bits(samples_of(made)) == bits(expected())
    assert made._stalled == {}


def test_in_fast_mode_what_a_dead_worker_held_is_read_again() -> None:
    workers = workers_on(2, exact=False)
    made = scheduled(workers, in_turn=True)
    with dying(workers[1], lives=2):
        samples = samples_of(made)
    for ours, theirs in zip(samples, expected(), strict=True):
        np.testing.assert_array_equal(ours.completion_ids, theirs.completion_ids)
        np.testing.assert_allclose(ours.behavior_logprobs, theirs.behavior_logprobs, atol=1e-4)
    again = [one for one in admitted(made) if one.how == "prefill" and one.num_tokens]
    assert schedule_metrics(made.records).repacked_tokens == sum(one.num_tokens for one in again) > 0
    assert made.take_counters().recomputed_tokens > 0


def test_what_the_last_worker_failed_with_is_raised() -> None:
    workers = workers_on(2)
    with dying(workers[0], lives=1), dying(workers[1], lives=2), pytest.raises(RuntimeError, match="device is gone"):
        samples_of(scheduled(workers))
    assert bits(samples_of(scheduled(workers))) == bits(expected())


def test_the_events_of_real_workers_replay_in_the_core() -> None:
    made = scheduled(workers_on(3), "pdsr_v2")
    samples_of(made)
    replayed = made.make_scheduler()
    for event, commands in made.records:
        assert tuple(replayed.handle(event)) == commands
        replayed.check_invariants()
    assert replayed.is_finished
    assert {entry.uid: entry.num_tokens for entry in replayed.samples} == {
        s.uid: len(s.completion_ids) for s in expected()
    }


def test_in_turn_the_same_rollout_has_the_same_log() -> None:
    logs = []
    for _ in range(2):
        made = scheduled(workers_on(3), "pdsr_v2", in_turn=True, clock=map(float, itertools.count()).__next__)
        samples_of(made)
        logs.append(made.records)
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


@pytest.mark.parametrize("policy", ["sync", "adaptive"])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_simulator_gives_the_same_commands_as_real_workers_did(num_workers: int, policy: str) -> None:
    """Slots that grow and shrink, samples that end where nobody foresaw it: only seconds may differ."""
    engines = [unforeseen_engine(number) for number in range(num_workers)]
    workers = [
        RolloutWorker(f"{kind}-0", kind, engine, device="0") for kind, engine in zip(KINDS, engines, strict=False)
    ]
    made = scheduled(workers, policy, in_turn=True)
    samples = made.generate(weights_on(), PROMPTS, replace(REQUEST, max_new_tokens=LONGEST))
    assert len({len(sample.completion_ids) for sample in samples}) > 5
    shapes = engines[0].shapes
    ladders = ProgramSizes(shapes.batch_buckets, shapes.cache_buckets, shapes.prompt_buckets, shapes.prefill_rows)
    specs = [
        SimulatedWorkerSpec(one.name, one.kind, shapes.num_slots, shapes.batch_buckets[:-1], one.device, ladders)
        for one in workers
    ]
    scheduler = Scheduler(policy, pdsr=EAGER, segment=SHORT)
    clock = SchedulerSimulator(scheduler, trace_from_records(made.records), specs, CostModel(), max_new=LONGEST)
    assert list(map(decisions, clock.run())) == list(map(decisions, made.records))


def decisions(record: EventRecord) -> tuple[Sequence[Command], set[tuple[str, int]]]:
    """What was commanded, and what samples had become; workers report their rows in the order of their slots."""
    commits = [command for command in record.commands if isinstance(command, Commit)]
    others = [command for command in record.commands if not isinstance(command, Commit)]
    return others, {(row.uid, row.num_tokens) for commit in commits for row in commit.rows}


@functools.cache
def unforeseen_engine(number: int) -> SlotEngine:
    """In the fast mode, with ends of sequence in a tenth of the vocabulary; all share their programs."""
    eos_ids = range(0, DEFINITION.architecture.vocab_size, 10)
    if number == 0:
        return new_slots(4, exact=False, eos_ids=eos_ids)
    first = unforeseen_engine(0)
    return SlotEngine(
        *(DEFINITION, mesh_of(0), first.shapes), eos_ids=eos_ids, dtype=FLOAT32, exact=False, programs=first.programs
    )
