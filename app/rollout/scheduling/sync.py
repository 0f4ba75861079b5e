"""The baseline policy `sync`: a worker fills its slots, and takes new samples only when all of them are done."""

from __future__ import annotations

from app.rollout.scheduling.priority_queue import PriorityQueue
from app.rollout.scheduling.protocol import SampleRole
from app.rollout.scheduling.sample_states import SampleEntry
from app.rollout.scheduling.scheduling_policy import SchedulingContext, SchedulingPolicy, WorkerState


class SyncPolicy(SchedulingPolicy):
    name = "sync"
    refills = False

    def __init__(self, context: SchedulingContext):
        super().__init__(context)
        self._queue = PriorityQueue()

    def add(self, entry: SampleEntry) -> None:
        self._queue.put(entry.uid, 0, entry.number)

    def _find(self, worker: WorkerState) -> str | None:
        return None if worker.num_carried else self.context.first_fitting(self._queue, worker)

    def next_sample(self, worker: WorkerState) -> tuple[str, SampleRole] | None:
        uid = self._find(worker)
        if uid is None:
            return None
        self._queue.remove(uid)
        return uid, "any"
