"""The policy `adaptive`: the sample expected to be longest starts first, on any worker with a free slot."""

from __future__ import annotations

from app.rollout.scheduling.protocol import SampleRole, Suspend
from app.rollout.scheduling.sample_states import SampleEntry
from app.rollout.scheduling.scheduling_policy import (
    SchedulingContext,
    SchedulingPolicy,
    WorkerState,
    running_rows,
)

AGING_FINISHES = 256
"""Number of samples that must finish before a waiting sample outranks every newly submitted one."""


class AdaptivePolicy(SchedulingPolicy):
    """A work-conserving policy: no slot stays idle while a waiting sample fits into it.

    Samples of an unknown prompt are expected to have the maximum length, so that one sample of each such prompt starts
    early. Its length then ranks its siblings. Expectations are updated after every segment. Rows move only to idle
    workers: a move copies a full-length cache, which costs more than separating long rows from short ones would gain.
    """

    name = "adaptive"

    def __init__(self, context: SchedulingContext):
        super().__init__(context)
        self._waiting_by_prompt: dict[str, list[str]] = {}
        """Prompt -> uids of its waiting samples."""
        self._finished_at_submit: dict[str, int] = {}
        """Uid of a waiting sample -> number of samples that had finished when it was submitted."""

    def add(self, entry: SampleEntry) -> None:
        self._enqueue(entry, num_finished=self.context.lengths.num_finished)

    def requeue(self, entry: SampleEntry) -> None:
        self._enqueue(entry, num_finished=0)

    def _enqueue(self, entry: SampleEntry, *, num_finished: int) -> None:
        self._finished_at_submit[entry.uid] = num_finished
        self._waiting_by_prompt.setdefault(entry.prompt, []).append(entry.uid)
        self._set_priority(entry)

    def _set_priority(self, entry: SampleEntry) -> None:
        lengths, longest = self.context.lengths, entry.sample.max_new
        # Started samples continue first: they may be the longest, and their lengths rank their siblings.
        knows = lengths.has_estimate(entry.prompt) and not entry.num_tokens
        expected = lengths.estimate(entry) if knows else longest
        age = self._finished_at_submit[entry.uid] * longest / AGING_FINISHES
        self.queues["any"].put(entry.uid, age - expected, entry.number)

    def _update_siblings(self, prompt: str) -> None:
        for uid in self._waiting_by_prompt.get(prompt, ()):
            self._set_priority(self.context.samples[uid])

    def observe(self, entry: SampleEntry, *, grew: bool) -> None:
        if grew:
            self._update_siblings(entry.prompt)

    def evictions(self, worker: WorkerState) -> list[Suspend]:
        """Suspends up to half of a worker's rows for idle workers to continue: steps with fewer rows are faster.

        Workers on the same device get no rows, because their segments would only take turns.
        """
        if len(self.queues["any"]):
            return []
        others = [
            other
            for other in self.context.workers.values()
            if other is not worker
            and not (other.is_busy or other.num_begun)
            and (other.device is None or other.device != worker.device)
        ]
        movable = [
            entry
            for entry in running_rows(self.context, worker)
            if entry.moves < self.context.max_moves and any(other.fits(entry) for other in others)
        ]
        num_free = sum(other.slots for other in others if any(map(other.fits, movable)))
        most = min(len(worker.rows) // 2, num_free)
        return [Suspend(worker.name, entry.uid, "spread") for entry in movable[:most]]

    def start(self, entry: SampleEntry, queue: str, worker: WorkerState) -> SampleRole:
        role = self._role(entry)
        self._waiting_by_prompt[entry.prompt].remove(entry.uid)
        if not self._waiting_by_prompt[entry.prompt]:
            del self._waiting_by_prompt[entry.prompt]
        del self._finished_at_submit[entry.uid]
        if role == "probe":
            self.context.lengths.start_probe(entry.prompt)
            self._update_siblings(entry.prompt)
        return role

    def _role(self, entry: SampleEntry) -> SampleRole:
        if not self.context.lengths.has_estimate(entry.prompt):
            return "probe"
        threshold = self.context.threshold
        is_long = threshold is not None and self.context.expected_length(entry) > threshold
        return "heavy" if is_long else "fast"
