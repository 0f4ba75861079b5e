"""The policy P-DSR v2 (probe-based dynamic segment rollout).

Classifies prompts by comparing their probes with a percentile of recent lengths. A breaker and stealing correct wrong
verdicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from app.rollout.scheduling.protocol import SampleRole, Suspend, WorkerKind
from app.rollout.scheduling.sample_states import SampleEntry
from app.rollout.scheduling.scheduling_policy import (
    STEAL_LIMIT_SHARE,
    Probes,
    RowLimit,
    SchedulingContext,
    SchedulingPolicy,
    WorkerState,
    running_rows,
)

STOLEN = ("fast", "heavy", "tripped")
"""Queues from which other workers steal, in order."""


class PdsrV2Policy(SchedulingPolicy):
    """Gives each prompt a verdict; a fast prompt becomes heavy if one of its samples trips the breaker.

    A sample trips the breaker when it reaches its limit on a fast worker; it then moves, and its limit doubles. Until
    the window has enough samples, prompts are neutral: their samples go to the fast queue, and samples that still wait
    are classified by the first threshold.

    A fast worker steals heavy samples for a limited time. After that, one stolen sample leaves for each free slot of
    idle heavy workers and for each sample waiting in the fast queue; for the others, the time starts again.
    """

    name = "pdsr_v2"
    served_by: ClassVar[Mapping[str, WorkerKind]] = {
        "pinned": "heavy",
        "tripped": "heavy",
        "heavy": "heavy",
        "fast": "fast",
    }

    def __init__(self, context: SchedulingContext):
        super().__init__(context)
        self._probes = Probes(context)
        self._neutral: dict[str, float] = {}
        """Prompt -> length of its probe, which finished before there was a threshold."""
        self._stolen: dict[str, RowLimit] = {}
        """Uid of a heavy sample on a fast worker -> the limit at which it should leave."""

    def add(self, entry: SampleEntry) -> None:
        if self._probes.admit_or_hold_back(entry):
            advance = self.context.probe_advance if self._probes.is_probe(entry) else 0
            self.queues[self._queue_for_sample(entry)].put(entry.uid, entry.number - advance, entry.number)

    def _queue_for_sample(self, entry: SampleEntry) -> str:
        if entry.moves >= self.context.max_moves:
            return "pinned"
        return "tripped" if entry.moves else self._probes.verdicts.get(entry.prompt, "fast")

    def observe(self, entry: SampleEntry, *, grew: bool) -> None:
        if entry.finish is not None:
            self._stolen.pop(entry.uid, None)
        threshold = self.context.threshold
        if threshold is not None and self._neutral:
            for prompt, measure in self._neutral.items():
                if measure > threshold:
                    self._apply_verdict(prompt, "heavy")
            self._neutral = {}
        if not self._probes.is_probe(entry) or entry.prompt in self._probes.verdicts:
            return
        measure = self.context.lengths.measure(entry)
        if threshold is not None and measure > threshold:
            self._apply_verdict(entry.prompt, "heavy")
        elif entry.finish is not None:
            if threshold is None:
                self._neutral[entry.prompt] = measure
            self._apply_verdict(entry.prompt, "fast")

    def _apply_verdict(self, prompt: str, verdict: WorkerKind) -> None:
        """Sets the verdict of a prompt, and moves its waiting samples to the matching queue."""
        siblings = self._probes.set_verdict(prompt, verdict)
        waiting = [uid for uid in self.queues["fast"] if self.context.samples[uid].prompt == prompt]
        for uid in siblings + (waiting if verdict == "heavy" else []):
            self.queues["fast"].remove(uid)
            entry = self.context.samples[uid]
            self.queues[self._queue_for_sample(entry)].put(uid, entry.number, entry.number)

    def evictions(self, worker: WorkerState) -> list[Suspend]:
        if self.context.serves(worker, "heavy"):
            return []
        rows = running_rows(self.context, worker)
        tripped = [entry for entry in rows if self.context.is_over_limit(entry, self._breaker_limit(entry))]
        for entry in tripped:
            self._neutral.pop(entry.prompt, None)
            self._apply_verdict(entry.prompt, "heavy")
        gone = [Suspend(worker.name, entry.uid, "breaker") for entry in tripped]
        return gone + self._end_stealing(worker, [entry for entry in rows if entry not in tripped])

    def _end_stealing(self, worker: WorkerState, rows: list[SampleEntry]) -> list[Suspend]:
        """Suspends stolen rows at their limit: one per waiting fast sample and per free slot of idle heavy workers.

        Stolen rows that must stay get a later limit.
        """
        stolen = [entry for entry in rows if entry.uid in self._stolen]
        ended = [entry for entry in stolen if self.context.is_over_limit(entry, self._stolen[entry.uid])]
        num_leaving = len(self.queues["fast"]) + self.context.num_idle_slots("heavy")
        for entry in ended[num_leaving:]:
            self._stolen[entry.uid] = self._steal_limit(entry)
        return [Suspend(worker.name, entry.uid, "steal limit") for entry in ended[:num_leaving]]

    def _breaker_limit(self, entry: SampleEntry) -> RowLimit:
        return self.context.fast_limit.times(2**entry.moves)

    def _steal_limit(self, entry: SampleEntry) -> RowLimit:
        tokens, seconds = self.context.fast_limit.times(STEAL_LIMIT_SHARE)
        return RowLimit(entry.num_tokens + tokens, entry.seconds + seconds)

    def limit(self, entry: SampleEntry, worker: WorkerState) -> RowLimit | None:
        if self.context.serves(worker, "heavy"):
            return None
        breaker, stolen = self._breaker_limit(entry), self._stolen.get(entry.uid)
        return breaker if stolen is None else RowLimit(*map(min, breaker, stolen))

    def requeue(self, entry: SampleEntry) -> None:
        self._stolen.pop(entry.uid, None)
        if self.context.outgrows(entry, "fast"):
            self._apply_verdict(entry.prompt, "heavy")
        rank = -self.context.probe_advance - 1
        self.queues[self._queue_for_sample(entry)].put(entry.uid, rank, entry.number)

    def may_release(self) -> bool:
        return bool(self._probes.held_back)

    def forget(self, prompt: str) -> None:
        self._probes.forget(prompt)
        self._neutral.pop(prompt, None)

    def find(self, worker: WorkerState) -> tuple[str, str] | None:
        """Returns the uid of a sample and its queue; steals one only if the queues that the worker serves have none.

        A sample is stolen only if no worker of its own kind has a slot for it. Samples that tripped the breaker come
        last, because they would probably trip it again.
        """
        own = super().find(worker)
        if own is not None:
            return own
        for source in STOLEN:
            uid = self.context.first_fitting(self.queues[source], worker)
            if uid is not None and not self.context.has_idle_slot(self.served_by[source], uid):
                return uid, source
        return None

    def start(self, entry: SampleEntry, queue: str, worker: WorkerState) -> SampleRole:
        if queue == "fast":
            return "probe" if self._probes.is_probe(entry) else "fast"
        if not self.context.serves(worker, "heavy"):
            self._stolen[entry.uid] = self._steal_limit(entry)
        return "heavy"
