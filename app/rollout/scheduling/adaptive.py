"""Longest expected first, on any worker that has room; what is expected is read anew at every segment's edge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.rollout.scheduling.events import Role
from app.rollout.scheduling.ledger import Entry
from app.rollout.scheduling.policy import Context, Eviction, Policy, Worker, running_rows
from app.rollout.scheduling.queues import Queue

FINISHES_TO_THE_FRONT = 256
"""Samples that finish while another waits, until that one comes before any that is submitted now."""
MAX_MOVES = 2
"""Of a sample."""


class Adaptive(Policy):
    """Work-conserving: a free slot never waits for a verdict.

    Nothing known about a prompt counts as the longest that it may become, so that one sample of each such prompt is
    among the first to run; what it becomes orders its siblings.
    """

    name = "adaptive"

    def __init__(self, context: Context):
        super().__init__(context)
        self._queue = Queue()
        self._long = Queue()
        """Suspended on their way to a heavy worker."""
        self._siblings: dict[str, list[str]] = {}
        """Prompt -> its samples that wait."""
        self._since: dict[str, int] = {}
        """Uid of a sample that waits -> how many had finished when it was submitted."""

    def add(self, entry: Entry) -> None:
        self._wait(entry, since=self.context.lengths.num_finished)

    def give_back(self, entry: Entry) -> None:
        if self._is_long(entry):
            self._long.put(entry.uid, -entry.num_tokens, entry.number)
        else:
            self._wait(entry, since=0)

    def _is_long(self, entry: Entry) -> bool:
        return self.context.threshold is not None and self.context.measure(entry) > self.context.threshold

    def _wait(self, entry: Entry, *, since: int) -> None:
        self._since[entry.uid] = since
        self._siblings.setdefault(entry.prompt, []).append(entry.uid)
        self._place(entry)

    def _place(self, entry: Entry) -> None:
        lengths, longest = self.context.lengths, entry.sample.max_new
        knows = lengths.is_known(entry.prompt) or entry.uid in lengths.known
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
        rows = running_rows(self.context, worker)
        movable = [entry for entry in rows if entry.moves < MAX_MOVES]
        if len(self._queue):
            return self._sorted_out(worker, movable)
        if len(self._long) == 0:
            return self._spread(worker, movable)
        return []

    def _sorted_out(self, worker: Worker, movable: list[Entry]) -> list[Eviction]:
        """While work waits, long rows go to heavy workers as far as these have slots; short ones make room there."""
        if not (self.context.has("fast") and self.context.has("heavy")):
            return []
        if worker.kind == "heavy":
            short = sorted((entry for entry in movable if not self._is_long(entry)), key=lambda e: e.num_tokens)
            missing = len(self._long) - (worker.slots - len(worker.rows))
            return [Eviction(entry.uid, "make room") for entry in short[: max(missing, 0)]]
        heavy = [other for other in self.context.workers.values() if other.kind == "heavy"]
        taken = sum(self._is_long(self.context.ledger[uid]) for other in heavy for uid in other.rows) + len(self._long)
        room = max(sum(other.slots for other in heavy) - taken, 0)
        long = sorted((entry for entry in movable if self._is_long(entry)), key=lambda e: -e.num_tokens)
        return [Eviction(entry.uid, "to heavy") for entry in long[:room]]

    def _spread(self, worker: Worker, movable: list[Entry]) -> list[Eviction]:
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
        return [Eviction(entry.uid, "spread") for entry in movable[: min(len(worker.rows) // 2, room)]]

    def offers(self, worker: Worker) -> bool:
        return len(self._queue) + len(self._long) > 0

    def take(self, worker: Worker) -> tuple[str, Role] | None:
        # Where no heavy worker is left, any one is theirs.
        first_long = self.context.serves(worker, "heavy") or not len(self._queue)
        if first_long and (uid := self._long.take()) is not None:
            return uid, "heavy"
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
        return self._queue.uids() + self._long.uids()

    def to_json(self) -> dict[str, Any]:
        return {
            "queue": self._queue.to_json(),
            "long": self._long.to_json(),
            "siblings": {prompt: list(uids) for prompt, uids in self._siblings.items()},
            "since": dict(self._since),
        }

    def load_json(self, values: Mapping[str, Any]) -> None:
        self._queue = Queue(values["queue"])
        self._long = Queue(values["long"])
        self._siblings = {prompt: list(uids) for prompt, uids in values["siblings"].items()}
        self._since = dict(values["since"])
