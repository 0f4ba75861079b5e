"""The baseline policy `sync`: a worker fills its slots, and takes new samples only when all of them are done."""

from __future__ import annotations

from app.rollout.scheduling.protocol import SampleRole
from app.rollout.scheduling.sample_states import SampleEntry
from app.rollout.scheduling.scheduling_policy import SchedulingPolicy, WorkerState


class SyncPolicy(SchedulingPolicy):
    name = "sync"
    refills = False

    def add(self, entry: SampleEntry) -> None:
        self.queues["any"].put(entry.uid, 0, entry.number)

    def find(self, worker: WorkerState) -> tuple[str, str] | None:
        return None if worker.num_carried else super().find(worker)

    def start(self, entry: SampleEntry, queue: str, worker: WorkerState) -> SampleRole:
        return "any"
