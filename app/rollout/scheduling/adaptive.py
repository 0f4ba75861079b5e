"""Longest expected first, on any worker that has room; what is expected is read anew at every segment's edge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.rollout.scheduling.events import Role
from app.rollout.scheduling.priority_queue import Queue
from app.rollout.scheduling.sample_states import Entry
from app.rollout.scheduling.scheduling_policy import Context, Eviction, Policy, Worker, running_rows

FINISHES_TO_THE_FRONT = 256
"""Samples that finish while another waits, until that one comes before any that is submitted now."""
MAX_MOVES = 2
"""Of a sample."""


class Adaptive(Policy):
    """Work-conserving: a free slot never waits for a verdict.

    Nothing known about a prompt counts as the longest that it may become, so that one sample of each such prompt is
    among the first to run; what it becomes orders its siblings. A row stays where it is: taking it out costs its worker
    caches of full length, and what could be won by sorting long rows from short ones is less.
    """

    name = "adaptive"

    def __init__(self, context: Context):
        super().__init__(context)
        self._queue = Queue()
        self._siblings: dict[str, list[str]] = {}
        """Prompt -> its samples that wait."""
        self._since: dict[str, int] = {}
        """Uid of a sample that waits -> how many had finished when it was submitted."""

    def add(self, entry: Entry) -> None:
        self._wait(entry, since=self.context.lengths.num_finished)

    def give_back(self, entry: Entry) -> None:
        self._wait(entry, since=0)

    def _wait(self, entry: Entry, *, since: int) -> None:
        self._since[entry.uid] = since
        self._siblings.setdefault(entry.prompt, []).append(entry.uid)
        self._place(entry)

    def _place(self, entry: Entry) -> None:
        lengths, longest = self.context.lengths, entry.sample.max_new
        # What has begun goes on first: it may still be the longest, and its siblings may learn from it.
        knows = (lengths.is_known(entry.prompt) and not entry.num_tokens) or entry.uid in lengths.known
        expected = lengths.estimate(entry) if knows else longest
        age = self._since[entry.uid] * longest / FINISHES_TO_THE_FRONT
        self._queue.put(entry.uid, age - expected, entry.number)

    def _place_siblings(self, prompt: str) -> None:
        for uid in self._siblings.get(prompt, ()):
            self._place(self.context.ledger[uid])

    def observe(self, entry: Entry, *, grew: bool) -> None:
        if grew:
            self._place_siblings(entry.prompt)

    def evictions(self, worker: Worker) -> list[Eviction]:
        return [] if len(self._queue) else self._spread(worker)

    def _spread(self, worker: Worker) -> list[Eviction]:
        """When nothing waits, workers that have run dry take up to half of another's rows: fewer rows step faster.

        Not on the same device, where they would take turns.
        """
        room = sum(
            other.slots
            for other in self.context.workers.values()
            if other is not worker
            and not (other.is_busy or other.rows)
            and (other.device is None or other.device != worker.device)
        )
        movable = [entry for entry in running_rows(self.context, worker) if entry.moves < MAX_MOVES]
        return [Eviction(entry.uid, "spread") for entry in movable[: min(len(worker.rows) // 2, room)]]

    def offers(self, worker: Worker) -> bool:
        return len(self._queue) > 0

    def take(self, worker: Worker) -> tuple[str, Role] | None:
        uid = self._queue.take()
        if uid is None:
            return None
        entry = self.context.ledger[uid]
        role = self._role(entry)
        self._siblings[entry.prompt].remove(uid)
        if not self._siblings[entry.prompt]:
            del self._siblings[entry.prompt]
        del self._since[uid]
        if role == "probe":
            self.context.lengths.expect(entry.prompt)
            self._place_siblings(entry.prompt)
        return uid, role

    def _role(self, entry: Entry) -> Role:
        if not self.context.lengths.is_known(entry.prompt):
            return "probe"
        threshold = self.context.threshold
        is_long = threshold is not None and self.context.expected(entry) > threshold
        return "heavy" if is_long else "fast"

    def waiting(self) -> list[str]:
        return self._queue.uids()

    def to_json(self) -> dict[str, Any]:
        return {
            "queue": self._queue.to_json(),
            "siblings": {prompt: list(uids) for prompt, uids in self._siblings.items()},
            "since": dict(self._since),
        }

    def load_json(self, values: Mapping[str, Any]) -> None:
        self._queue = Queue(values["queue"])
        self._siblings = {prompt: list(uids) for prompt, uids in values["siblings"].items()}
        self._since = dict(values["since"])
