"""Metrics of a schedule, computed from the events of a rollout and the commands that answered them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from app.records.sample import DROPPED_PREFIX
from app.rollout.scheduling.protocol import (
    FINISH_LENGTH,
    Admit,
    Answered,
    EventRecord,
    Released,
    RunSegment,
    SampleRole,
    SegmentEnded,
    Submitted,
    Suspend,
    Verdict,
    WorkerJoined,
    WorkerKind,
    WorkerLost,
)

HEAVY_PERCENTILE = 80
"""Percentile of lengths above which a sample counts as long in `ScheduleMetrics.probe_recall`."""
TAIL_SHARE = 0.9
"""Fraction of the samples that must be done before the tail begins."""
COUNTS = (
    *("breaker_trips", "stolen_by_fast", "stolen_by_heavy", "suspensions", "truncated", "segments", "useful_tokens"),
    "repacked_tokens",
)
"""Fields of `ScheduleMetrics` that are counts."""


class Span(NamedTuple):
    """A period in which a row decodes in a slot, or a sample is suspended or waits for its environment."""

    worker: str
    slot: int
    """Index of the slot on its worker; -1 outside of slots."""
    start_s: float
    end_s: float
    role: SampleRole | None
    """Role in which the row was admitted; None outside of slots."""
    uid: str


@dataclass(frozen=True, slots=True)
class ScheduleMetrics:
    """Metrics of a whole schedule, or of a window of a schedule that continues."""

    makespan_s: float
    """Time from the first submission to the last committed token or environment's answer, whichever is later."""
    bubble: float
    """Fraction of slot time in which no row decoded. Slots count from when their worker joins until it is lost."""
    tail_fraction: float
    """Fraction of the makespan after 90 % of the samples were done; NaN in a window."""
    probe_recall: float | None
    """Fraction of the samples longer than the 80th percentile that were expected to be heavy when they started.

    Samples without an expectation, such as probes, do not count; None if no samples are left.
    """
    threshold: float | None
    """Length above which a prompt was heavy at the last verdict, in `rollout.pdsr.unit`; None without a threshold."""
    heavy_share: float | None
    """Fraction of the classified prompts whose last verdict was heavy; None without verdicts."""
    last_verdict_s: float | None
    """Time from the first submission to the last verdict."""
    last_verdict_tokens: int | None
    """Number of tokens decoded before the last verdict."""
    breaker_trips: int
    stolen_by_fast: int
    """Number of times that a fast worker took a heavy sample."""
    stolen_by_heavy: int
    suspensions: int
    """Number of times that a sample left its worker to continue later."""
    truncated: int
    """Number of samples truncated at the fast limit."""
    segments: int
    useful_tokens: int
    repacked_tokens: int
    """Number of decoded tokens that were later prefilled or replayed to recompute a cache."""


