"""The scheduler's other shell: workers that take their time from a cost model, and fail when a seed says so."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from app.records.sample import DROPPED
from app.rollout.scheduling.cost_model import CostModel
from app.rollout.scheduling.event_log import LogRecord
from app.rollout.scheduling.events import (
    Admit,
    Closed,
    Command,
    Commit,
    Event,
    Kind,
    Released,
    Retire,
    RowReport,
    RunSegment,
    SegmentEnded,
    Submitted,
    Suspend,
    WorkerJoined,
    WorkerLost,
)
from app.rollout.scheduling.length_traces import Trace, Traced, new_samples
from app.rollout.scheduling.scheduler import Scheduler
from app.rollout.scheduling.simulated_slots import Ladders, VirtualSlots

CACHE_RUNGS = tuple(256 * 2**i for i in range(13))
"""Cache lengths that an engine has programs for, up to the longest that a sample may need."""
WAVE_S = 0.5


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    name: str
    kind: Kind
    slots: int
    rungs: tuple[int, ...] = ()
    """Rows of smaller programs."""
    device: str | None = None
    """Workers on one device take turns; None: a device of its own."""
    ladders: Ladders | None = None
    """Of its engine; None: `CACHE_RUNGS`, and prompts that are not padded."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Chances, of each segment unless said otherwise."""

    seed: int = 0
    death: float = 0.0
    """The worker dies in it."""
    stall: float = 0.0
    """It takes longer than its lease, and reports afterwards."""
    silence: float = 0.0
    """Its report is lost."""
    duplicate: float = 0.0
    """Of a message about a worker, to come again later."""
    delay: float = 0.0
    """Of a message about a worker, to come late, so that others overtake it."""
    no_number: float = 0.0
    """Of a row, to be dropped by the engine."""
    most: int = 40
    """Faults in all, so that every run ends."""


@dataclass(slots=True)
class _Row:
    traced: Traced
    epoch: int
    num_tokens: int


@dataclass(slots=True)
class _Worker:
    spec: WorkerSpec
    slots: VirtualSlots
    rows: dict[str, _Row] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    """Uids whose caches it keeps."""
    owed_s: float = 0.0
    """Of what it was told since its last segment."""


