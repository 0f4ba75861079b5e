"""The policy P-DSR v2 (probe-based dynamic segment rollout).

Judges probes by a sliding percentile, and corrects wrong verdicts by a breaker and stealing.
"""

from __future__ import annotations

import math

from app.rollout.scheduling.priority_queue import PriorityQueue
from app.rollout.scheduling.protocol import SampleRole, WorkerKind
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
"""Number of samples that a probe may overtake. Without a bound, new prompts would starve the samples of old ones."""
TRIPPED_SHARE = 0.12
"""Maximum share of a worker's slots that the breaker empties at once: more would only overload the heavy workers."""
MAX_MOVES = 2
"""Maximum number of moves of a sample, after which it stays on heavy workers."""


class PdsrV2Policy(SchedulingPolicy):
    """Gives each prompt a final verdict, except that a prompt becomes heavy if one of its samples trips the breaker.

    Until the window has enough samples, prompts are neutral: their samples go to the fast queue, and those still
    waiting are judged by the first threshold. The limit of a sample doubles with every move.
    """

    name = "pdsr_v2"

    def __init__(self, context: SchedulingContext):
        super().__init__(context)
        self._probes = Probes()
        self._queues = {name: PriorityQueue() for name in ("fast", "heavy", "tripped", "pinned")}
        self._neutral: dict[str, float] = {}
        """Prompt -> measured length of its probe before there was a threshold."""

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
        """Moves the waiting samples of a prompt to the queue of its verdict."""
        siblings = self._probes.set_verdict(prompt, verdict)
        waiting = [uid for uid in self._queues["fast"].uids() if self.context.samples[uid].prompt == prompt]
        for uid in siblings + (waiting if verdict == "heavy" else []):
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
        """Returns the queue from which a worker takes: its own, or that of the other kind if its workers are full.

        Samples that tripped a breaker are stolen last: they would most likely trip the next one, too.
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