class ScheduleMetricsTracker:
    """Accumulates the metrics of a rollout of any duration, and forgets released samples."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerJoined] = {}
        self.worker_lost_s: dict[str, float] = {}
        self.num_tokens: dict[str, int] = {}
        self.first_role: dict[str, SampleRole] = {}
        self.start: float | None = None
        self._reset_window()

    def _reset_window(self) -> None:
        self.end_times: list[float] = []
        self.lengths: dict[str, int] = {}
        self.expected_heavy: dict[str, bool] = {}
        """Uid of an ended sample with an expected length -> whether it was expected to be heavy."""
        self.verdicts: dict[str, WorkerKind] = {}
        self.last_verdict: tuple[float | None, float, int] | None = None
        """(threshold of the verdict, its time, number of tokens decoded before it)."""
        self.busy_s = 0.0
        self.counts: Counter[str] = Counter()
        """Field of `ScheduleMetrics` -> count."""
        self.last_commit_s = self.start or 0.0

    def add(self, record: EventRecord) -> None:
        """Updates the metrics with an event and the commands that answered it."""
        event, commands = record
        match event:
            case Submitted():
                self.start = event.at if self.start is None else self.start
            case WorkerJoined():
                self.workers[event.worker] = event
            case WorkerLost():
                self.worker_lost_s[event.worker] = event.at
            case SegmentEnded():
                self._segment_ended(event)
            case Answered():
                self.last_commit_s = max(self.last_commit_s, event.at)
                for row in event.rows:
                    self.num_tokens[row.uid] = row.num_tokens
                    self._record_end(row.uid, row.finish, at=event.at)
            case Released():
                for uid in event.uids:
                    for known in (self.num_tokens, self.first_role):
                        known.pop(uid, None)
        for command in commands:
            match command:
                case Verdict():
                    self.verdicts[command.prompt] = command.kind
                    self.last_verdict = command.threshold, event.at, self.counts["useful_tokens"]
                case RunSegment():
                    for one in command.admit:
                        self._admit(command.worker, one)
                case Suspend(why="truncated"):
                    self.counts["truncated"] += 1
                    self._record_end(command.uid, FINISH_LENGTH, at=event.at)
                case Suspend():
                    self.counts["suspensions"] += 1
                    self.counts["breaker_trips"] += command.why in ("breaker", "probe limit")

    def _admit(self, worker: str, one: Admit) -> None:
        self.first_role.setdefault(one.uid, one.role)
        kind = self.workers[worker].kind
        other: SampleRole = "heavy" if kind == "fast" else "fast"
        self.counts[f"stolen_by_{kind}"] += one.role == other and one.how != "resume"
        if one.how == "recompute":
            self.counts["repacked_tokens"] += one.num_tokens

    def _segment_ended(self, event: SegmentEnded) -> None:
        self.counts["segments"] += 1
        for row in event.rows:
            gained = row.num_tokens - self.num_tokens.get(row.uid, 0)
            share = min(gained / max(event.steps, 1), 1.0)
            self.busy_s += event.seconds * share
            self.counts["useful_tokens"] += gained
            self.num_tokens[row.uid] = row.num_tokens
            # max, because in exact mode segments are reported in start order.
            self.last_commit_s = max(self.last_commit_s, event.at)
            self._record_end(row.uid, row.finish, at=event.at - event.seconds * (1 - share))

    def _record_end(self, uid: str, finish: str | None, *, at: float) -> None:
        if finish is None:
            return
        self.end_times.append(at)
        if finish.startswith(DROPPED_PREFIX):
            return
        self.lengths[uid] = self.num_tokens[uid]
        role = self.first_role[uid]
        if role in ("fast", "heavy"):
            self.expected_heavy[uid] = role == "heavy"

    def compute(self) -> ScheduleMetrics:
        """Returns the metrics since the first submission, or since the start of the current window."""
        start = self.start or 0.0
        makespan = max(self.last_commit_s - start, 1e-9)
        # A worker's slots count from its joining to its loss.
        stays = ((one.slots, one.at, self.worker_lost_s.get(name, math.inf)) for name, one in self.workers.items())
        capacity_s = sum(n * max(min(end, start + makespan) - max(begin, start), 0.0) for n, begin, end in stays)
        threshold, verdict_at, verdict_tokens = self.last_verdict or (None, None, None)
        ends = sorted(self.end_times)
        ninety = ends[max(int(TAIL_SHARE * len(ends)) - 1, 0)] - start if ends else makespan
        return ScheduleMetrics(
            makespan_s=makespan,
            bubble=1 - self.busy_s / capacity_s if capacity_s else 0.0,
            tail_fraction=1 - ninety / makespan,
            probe_recall=self._recall(),
            threshold=threshold,
            heavy_share=np.mean([kind == "heavy" for kind in self.verdicts.values()]).item() if self.verdicts else None,
            last_verdict_s=None if verdict_at is None else max(verdict_at - start, 0.0),
            last_verdict_tokens=verdict_tokens,
            **{name: self.counts[name] for name in COUNTS},
        )

    def take_window(self) -> ScheduleMetrics:
        """Returns the metrics of the current window and starts the next one; `tail_fraction` is NaN.

        A segment counts in the window in which it ends, even if it began in the previous one; this distorts `bubble`.
        """
        metrics = self.compute()
        self.start = self.last_commit_s
        self._reset_window()
        return replace(metrics, bubble=max(metrics.bubble, 0.0), tail_fraction=float("nan"))

    def _recall(self) -> float | None:
        if not self.lengths:
            return None
        bound = np.percentile(list(self.lengths.values()), HEAVY_PERCENTILE)
        long = [uid for uid in self.expected_heavy if self.lengths[uid] > bound]
        return sum(self.expected_heavy[uid] for uid in long) / len(long) if long else None


def schedule_metrics(records: Sequence[EventRecord]) -> ScheduleMetrics:
    """Returns the metrics of a whole rollout from the records of its events."""
    tracker = ScheduleMetricsTracker()
    for record in records:
        tracker.add(record)
    return tracker.compute()


def slot_spans(records: Sequence[EventRecord]) -> Iterator[Span]:
    """Yields a span for each row of each segment and for each wait of a suspended or acting sample.

    Slots are not in the records, so each row is assumed to take the lowest free slot of its worker.
    """
    places: dict[str, tuple[str, int, SampleRole]] = {}
    suspended: dict[str, tuple[str, float]] = {}
    tokens: dict[str, int] = {}
    for event, commands in records:
        if isinstance(event, SegmentEnded):
            for row in event.rows:
                worker, slot, role = places[row.uid]
                share = min((row.num_tokens - tokens.get(row.uid, 0)) / max(event.steps, 1), 1.0)
                tokens[row.uid] = row.num_tokens
                begin = event.at - event.seconds
                yield Span(worker, slot, begin, begin + share * event.seconds, role, row.uid)
                if row.finish is not None or row.turn_end is not None:
                    del places[row.uid]
                if row.turn_end is not None:
                    suspended[row.uid] = (worker, event.at)
        elif isinstance(event, WorkerLost):
            places = {uid: place for uid, place in places.items() if place[0] != event.worker}
        for command in commands:
            if isinstance(command, Suspend):
                places.pop(command.uid, None)
                if command.why != "truncated":
                    suspended[command.uid] = (command.worker, event.at)
            elif isinstance(command, RunSegment):
                for one in command.admit:
                    taken = {slot for worker, slot, _ in places.values() if worker == command.worker}
                    slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
                    places[one.uid] = (command.worker, slot, one.role)
                    tokens[one.uid] = one.num_tokens
                    if one.uid in suspended:
                        since = suspended.pop(one.uid)
                        yield Span(since[0], -1, since[1], max(since[1], event.at), None, one.uid)