class VirtualClock:
    """Runs a trace through a scheduler.

    Args:
        workers: that join at the start; `join` adds others.
        max_new: tokens that a sample may have.
        check: whether all invariants are checked after every event.
        num_waves: parts in which the trace is submitted, `WAVE_S` apart, before it is closed; 0 where the scheduler
            knows its samples.
        releases: whether half of the samples are released some time after they have ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        trace: Trace,
        workers: Sequence[WorkerSpec],
        cost: CostModel,
        *,
        max_new: int,
        faults: Faults | None = None,
        check: bool = False,
        num_waves: int = 1,
        releases: bool = False,
    ):
        self.scheduler = scheduler
        self.cost = cost
        self.max_new = max_new
        self.faults = faults or Faults()
        self.check = check
        self.records: list[LogRecord] = []
        self.traced = {one.uid: one for one in trace}
        self._workers: dict[str, _Worker] = {}
        self._lost: set[str] = set()
        self._free_at: dict[str, float] = {}
        self._inbox: list[tuple[float, int, Event]] = []
        self._num_posted = 0
        self.num_faults = 0
        self._random = random.Random(self.faults.seed)
        self._releases = random.Random(self.faults.seed) if releases else None
        for spec in workers:
            self.join(spec)
        for wave in range(num_waves):
            first, last = (len(trace) * edge // num_waves for edge in (wave, wave + 1))
            self._post(Submitted(wave * WAVE_S, new_samples(trace[first:last], max_new=max_new)))
        if num_waves:
            self._post(Closed((num_waves - 1) * WAVE_S))

    def run(self) -> list[LogRecord]:
        """To the last message: also those that come after all is done."""
        while self._inbox:
            at, _, event = heapq.heappop(self._inbox)
            event = replace(event, at=at)
            commands = self.scheduler.handle(event)
            self.records.append(LogRecord(event, tuple(commands)))
            if self.check:
                self.scheduler.check()
            for command in commands:
                self._do(command, at)
        return self.records

    def _post(self, event: Event) -> None:
        """Puts a message in the inbox, late or twice where the faults say so."""
        copies = [event]
        if isinstance(event, WorkerJoined | WorkerLost | SegmentEnded | Released):
            if self._strikes(self.faults.delay):
                copies = [replace(event, at=event.at + self._random.random())]
            if self._strikes(self.faults.duplicate):
                copies.append(replace(event, at=event.at + self._random.random()))
        for one in copies:
            self._num_posted += 1
            heapq.heappush(self._inbox, (one.at, self._num_posted, one))

    def _strikes(self, chance: float) -> bool:
        if chance == 0.0 or self.num_faults >= self.faults.most or self._random.random() >= chance:
            return False
        self.num_faults += 1
        return True

    def join(self, spec: WorkerSpec, *, at: float = 0.0) -> None:
        ladders = spec.ladders or self._ladders((*spec.rungs, spec.slots))
        self._workers[spec.name] = _Worker(spec, VirtualSlots(ladders, self.cost))
        self._post(WorkerJoined(at, spec.name, spec.kind, spec.slots, spec.rungs, spec.device))

    def _ladders(self, rows: tuple[int, ...]) -> Ladders:
        top = max(one.prompt_length for one in self.traced.values()) + self.max_new
        return Ladders(rows, (*(rung for rung in CACHE_RUNGS if rung < top), top))

    def _lose(self, spec: WorkerSpec, why: str, *, at: float) -> None:
        """The worker is reported lost, and comes back, once, under another name."""
        self._post(WorkerLost(at, spec.name, why))
        if spec.name in self._lost:
            return
        self._lost.add(spec.name)
        name, _, number = spec.name.partition("#")
        self.join(replace(spec, name=f"{name}#{int(number or 1) + 1}"), at=at + self._random.random())

    def _do(self, command: Command, now: float) -> None:
        match command:
            case Suspend():
                worker = self._workers[command.worker]
                worker.owed_s += worker.slots.suspend()
                for uid in command.uids:
                    del worker.rows[uid]
                if command.why != "truncated":
                    worker.kept.update(command.uids)
            case RunSegment():
                self._run(command, now)
            case Commit() if self._releases is not None:
                ended = tuple(row.uid for row in command.rows if row.finish and self._releases.random() < 0.5)
                self._post(Released(now + self._releases.random(), ended))
            case Retire():
                self._workers.pop(command.worker, None)

    def _run(self, command: RunSegment, now: float) -> None:
        worker, slots = self._workers[command.worker], self._workers[command.worker].slots
        seconds = worker.owed_s + self._admit(worker, command.admit)
        worker.owed_s = 0.0
        rows = list(worker.rows.values())
        assert 0 < len(rows) <= worker.spec.slots, f"{command.worker}: {len(rows)} rows"
        if not command.leave_when_finished:
            seconds += slots.compact(len(rows))
        in_room, growth_s = slots.make_room(
            (row.traced.prompt_length + row.num_tokens, self.max_new - row.num_tokens) for row in rows
        )
        steps = self._steps(command, [row.traced.length - row.num_tokens for row in rows])
        steps = steps if in_room is None else min(steps, in_room)
        # Replayed tokens pass through the decode program, all rows side by side.
        replayed = max((one.num_tokens for one in command.admit if one.how == "replay"), default=0)
        seconds += growth_s + slots.steps(steps + replayed)
        device = worker.spec.device or worker.spec.name.partition("#")[0]
        free_at = self._free_at.get(device, 0.0)
        starts = max(now, free_at)
        # The host makes a segment ready while another's still has the device.
        seconds += max(now + self.cost.segment_s, free_at) - starts
        self._free_at[device] = ends = starts + seconds
        self._report(command, worker, seconds, steps, ends)

    def _report(self, command: RunSegment, worker: _Worker, seconds: float, steps: int, ends: float) -> None:
        reports = []
        for uid, row in list(worker.rows.items()):
            row.num_tokens = min(row.num_tokens + steps, row.traced.length)
            finish = None
            if row.num_tokens == row.traced.length:
                finish = "length" if row.num_tokens == self.max_new else "stop"
            if self._strikes(self.faults.no_number):
                finish = f"{DROPPED}non-finite logits"
            reports.append(RowReport(uid, row.epoch, row.num_tokens, finish))
            if finish is not None:
                del worker.rows[uid]
        spec = worker.spec
        if self._strikes(self.faults.death):
            self._lose(spec, "died", at=ends - seconds * self._random.random())
        elif self._strikes(self.faults.silence):
            self._lose(spec, "lease expired", at=ends + 2 * seconds)
        else:
            if self._strikes(self.faults.stall):
                self._lose(spec, "lease expired", at=ends)
                ends += seconds * self._random.random()
            self._post(SegmentEnded(ends, command.worker, command.segment, tuple(reports), seconds, steps))

    def _admit(self, worker: _Worker, admitted: Sequence[Admit]) -> float:
        """Seconds that it takes to put them in."""
        prompts: dict[str, int] = {}
        reread: list[int] = []
        num_copied = 0
        for one in admitted:
            traced = self.traced[one.uid]
            traced = traced._replace(length=min(traced.length, self.max_new))
            assert one.uid not in worker.rows, f"{one.uid} is admitted a second time"
            worker.rows[one.uid] = _Row(traced, one.epoch, one.num_tokens)
            if one.how == "copy":
                assert one.source and one.uid in self._workers[one.source].kept, f"{one.uid}: nobody kept its cache"
                self._workers[one.source].kept.remove(one.uid)
                num_copied += 1
            elif one.how == "prefill" and one.num_tokens:
                reread.append(traced.prompt_length + one.num_tokens)
            else:
                prompts[traced.prompt] = traced.prompt_length
        if not admitted:
            return 0.0
        num_fresh = len(admitted) - len(reread) - num_copied
        return worker.slots.admit(prompts, num_fresh=num_fresh, reread=reread, num_copied=num_copied)

    @staticmethod
    def _steps(command: RunSegment, left: list[int]) -> int:
        """Decode steps until the segment ends, of rows with so many tokens left."""
        left = sorted(left)
        steps = min(command.length, left[-1])
        if 0 < command.leave_when_finished <= len(left):
            steps = min(steps, left[command.leave_when_finished - 1])
        if 0 < command.leave_when_active < len(left):
            steps = min(steps, left[len(left) - command.leave_when_active - 1])
        return steps
