"""Tests that real workers under every schedule generate the same samples, whatever happens to them."""

import functools
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.mesh.program_cache import CompilationCounter
from app.records.sample import Sample
from app.rollout.engine.engine import SlotEngine
from app.rollout.scheduling import protocol
from app.rollout.scheduling.protocol import Command, SegmentEnded, Suspend
from app.rollout.scheduling.schedule_metrics import schedule_metrics, slot_spans
from app.rollout.sequence import stop_length
from app.rollout.workers.async_generation import AsyncRollout
from app.rollout.workers.worker import RolloutWorker, WorkerDiedError
from tests.rollout import slots
from tests.rollout.scheduling.driving import check_invariants, is_finished
from tests.rollout.worker_pools import (
    EAGER,
    KINDS,
    LIMIT,
    assert_names_last_workers,
    bits,
    commands_of,
    dying,
    engine_on,
    engine_with,
    expected,
    moved,
    samples_of,
    scheduled,
    unequal_workers,
    workers_on,
)
from tests.tiny import spell


@pytest.mark.parametrize(
    ("policy", "in_turn"), [("sync", True), ("pdsr_v1", False), ("pdsr_v2", False), ("adaptive", True)]
)
def test_exact_mode_is_bitwise_independent_of_scheduler_and_workers(policy: str, in_turn: bool) -> None:
    made = scheduled(workers_on(3), policy, in_turn=in_turn)
    replayed = made.make_scheduler()
    samples = samples_of(made)
    assert bits(samples) == bits(expected())
    assert_names_last_workers(samples, made)
    found = schedule_metrics(made.records)
    assert found.useful_tokens == sum(slots.LENGTHS) and found.repacked_tokens == 0
    assert 0 <= found.bubble < 1 and found.makespan_s > 0
    assert made.take_counters().generated_tokens == sum(slots.LENGTHS)
    for event, commands in made.records:
        assert tuple(replayed.handle(event)) == commands, "its events replay without workers"
        check_invariants(replayed)
    assert is_finished(replayed)
    assert {entry.uid: entry.num_tokens for entry in replayed.samples} == {
        s.uid: len(s.completion_ids) for s in samples
    }


def test_workers_that_take_turns_repeat_a_rollout_exactly_without_compiling() -> None:
    def log() -> list[tuple[protocol.Event, Sequence[Command]]]:
        made = scheduled(workers_on(3), "pdsr_v2", in_turn=True)
        samples_of(made)
        assert any(isinstance(command, Suspend) for command in commands_of(made)), "rows move to other devices"
        assert moved(made) and all(one.how == "copy" for one in moved(made))
        return list(map(without_times, made.records))

    first, compilations = log(), CompilationCounter()
    assert log() == first and compilations.take_count() == 0
    compilations.close()


def without_times(record: protocol.EventRecord) -> tuple[protocol.Event, Sequence[Command]]:
    event = replace(record.event, at=0.0)
    return replace(event, seconds=0.0) if isinstance(event, SegmentEnded) else event, record.commands


def test_waiting_for_kv_blocks_does_not_change_samples() -> None:
    few = slots.few_blocks(True)
    workers = [RolloutWorker(kind, kind, engine_with(0, few.shapes, True, programs=few.programs)) for kind in KINDS[:2]]
    made = scheduled(workers, "pdsr_v2", in_turn=True)
    assert bits(samples_of(made)) == bits(expected())
    counts = made.take_counters()
    assert counts.preempted_rows > 0 and counts.generated_tokens == sum(slots.LENGTHS)


