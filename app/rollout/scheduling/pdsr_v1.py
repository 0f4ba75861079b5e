"""P-DSR V1: probe all prompts, wait for the last probe, rank, then send each prompt's other samples accordingly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from app.rollout.scheduling.events import Kind, Role
from app.rollout.scheduling.priority_queue import Queue
from app.rollout.scheduling.sample_states import Entry
from app.rollout.scheduling.scheduling_policy import Context, Eviction, Policy, Probes, Worker, running_rows

SERVED_BY: dict[Role, Kind] = {"probe": "fast", "fast": "fast", "heavy": "heavy"}
"""Queues in the order in which a worker looks into them."""


class PdsrV1(Policy):
    """Probes run on fast workers. A batch is the prompts that came before its last probe was measured.

    The `heavy_percent` longest prompts are heavy, those first whose probes went over their limit; these are handed over
    to heavy workers and complete there. Other samples that go over the fast limit are handed over, too, or truncated.
    """

    name = "pdsr_v1"

    def __init__(self, context: Context):
        super().__init__(context)
        self._probes = Probes()
        self._queues: dict[Role, Queue] = {"probe": Queue(), "fast": Queue(), "heavy": Queue()}
        self._batch: dict[str, float | None] = {}
        """Prompt -> what its probe measured, infinite where it went over the limit, None while it runs."""

    def add(self, entry: Entry) -> None:
        if not self._probes.admits(entry):
            return
        if self._probes.is_probe(entry):
            self._batch[entry.prompt] = None
            self._queues["probe"].put(entry.uid, 0, entry.number)
        else:
            self._queues[self._probes.verdicts[entry.prompt]].put(entry.uid, 0, entry.number)

    def observe(self, entry: Entry, *, grew: bool) -> None:
        if entry.finish is not None and self._is_measuring(entry):
            self._measured(entry, self.context.measure(entry))

    def _is_measuring(self, entry: Entry) -> bool:
        return self._probes.is_probe(entry) and self._batch.get(entry.prompt, math.inf) is None

    def _measured(self, entry: Entry, measure: float) -> None:
        self._batch[entry.prompt] = measure
        lengths = {prompt: length for prompt, length in self._batch.items() if length is not None}
        if len(lengths) < len(self._batch):
            return
        num_heavy = math.ceil(self.context.rules.heavy_percent / 100 * len(lengths))
        ranked = sorted(lengths, key=lambda prompt: -lengths[prompt])
        for rank, prompt in enumerate(ranked):
            verdict = "heavy" if rank < num_heavy or math.isinf(lengths[prompt]) else "fast"
            for uid in self._probes.judge(prompt, verdict):
                self._queues[verdict].put(uid, 0, self.context.ledger[uid].number)
        self._batch = {}

    def evictions(self, worker: Worker) -> list[Eviction]:
        if self.context.serves(worker, "heavy"):
            return []
        rules, gone = self.context.rules, []
        for entry in running_rows(self.context, worker):
            if self._is_measuring(entry):
                if self.context.over(entry, tokens=rules.probe_limit_tokens, seconds=rules.probe_limit_s):
                    self._measured(entry, math.inf)
                    gone.append(Eviction(entry.uid, "probe limit"))
            elif self.context.over(entry, tokens=rules.fast_limit_tokens, seconds=rules.fast_limit_s):
                truncates = rules.on_fast_limit == "truncate" and self._queue_of(entry) == "fast"
                gone.append(Eviction(entry.uid, "truncated" if truncates else "breaker"))
        return gone

    def limit(self, entry: Entry, worker: Worker) -> int | None:
        if self.context.serves(worker, "heavy"):
            return None
        rules = self.context.rules
        return rules.probe_limit_tokens if self._is_measuring(entry) else rules.fast_limit_tokens

    def give_back(self, entry: Entry) -> None:
        self._queues[self._queue_of(entry)].put(entry.uid, -1, entry.number)

    def _queue_of(self, entry: Entry) -> Role:
        """Where a sample belongs that has run."""
        if self._is_measuring(entry):
            return "probe"
        if entry.moves or self._probes.is_probe(entry):
            return "heavy"
        return self._probes.verdicts[entry.prompt]

    def forget(self, prompt: str) -> None:
        self._probes.forget(prompt)
        self._batch.pop(prompt, None)

    def offers(self, worker: Worker) -> bool:
        return self._queue_for(worker) is not None

    def _queue_for(self, worker: Worker) -> Role | None:
        for role, kind in SERVED_BY.items():
            if self.context.serves(worker, kind) and len(self._queues[role]):
                return role
        return None

    def take(self, worker: Worker) -> tuple[str, Role] | None:
        role = self._queue_for(worker)
        uid = self._queues[role].take() if role else None
        return None if role is None or uid is None else (uid, role)

    def waiting(self) -> list[str]:
        return [uid for queue in self._queues.values() for uid in queue.uids()] + self._probes.waiting()

    def to_json(self) -> dict[str, Any]:
        batch = {prompt: "over" if length == math.inf else length for prompt, length in self._batch.items()}
        queues = {name: queue.to_json() for name, queue in self._queues.items()}
        return {"probes": self._probes.to_json(), "queues": queues, "batch": batch}

    def load_json(self, values: Mapping[str, Any]) -> None:
        self._probes = Probes.from_json(values["probes"])
        self._queues = {name: Queue(items) for name, items in values["queues"].items()}
        self._batch = {prompt: math.inf if length == "over" else length for prompt, length in values["batch"].items()}
