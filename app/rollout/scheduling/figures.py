"""How good a schedule was: from the log of events, real or simulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from app.rollout.scheduling.event_log import LogRecord
from app.rollout.scheduling.events import (
    DROPPED,
    Admit,
    Commit,
    Kind,
    NewSample,
    Retire,
    Role,
    RunSegment,
    SegmentEnded,
    Submitted,
    Suspend,
    WorkerJoined,
)

HEAVY_PERCENTILE = 80
"""Samples beyond it were truly long, for the recall."""
TAIL_SHARE = 0.9
"""Of the samples; the tail is what comes after so many are done."""


class Span(NamedTuple):
    """A row that decodes in a slot, or a sample that lies suspended."""

    worker: str
    slot: int
    """-1 while suspended."""
    start_s: float
    end_s: float
    role: Role | None
    """None while suspended."""
    uid: str


@dataclass(frozen=True, slots=True)
class Figures:
    makespan_s: float
    """From the first submission to the last committed token."""
    bubble: float
    """Share of slots x makespan in which no row decoded."""
    tail_fraction: float
    """Share of the makespan after 90 % of the samples were done."""
    probe_recall: float | None
    """Share of samples beyond the 80th percentile that were expected to be heavy when they started, probes left out.

    None where nothing was expected.
    """
    breaker_trips: int
    stolen: int
    """Rows that started on a worker of the other kind."""
    suspensions: int
    truncated: int
    """By the fast limit."""
    segments: int
    """That were committed."""
    useful_tokens: int
    repacked_tokens: int
    """Decoded before, and prefilled or replayed to go on."""
    wasted_tokens: int
    """Repacked, or decoded and never committed."""
    prefill_tokens_saved: int
    """Of prompts that a worker had prefilled for a sibling."""


class _Tally:
    """What a log has said so far."""

    def __init__(self) -> None:
        self.samples: dict[str, NewSample] = {}
        self.kinds: dict[str, Kind] = {}
        self.slots: dict[str, int] = {}
        self.tokens: dict[str, int] = {}
        self.first_role: dict[str, Role] = {}
        self.role: dict[str, Role] = {}
        self.prompts: set[tuple[str, str]] = set()
        self.ends: list[float] = []
        self.lengths: dict[str, int] = {}
        self.busy_s = 0.0
        self.trips = self.stolen = self.suspended = self.truncated = self.segments = 0
        self.repacked = self.saved = self.lost = 0
        self.last_commit_s = 0.0

    def admit(self, worker: str, one: Admit) -> None:
        sample = self.samples[one.uid]
        self.first_role.setdefault(one.uid, one.role)
        self.role[one.uid] = one.role
        other: Role = "heavy" if self.kinds[worker] == "fast" else "fast"
        self.stolen += one.role == other
        if one.how != "copy":
            self.repacked += one.num_tokens
        if one.num_tokens == 0:
            key = (worker, sample.prompt)
            self.saved += sample.prompt_length * (key in self.prompts)
            self.prompts.add(key)

    def segment_ended(self, event: SegmentEnded, answer: Sequence[Commit]) -> None:
        """`answer`: its commit, and of samples that end as they stand; empty where the report was refused."""
        self.segments += len(answer) > 0
        committed = {row.uid: row.finish for row in answer[0].rows} if answer else {}
        for row in event.rows:
            gained = row.num_tokens - self.tokens.get(row.uid, 0)
            if row.uid not in committed:
                self.lost += max(gained, 0)
                continue
            self.busy_s += event.seconds * min(gained / max(event.steps, 1), 1.0)
            self.tokens[row.uid] = row.num_tokens
            self.last_commit_s = event.at
            if committed[row.uid] is not None:
                end = event.at - event.seconds * (1 - min(gained / max(event.steps, 1), 1.0))
                self.ended(row.uid, committed[row.uid], at=end)
        for uid, finish in [(row.uid, row.finish) for commit in answer[1:] for row in commit.rows]:
            self.ended(uid, finish, at=event.at)

    def ended(self, uid: str, finish: str | None, *, at: float) -> None:
        self.ends.append(at)
        if finish is not None and not finish.startswith(DROPPED):
            self.lengths[uid] = self.tokens[uid]


def figures(records: Sequence[LogRecord]) -> Figures:
    tally = _Tally()
    start = None
    for event, commands in records:
        if isinstance(event, Submitted):
            start = event.at if start is None else start
            tally.samples |= {sample.uid: sample for sample in event.samples}
        elif isinstance(event, WorkerJoined):
            tally.kinds[event.worker], tally.slots[event.worker] = event.kind, event.slots
        for command in commands:
            if isinstance(command, RunSegment):
                for one in command.admit:
                    tally.admit(command.worker, one)
            elif isinstance(command, Suspend):
                tally.suspended += len(command.uids)
                tally.trips += len(command.uids) * (command.why in ("breaker", "probe limit"))
                tally.truncated += len(command.uids) * (command.why == "truncated")
        if isinstance(event, SegmentEnded):
            tally.segment_ended(event, [command for command in commands if isinstance(command, Commit)])
    return _figures(tally, makespan=max(tally.last_commit_s - (start or 0.0), 1e-9), start=start or 0.0)


def _figures(tally: _Tally, *, makespan: float, start: float) -> Figures:
    # A worker that came back takes the slots of the one that was lost.
    capacity = sum(slots for name, slots in tally.slots.items() if "#" not in name)
    ends = sorted(tally.ends)
    ninety = ends[max(int(TAIL_SHARE * len(ends)) - 1, 0)] - start if ends else makespan
    return Figures(
        makespan_s=makespan,
        bubble=1 - tally.busy_s / (capacity * makespan) if capacity else 0.0,
        tail_fraction=1 - ninety / makespan,
        probe_recall=_recall(tally),
        breaker_trips=tally.trips,
        stolen=tally.stolen,
        suspensions=tally.suspended,
        truncated=tally.truncated,
        segments=tally.segments,
        useful_tokens=sum(tally.tokens.values()),
        repacked_tokens=tally.repacked,
        wasted_tokens=tally.repacked + tally.lost,
        prefill_tokens_saved=tally.saved,
    )


def _recall(tally: _Tally) -> float | None:
    if not tally.lengths:
        return None
    bound = np.percentile(list(tally.lengths.values()), HEAVY_PERCENTILE)
    judged = [uid for uid in tally.lengths if tally.first_role[uid] in ("fast", "heavy")]
    long = [uid for uid in judged if tally.lengths[uid] > bound]
    return sum(tally.first_role[uid] == "heavy" for uid in long) / len(long) if long else None


def spans(records: Sequence[LogRecord]) -> Iterator[Span]:
    """What every slot did when, in the order in which it ended; slots are given out lowest first."""
    places: dict[str, tuple[str, int, Role]] = {}
    suspended: dict[str, tuple[str, float]] = {}
    tokens: dict[str, int] = {}
    for event, commands in records:
        if isinstance(event, SegmentEnded):
            for row in event.rows:
                if row.uid not in places or places[row.uid][0] != event.worker:
                    continue
                worker, slot, role = places[row.uid]
                share = min((row.num_tokens - tokens.get(row.uid, 0)) / max(event.steps, 1), 1.0)
                tokens[row.uid] = row.num_tokens
                begin = event.at - event.seconds
                yield Span(worker, slot, begin, begin + share * event.seconds, role, row.uid)
                if row.finish is not None:
                    del places[row.uid]
        for command in commands:
            if isinstance(command, Suspend):
                for uid in command.uids:
                    places.pop(uid, None)
                    if command.why != "truncated":
                        suspended[uid] = (command.worker, event.at)
            elif isinstance(command, Retire):
                places = {uid: place for uid, place in places.items() if place[0] != command.worker}
            elif isinstance(command, RunSegment):
                for one in command.admit:
                    taken = {slot for worker, slot, _ in places.values() if worker == command.worker}
                    slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
                    places[one.uid] = (command.worker, slot, one.role)
                    tokens[one.uid] = one.num_tokens
                    if one.uid in suspended:
                        since = suspended.pop(one.uid)
                        yield Span(since[0], -1, since[1], event.at, None, one.uid)
