"""The scheduler's other shell: workers that take their time from a cost model, and fail when a seed says so."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from app.rollout.scheduling.cost_model import CostModel
from app.rollout.scheduling.event_log import LogRecord
from app.rollout.scheduling.events import (
    DROPPED,
    Admit,
    Closed,
    Command,
    Event,
    Kind,
    Retire,
    RowReport,
    RunSegment,
    SegmentEnded,
    Submitted,
    Suspend,
    WorkerJoined,
    WorkerLost,
)
from app.rollout.scheduling.scheduler import Scheduler
from app.rollout.scheduling.traces import Trace, Traced, new_samples

WAVE_S = 0.5


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    name: str
    kind: Kind
    slots: int
    rungs: tuple[int, ...] = ()
    """Rows of smaller programs."""
    cache_rungs: tuple[int, ...] = ()
    """Tokens that caches have room for; as many as are needed where there are none."""
    device: str | None = None
    """Workers on one device take turns; None: a device of its own."""


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
    rows: dict[str, _Row] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    """Uids whose caches it keeps."""
    prompts: set[str] = field(default_factory=set)
    """That it has prefilled."""
    size: int = 0
    """Rows of the program that runs, empty ones among them."""
    room: int = 0
    """Of each row's cache, in tokens. It only grows."""

    def grow(self, length: int) -> None:
        """To the rung that holds so many tokens."""
        self.room = max(self.room, next((rung for rung in self.spec.cache_rungs if rung >= length), length))

    def grow_to_full(self) -> None:
        """As rows that come, go or move together have it."""
        self.room = max((self.room, *self.spec.cache_rungs[-1:]))


class VirtualClock:
    """Runs a trace through a scheduler.

    Args:
        workers: that join at the start; `join` adds others.
        max_new: tokens that a sample may have.
        check: whether all invariants are checked after every event.
        num_waves: parts in which the trace is submitted, `WAVE_S` apart, before it is closed; 0 where the scheduler
            knows its samples.
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
        if isinstance(event, WorkerJoined | WorkerLost | SegmentEnded):
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
        self._workers[spec.name] = _Worker(spec)
        self._post(WorkerJoined(at, spec.name, spec.kind, spec.slots, spec.rungs, spec.device))

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
                for uid in command.uids:
                    del worker.rows[uid]
                worker.grow_to_full()
                if command.why != "truncated" and self.scheduler.keeps_caches:
                    worker.kept.update(command.uids)
            case RunSegment():
                self._run(command, now)
            case Retire():
                self._workers.pop(command.worker, None)

    def _run(self, command: RunSegment, now: float) -> None:
        worker = self._workers[command.worker]
        seconds = self.cost.segment_s + sum(self._admit(worker, one) for one in command.admit)
        prefilled = self._prefill_tokens(worker, command.admit)
        seconds += self.cost.prefill(prefilled)
        assert 0 < len(worker.rows) <= worker.spec.slots, f"{command.worker}: {len(worker.rows)} rows"
        self._resize(worker, command)
        steps = self._steps(command, [row.traced.length - row.num_tokens for row in worker.rows.values()])
        steps = self._steps_in_room(worker, steps)
        step_s = self.cost.step(rows=worker.size, cache_length=worker.room)
        # Replayed tokens pass through the decode program, all rows side by side.
        replayed = max((one.num_tokens for one in command.admit if one.how == "replay"), default=0)
        seconds += (steps + replayed) * step_s
        device = worker.spec.device or worker.spec.name.partition("#")[0]
        ends = max(now, self._free_at.get(device, 0.0)) + seconds
        self._free_at[device] = ends
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

    def _admit(self, worker: _Worker, one: Admit) -> float:
        """Seconds that its copy takes, 0 where it is prefilled."""
        traced = self.traced[one.uid]
        traced = traced._replace(length=min(traced.length, self.max_new))
        assert one.uid not in worker.rows, f"{one.uid} is admitted a second time"
        worker.rows[one.uid] = _Row(traced, one.epoch, one.num_tokens)
        if one.how != "copy":
            return 0.0
        assert one.source is not None and one.uid in self._workers[one.source].kept, f"{one.uid}: nobody kept its cache"
        self._workers[one.source].kept.remove(one.uid)
        return self.cost.move(traced.prompt_length + one.num_tokens)

    def _prefill_tokens(self, worker: _Worker, admitted: Sequence[Admit]) -> int:
        total = 0
        for one in admitted:
            traced = self.traced[one.uid]
            if one.how == "prefill" and one.num_tokens:
                total += traced.prompt_length + one.num_tokens
            elif one.how != "copy" and traced.prompt not in worker.prompts:
                worker.prompts.add(traced.prompt)
                total += traced.prompt_length
        return total

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

    @staticmethod
    def _resize(worker: _Worker, command: RunSegment) -> None:
        """As `app.rollout.slots` does: all slots for who comes, and the smallest program when nobody waits."""
        sizes = (*worker.spec.rungs, worker.spec.slots)
        if command.admit or not worker.size:
            worker.size = worker.spec.slots
        if any(one.how == "copy" or (one.how == "prefill" and one.num_tokens) for one in command.admit):
            worker.grow_to_full()
        fitting = min(size for size in sizes if size >= len(worker.rows))
        if not command.leave_when_finished and fitting < worker.size:
            worker.size = fitting
            worker.grow_to_full()

    @staticmethod
    def _steps_in_room(worker: _Worker, steps: int) -> int:
        """As many of the steps as caches have room for; longer ones where that would be none."""
        rows = [(row.traced.prompt_length + row.num_tokens, row) for row in worker.rows.values()]
        if not worker.spec.cache_rungs:
            worker.room = max(length for length, _ in rows) + steps
            return steps
        # The last token is not fed, so it needs no room.
        worker.grow(max(length for length, _ in rows))
        short = [length for length, row in rows if row.traced.length - row.num_tokens > worker.room - length + 1]
        return min(steps, worker.room - max(short) + 1) if short else steps
