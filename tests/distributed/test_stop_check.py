"""Tests that generation stops at the end of a segment on request, and can start again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing

import pytest

from app.distributed.stop_check import StoppedError, never_stop
from app.rollout.sequence import RolloutSequence
from tests.rollout.test_async_generation import HALF, KEY, generation_of
from tests.rollout.test_scheduled_workers import bits, engine_on, expected, samples_of, scheduled, workers_on
from tests.rollout.test_slot_engine import (
    LENGTHS,
    PROMPTS,
    REQUEST,
    batching,
    weights_on,
)


def after(num_looks: int) -> Callable[[], bool]:
    """Returns a stop check that becomes true after this many calls."""
    left = iter(range(num_looks))
    return lambda: next(left, None) is None


def test_slots_are_free_when_they_were_asked_to_stop() -> None:
    made = batching(engine_on(0, True))
    for looks in (0, 2):
        made.stop_requested = after(looks)
        with pytest.raises(StoppedError):
            made.generate(weights_on(), PROMPTS, REQUEST)
        assert made.engine.runner.weights is None
    made.stop_requested = never_stop
    assert bits(made.generate(weights_on(), PROMPTS, REQUEST)) == bits(expected())


def test_a_scheduled_rollout_that_was_stopped_draws_only_what_is_missing() -> None:
    made = scheduled(workers_on(2), in_turn=False)
    rows: list[RolloutSequence] = []
    made.on_sample_done = rows.append
    made.stop_requested = after(30)
    with pytest.raises(StoppedError):
        samples_of(made)
    assert all(worker.engine.runner.weights is None for worker in made.workers)
    assert not {"fast-0", "heavy-1"} & {thread.name for thread in threading.enumerate()}
    groups = {sample.uid: sample.group_id for sample in expected()}
    finished = {row.uid: made.to_sample(row, groups[row.uid], REQUEST) for row in rows}
    assert 0 < len(finished) < len(LENGTHS)
    made.stop_requested = never_stop
    drawn = made.stream(weights_on(), PROMPTS, REQUEST, skipped_uids=finished)
    together = {sample.uid: sample for sample in (*finished.values(), *drawn)}
    assert len(together) == len(rows) == len(LENGTHS)
    assert bits([together[sample.uid] for sample in expected()]) == bits(expected())


def test_who_waits_for_a_round_that_is_generated_ahead_hears_that_it_does_not_come() -> None:
    made = scheduled(workers_on(2), in_turn=True)
    stop_event = threading.Event()
    made.stop_requested = stop_event.is_set
    generation = generation_of(made)
    with closing(generation):
        generation.submit(PROMPTS[:HALF], noise_step=KEY)
        generation.collect_round()
        stop_event.set()
        generation.submit(PROMPTS[:HALF], noise_step=KEY)
        for _ in range(2):
            with pytest.raises(StoppedError):
                generation.collect_round()
    assert all(worker.engine.runner.weights is None for worker in made.workers)
