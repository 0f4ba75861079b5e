"""The baseline: a worker takes as many samples as it has slots, and nothing more until the last of them is done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.rollout.scheduling.events import Role
from app.rollout.scheduling.priority_queue import Queue
from app.rollout.scheduling.sample_states import Entry
from app.rollout.scheduling.scheduling_policy import Context, Policy, Worker


class Sync(Policy):
    name = "sync"
    refills = False

    def __init__(self, context: Context):
        super().__init__(context)
        self._queue = Queue()

    def add(self, entry: Entry) -> None:
        self._queue.put(entry.uid, 0, entry.number)

    def give_back(self, entry: Entry) -> None:
        self.add(entry)

    def offers(self, worker: Worker) -> bool:
        return worker.num_carried == 0 and len(self._queue) > 0

    def take(self, worker: Worker) -> tuple[str, Role] | None:
        uid = self._queue.take() if self.offers(worker) else None
        return None if uid is None else (uid, "any")

    def waiting(self) -> list[str]:
        return self._queue.uids()

    def to_json(self) -> dict[str, Any]:
        return {"queue": self._queue.to_json()}

    def load_json(self, values: Mapping[str, Any]) -> None:
        self._queue = Queue(values["queue"])
