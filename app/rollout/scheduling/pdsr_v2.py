"""P-DSR V2: each probe is judged as it ends, by a sliding percentile; a breaker and stealing mend what was wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from app.rollout.scheduling.events import SampleRole, WorkerKind
from app.rollout.scheduling.priority_queue import PriorityQueue
from app.rollout.scheduling.sample_states import SampleEntry
from app.rollout.scheduling.scheduling_policy import (
    Eviction,
    Probes,
    SchedulingContext,
    SchedulingPolicy,
    WorkerState,
    running_rows,
)

PROBE_ADVANCE = 256
"""Samples that a probe may overtake. No more: else a stream of new prompts would starve the old ones' samples."""
TRIPPED_SHARE = 0.12
"""Of a worker's slots, at most, that the breaker empties at one edge: a herd would only move the jam."""
MAX_MOVES = 2
"""Of a sample; after these it stays with heavy workers."""


class PdsrV2Policy(SchedulingPolicy):
    """A verdict is final but for one change: a prompt whose sample trips the breaker is heavy from then on.

    Before the window holds enough, prompts are neutral: their samples go to the fast queue, and are judged, where they
    still wait, with the first threshold. A sample's limit doubles with every move.
    """

    name = "pdsr_v2"

    def __init__(self, context: SchedulingContext):
        super().__init__(context)
        self._probes = Probes()
        self._queues = {name: PriorityQueue() for name in ("fast", "heavy", "tripped", "pinned")}
        self._neutral: dict[str, float] = {}
        """Prompt -> what its probe measured before there was a threshold."""

    def add(self, entry: SampleEntry) -> None:
        if self._probes.admit_or_hold_back(entry):
            advance = PROBE_ADVANCE if self._probes.is_probe(entry) else 0
            self._queues[self._queue_for_sample(entry)].put(entry.uid, entry.number - advance, entry.number)

    def _queue_for_sample(self, entry: SampleEntry) -> str:
        if entry.moves >= MAX_MOVES:
            return "pinned"
        return "tripped" if entry.moves else self._probes.verdicts.get(entry.prompt, "fast")

    def observe(self, entry: SampleEntry, *, grew: bool) -> None:
        threshold = self.context.threshold
        if threshold is not None and self._neutral:
            for prompt, measure in self._neutral.items():
                if measure > threshold:
                    self._apply_verdict(prompt, "heavy")
            self._neutral = {}
        if not self._probes.is_probe(entry) or entry.prompt in self._probes.verdicts:
            return
        measure = self.context.measure(entry)
        if threshold is not None and measure > threshold:
            self._apply_verdict(entry.prompt, "heavy")
        elif entry.finish is not None:
            if threshold is None:
                self._neutral[entry.prompt] = measure
            self._apply_verdict(entry.prompt, "fast")

    def _apply_verdict(self, prompt: str, verdict: WorkerKind) -> None:
        """Sends the prompt's waiting samples where they belong, those that an earlier verdict sent elsewhere, too."""
        held = self._probes.set_verdict(prompt, verdict)
        of_prompt = [uid for uid in self._queues["fast"].uids() if self.context.samples[uid].prompt == prompt]
        for uid in held + (of_prompt if verdict == "heavy" else []):
            self._queues["fast"].remove(uid)
            entry = self.context.samples[uid]
            self._queues[self._queue_for_sample(entry)].put(uid, entry.number, entry.number)

    def evictions(self, worker: WorkerState) -> list[Eviction]:
        if self.context.serves(worker, "heavy"):
            return []
        rules = self.context.pdsr
        tripped = [
            entry
            for entry in running_rows(self.context, worker)
            if self.context.is_over_limit(
                entry, tokens=self._limit_tokens(entry), seconds=rules.fast_limit_s * 2**entry.moves
            )
        ]
        tripped.sort(key=lambda entry: -entry.num_tokens)
        tripped = tripped[: max(1, math.ceil(TRIPPED_SHARE * worker.slots))]
        for entry in tripped:
            self._neutral.pop(entry.prompt, None)
            self._apply_verdict(entry.prompt, "heavy")
        return [Eviction(entry.uid, "breaker") for entry in tripped]

    def _limit_tokens(self, entry: SampleEntry) -> int:
        return self.context.pdsr.fast_limit_tokens * 2**entry.moves

    def token_limit(self, entry: SampleEntry, worker: WorkerState) -> int | None:
        return None if self.context.serves(worker, "heavy") else self._limit_tokens(entry)

    def requeue(self, entry: SampleEntry) -> None:
        self._queues[self._queue_for_sample(entry)].put(entry.uid, -PROBE_ADVANCE - 1, entry.number)

    def forget(self, prompt: str) -> None:
        self._probes.forget(prompt)
        self._neutral.pop(prompt, None)

    def has_sample_for(self, worker: WorkerState) -> bool:
        return self._queue_for_worker(worker) is not None

    def _queue_for_worker(self, worker: WorkerState) -> str | None:
        """The queue that the worker takes from: its own, or one of the others' when their own workers are full.

        What tripped a breaker is stolen last: most likely it would trip the next.
        """
        serves_heavy, serves_fast = (self.context.serves(worker, kind) for kind in ("heavy", "fast"))
        sources = ["pinned", "tripped", "heavy"] if serves_heavy else []
        sources += ["fast"] if serves_fast or not self.context.has_idle_slot("fast") else []
        sources += ["heavy", "tripped"] if not self.context.has_idle_slot("heavy") else []
        return next((source for source in sources if len(self._queues[source])), None)

    def next_sample(self, worker: WorkerState) -> tuple[str, SampleRole] | None:
        source = self._queue_for_worker(worker)
        uid = self._queues[source].pop() if source else None
        if uid is None:
            return None
        if source != "fast":
            return uid, "heavy"
        return uid, "probe" if self._probes.is_probe(self.context.samples[uid]) else "fast"

    def waiting(self) -> list[str]:
        return [uid for queue in self._queues.values() for uid in queue.uids()] + self._probes.waiting()

    def to_json(self) -> dict[str, Any]:
        queues = {name: queue.to_json() for name, queue in self._queues.items()}
        return {"probes": self._probes.to_json(), "queues": queues, "neutral": dict(self._neutral)}

    def load_json(self, values: Mapping[str, Any]) -> None:
        self._probes = Probes.from_json(values["probes"])
        self._queues = {name: PriorityQueue(items) for name, items in values["queues"].items()}
        self._neutral = dict(values["neutral"])