def test_moving_from_short_to_long_slots_does_not_change_samples() -> None:
    made = scheduled(workers := unequal_workers(), "pdsr_v1", in_turn=True)
    fast, heavy = (worker.engine.programs for worker in workers)
    assert (fast.num_blocks - 2, heavy.num_blocks - 2) == (8 * LIMIT // 4, 4 * heavy.blocks_per_sample)
    samples = samples_of(made)
    assert bits(samples) == bits(expected())
    reasons = {one.why for one in commands_of(made) if isinstance(one, Suspend)}
    assert reasons & {"row limit", "breaker", "probe limit"}
    assert all(one.how == "copy" for one in moved(made)), "rows move with their caches"
    longest = max(len(s.prompt.token_ids) + len(s.completion_ids) for s in samples)
    assert longest > LIMIT and made.take_counters().recomputed_tokens == 0


def test_rows_too_long_for_the_remaining_workers_end_the_rollout() -> None:
    workers = unequal_workers()
    with dying(workers[1], lives=1), pytest.raises(WorkerDiedError, match="process is gone"):
        samples_of(scheduled(workers, in_turn=True))
    with pytest.raises(RuntimeError, match=r"longer than rollout\.workers\.fast\.max_length"):
        samples_of(scheduled(workers[:1], "pdsr_v2", in_turn=True))


def test_workers_that_share_a_device_take_turns_on_it() -> None:
    engine = engine_on(0, True)
    twin = engine_with(0, engine.shapes, True, programs=engine.programs)
    pairs = zip(KINDS, (engine, twin), strict=False)
    made = scheduled([RolloutWorker(f"{kind}-0", kind, one, device="0") for kind, one in pairs], in_turn=True)
    assert bits(samples_of(made)) == bits(expected())
    assert {span.worker for span in slot_spans(made.records)} == {"fast-0", "heavy-0"}
    assert schedule_metrics(made.records).bubble >= 0.5


@pytest.mark.parametrize(("policy", "exact"), [("sync", True), ("pdsr_v2", True), ("adaptive", False)])
def test_a_dead_worker_loses_no_samples_and_is_not_used_again(policy: str, exact: bool) -> None:
    workers = workers_on(2, exact=exact)
    made = scheduled(workers, policy, in_turn=True)
    with dying(workers[0], lives=2):
        slots.assert_same_samples(samples_of(made), expected(), tolerance=0.0 if exact else 1e-4)
    (lost,) = [record.event for record in made.records if isinstance(record.event, protocol.WorkerLost)]
    assert lost.worker == "fast-0"
    counts, again = made.take_counters(), sum(one.num_tokens for one in moved(made) if one.how == "recompute")
    assert schedule_metrics(made.records).repacked_tokens == again > 0
    # In fast mode, a prefill also reads the prompts again.
    assert counts.recomputed_tokens == again if exact else counts.recomputed_tokens > again
    assert counts.generated_tokens == sum(slots.LENGTHS)
    slots.assert_same_samples(samples_of(made), expected(), tolerance=0.0 if exact else 1e-4)
    assert {event.worker for event, _ in made.records if isinstance(event, protocol.WorkerJoined)} == {"heavy-1"}


def test_when_all_workers_have_died_the_error_of_the_last_is_raised() -> None:
    workers = workers_on(2)
    made = scheduled(workers)
    with dying(workers[0], lives=1), dying(workers[1], lives=2), pytest.raises(WorkerDiedError, match="is gone"):
        samples_of(made)
    with pytest.raises(WorkerDiedError, match="every rollout worker has died"):
        samples_of(made)


@pytest.mark.parametrize("at", ["open", "start_segment", "suspend"])
def test_any_other_worker_error_is_raised_by_the_rollout(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = workers_on(2)
    made, engine = scheduled(workers, "pdsr_v1"), workers[0].engine

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(engine, at, fail)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        samples_of(made)
    monkeypatch.undo()
    assert all(worker.engine.runner.weights is None for worker in workers) and engine.runner.cache == ()
    assert bits(samples_of(made)) == bits(expected())


def test_a_truncating_fast_limit_ends_samples_exactly_at_the_limit() -> None:
    made = scheduled(workers_on(2), "pdsr_v1", pdsr=EAGER.model_copy(update={"on_fast_limit": "truncate"}))
    pairs = zip(samples_of(made), expected(), strict=True)
    cut = [(ours, full) for ours, full in pairs if len(ours.completion_ids) < len(full.completion_ids)]
    assert len(cut) == schedule_metrics(made.records).truncated > 0
    for ours, full in cut:
        assert len(ours.completion_ids) == EAGER.fast_limit_tokens and ours.finish_reason == "length"
        np.testing.assert_array_equal(ours.completion_ids, full.completion_ids[: EAGER.fast_limit_tokens])


# Stop strings ----------------------------------------------------------------------------------------------------

STOP = ("1 4", "22")
UNSTOPPED = replace(slots.REQUEST, max_new_tokens=slots.LONGEST)
STOPPED = replace(UNSTOPPED, stop=STOP)


def of_bytes(token_ids: Sequence[int]) -> str:
    return bytes(token_ids).decode("utf-8", "replace")


def first_stop(token_ids: Sequence[int], stop: Sequence[str], stop_text) -> int | None:
    """Tries every length in turn, as a slow oracle."""
    lengths = range(1, len(token_ids) + 1)
    return next((n for n in lengths if any(s in stop_text(token_ids[:n]) for s in stop)), None)


@given(st.text("a\n€🙂", max_size=20), st.integers(0, 60), st.lists(st.text("a\n€🙂", min_size=1), max_size=3))
def test_the_first_token_that_completes_a_stop_string_is_found(text: str, cut: int, stop: list[str]) -> None:
    """Covers characters that consist of several byte tokens."""
    token_ids = list(text.encode())[:cut]
    assert stop_length(token_ids, stop, of_bytes) == first_stop(token_ids, stop, of_bytes)


@functools.cache
def cut_by_hand() -> list[Sample]:
    """Returns samples that were generated without stop strings and cut afterwards."""
    cut = []
    for sample in slots.generate(slots.slots_of(True), max_new_tokens=slots.LONGEST):
        length = first_stop(sample.completion_ids.tolist(), STOP, spell)
        reason = sample.finish_reason if length is None else "stop"
        ids, logprobs = sample.completion_ids[:length], sample.behavior_logprobs[:length]
        cut.append(replace(sample, finish_reason=reason, completion_ids=ids, behavior_logprobs=logprobs))
    return cut


@functools.cache
def stopping_engine(device: int) -> SlotEngine:
    """Returns slots that look for stop strings between segments and share the programs of other slots."""
    engine = engine_on(device, True)
    return engine_with(device, engine.shapes, True, programs=engine.programs, stop_text=spell)


def test_stop_strings_end_samples_and_free_their_slots() -> None:
    made = slots.batching(stopping_engine(0), max=2)
    made.generate(slots.weights_on(), slots.PROMPTS, UNSTOPPED)
    num_unstopped = made.take_counters().generated_tokens
    assert bits(made.generate(slots.weights_on(), slots.PROMPTS, STOPPED)) == bits(cut_by_hand())
    assert 3 <= sum(sample.finish_reason == "stop" for sample in cut_by_hand()) < len(cut_by_hand())
    num_kept = sum(len(sample.completion_ids) for sample in cut_by_hand())
    # A stop string is found after its segment of at most two tokens, and the row leaves after the next one.
    assert num_kept < made.take_counters().generated_tokens <= num_kept + 4 * len(cut_by_hand()) < num_unstopped


def test_workers_apply_stop_strings_alike_in_closed_and_async_rollouts() -> None:
    workers = [RolloutWorker(kind, kind, stopping_engine(i)) for i, kind in enumerate(KINDS[:2])]
    made = scheduled(workers, "pdsr_v2", in_turn=True)
    samples = made.generate(slots.weights_on(), slots.PROMPTS, STOPPED)
    assert bits(samples) == bits(cut_by_hand())
    assert made.take_counters().generated_tokens < len(samples) * slots.LONGEST
    with closing(AsyncRollout(made, slots.weights_on(), STOPPED)) as rollout:
        rollout.submit(slots.PROMPTS, noise_step=STOPPED.policy_version)
        assert bits(rollout.collect_round()) == bits(cut_by_hand())
