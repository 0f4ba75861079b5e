"""What must hold after every event of a scheduler."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

from app.rollout.scheduling.sample_states import ENDED, WAITING, SampleState, SampleTable
from app.rollout.scheduling.scheduler import Scheduler


def is_finished(scheduler: Scheduler) -> bool:
    """Returns whether every sample has ended and no more will come."""
    return scheduler.is_closed and all(entry.state in ENDED for entry in scheduler.samples)


def check_invariants(scheduler: Scheduler) -> None:
    """Raises AssertionError if samples, rows, slots and queues disagree, or a slot is idle while samples wait."""
    check_table(scheduler.samples)
    rows = [uid for worker in scheduler.context.workers.values() for uid in worker.rows]
    running = [entry for entry in scheduler.samples if entry.state is SampleState.RUNNING]
    assert len(rows) == len(set(rows)) == len(running), "rows on workers differ from the running samples"
    for entry in running:
        assert entry.worker in scheduler.context.workers, f"{entry.uid} runs on {entry.worker}, which is lost"
        assert entry.uid in scheduler.context.workers[entry.worker].rows, f"{entry.uid} is not a row of {entry.worker}"
    waiting = queued(scheduler)
    expected = {entry.uid for entry in scheduler.samples if entry.state in WAITING}
    acting = [entry for entry in scheduler.samples if entry.state is SampleState.ACTING]
    waiting += [uid for worker in scheduler.context.workers.values() for uid in worker.answered]
    assert len(waiting) == len(expected) and set(waiting) == expected, "queues differ from waiting samples"
    for entry in scheduler.samples:
        assert entry.held_by is None or entry.held_by in scheduler.context.workers, f"{entry.uid}: its cache is lost"
    for worker in scheduler.context.workers.values():
        assert worker.num_free_slots >= 0, f"{worker.name}: too many rows for {worker.slots} slots"
        assert worker.is_busy == bool(worker.rows), f"{worker.name} is idle with rows, or busy without"
        takes_sample = worker.answered or (worker.has_free_slot and scheduler.policy.has_sample_for(worker))
        assert worker.is_busy or not takes_sample, f"{worker.name} is idle while samples wait"
        held = [entry.uid for entry in acting if entry.held_by == worker.name]
        assert len(worker.acting) == len(held) and set(worker.acting) == set(held), f"{worker.name}: acting rows"
        for entry in map(scheduler.samples.__getitem__, worker.answered):
            assert entry.held_by == worker.name and worker.fits(entry), f"{entry.uid} cannot go back"
    workers = scheduler.context.workers.values()
    has_place = any(worker.fits(scheduler.samples[uid]) for uid in expected for worker in workers)
    assert running or acting or not has_place, "samples wait, but no worker is running"


def queued(scheduler: Scheduler) -> list[str]:
    """Returns the samples in the queues of the policy, and those that it holds back."""
    policy: Any = scheduler.policy
    queues = policy._queues.values() if hasattr(policy, "_queues") else [policy._queue]
    held_back = policy._probes.held_back.values() if hasattr(policy, "_probes") else []
    return [*itertools.chain(*(queue.uids() for queue in queues), *held_back)]


def check_table(table: SampleTable) -> None:
    """Raises AssertionError if an entry contradicts itself or the counts."""
    assert +table.counts == Counter(entry.state for entry in table), "counts differ from states"
    for entry in table:
        assert (entry.state is SampleState.RUNNING) == (entry.worker is not None), (
            f"{entry.uid}: {entry.state} on the worker {entry.worker}"
        )
        assert (entry.state in ENDED) == (entry.finish is not None), f"{entry.uid}: {entry.state}, {entry.finish}"
        assert entry.held_by is None or (entry.num_tokens and entry.state in WAITING | {SampleState.ACTING}), (
            f"{entry.uid}: {entry.state} with a kept cache"
        )
        assert 0 <= entry.num_tokens <= entry.sample.max_new, f"{entry.uid}: {entry.num_tokens} tokens"
        assert entry.state is not SampleState.SUSPENDED or entry.num_tokens, f"{entry.uid}: suspended without tokens"
