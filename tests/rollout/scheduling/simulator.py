"""Workers of a scheduler on a virtual clock, with random faults: no model and no device."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from app.records.sample import DROPPED_PREFIX
from app.rollout.scheduling.protocol import (
    Admit,
    Answered,
    Closed,
    Command,
    Event,
    EventRecord,
    Released,
    RowReport,
    RunSegment,
    SegmentEnded,
    Submitted,
    Suspend,
    WorkerJoined,
    WorkerKind,
    WorkerLost,
)
from app.rollout.scheduling.scheduler import Scheduler
from tests.rollout.scheduling.invariants import check_invariants
from tests.rollout.scheduling.length_traces import Trace, TraceSample, TraceTurn, new_samples

SUBMIT_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of what workers do."""

    step_s: float = 0.0
    """Seconds of a decode step, with any number of rows."""
    segment_s: float = 0.0
    """Seconds on the host between two segments; another worker may use the device meanwhile."""
    move_s: float = 0.0
    """Seconds to insert a row that comes with its cache from a worker."""


@dataclass(frozen=True, slots=True)
class SimulatedWorkerSpec:
    name: str
    kind: WorkerKind
    slots: int
    batch_sizes: tuple[int, ...] = ()
    """Numbers of rows of smaller programs."""
    device: str | None = None
    """Device that workers share in turns; None for a separate device."""
    capacity: int = 8192
    """Number of tokens that its KV cache holds."""
    max_length: int | None = None
    """Longest row of its slots; None = the longest sample."""
    keeps_caches: bool = True


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities of faults, per segment unless stated otherwise."""

    seed: int = 0
    death: float = 0.0
    """The worker dies in the segment."""
    non_finite: float = 0.0
    """A row is dropped, as by the engine for NaN logits."""
    max_faults: int = 40
    """Maximum number of faults, so that every run ends."""


@dataclass(slots=True)
class _SimulatedRow:
    sample: TraceSample
    num_tokens: int

    @property
    def turn(self) -> TraceTurn | None:
        """The turn that it is in; None in one that nobody answers."""
        return next((turn for turn in self.sample.turns if turn.end > self.num_tokens), None)

    @property
    def num_left(self) -> int:
        """Number of tokens to the end of its turn."""
        turn = self.turn
        return (self.sample.length if turn is None else turn.end) - self.num_tokens


@dataclass(slots=True)
class _SimulatedWorker:
    spec: SimulatedWorkerSpec
    rows: dict[str, _SimulatedRow] = field(default_factory=dict)
    cached_uids: set[str] = field(default_factory=set)
    """Uids of suspended rows whose caches it keeps."""
    acting: dict[str, int] = field(default_factory=dict)
    """Uid of a row whose turn has ended -> tokens of the completion in the cache that it keeps."""


class SchedulerSimulator:
    """Runs a trace through a scheduler.

    Args:
        workers: workers that join at the start.
        max_new: maximum number of tokens of a sample.
        check: whether all invariants are checked after every event.
        num_submissions: parts in which the trace is submitted, `SUBMIT_INTERVAL_S` apart, before it is closed.
        releases: whether half of the samples are released some time after they have ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        trace: Trace,
        workers: Sequence[SimulatedWorkerSpec],
        cost: Costs,
        *,
        max_new: int,
        faults: Faults | None = None,
        check: bool = False,
        num_submissions: int = 1,
        releases: bool = False,
    ):
        self.scheduler = scheduler
        self.cost = cost
        self.max_new = max_new
        self.faults = faults or Faults()
        self.check = check
        self.records: list[EventRecord] = []
        self.trace_samples = {one.uid: one for one in trace}
        self._workers: dict[str, _SimulatedWorker] = {}
        self.turns_given: set[tuple[str, int]] = set()
        """Uids and ends of the turns that environments got."""
        self._device_free_at: dict[str, float] = {}
        self._inbox: list[tuple[float, int, Event]] = []
        self._num_posted = 0
        self.num_faults = 0
        self._rng = random.Random(self.faults.seed)
        self._release_rng = random.Random(self.faults.seed) if releases else None
        for spec in workers:
            self._add_worker(spec)
        for wave in range(num_submissions):
            first, last = (len(trace) * edge // num_submissions for edge in (wave, wave + 1))
            self._post(Submitted(wave * SUBMIT_INTERVAL_S, new_samples(trace[first:last], max_new=max_new)))
        self._post(Closed((num_submissions - 1) * SUBMIT_INTERVAL_S))

    def run(self) -> list[EventRecord]:
        """Runs to the last message, including those after the last sample."""
        while self._inbox:
            at, _, event = heapq.heappop(self._inbox)
            event = replace(event, at=at)
            if isinstance(event, WorkerLost):
                del self._workers[event.worker]
            commands = self.scheduler.handle(event)
            self.records.append(EventRecord(event, tuple(commands)))
            if self.check:
                check_invariants(self.scheduler)
            if isinstance(event, SegmentEnded | Answered):
                self._commit(event.rows, at)
            for command in commands:
                self._execute(command, at)
        return self.records

    def _post(self, event: Event) -> None:
        self._num_posted += 1
        heapq.heappush(self._inbox, (event.at, self._num_posted, event))

    def _fault_occurs(self, chance: float) -> bool:
        if chance == 0.0 or self.num_faults >= self.faults.max_faults or self._rng.random() >= chance:
            return False
        self.num_faults += 1
        return True

    def _add_worker(self, spec: SimulatedWorkerSpec, *, at: float = 0.0) -> None:
        self._workers[spec.name] = _SimulatedWorker(spec)
        sizes = spec.slots, spec.batch_sizes, spec.device, spec.capacity, spec.max_length, spec.keeps_caches
        self._post(WorkerJoined(at, spec.name, spec.kind, *sizes))

    def _lose(self, spec: SimulatedWorkerSpec, *, at: float) -> None:
        """Reports the worker as lost; another one takes its place, so that every run ends."""
        self._post(WorkerLost(at, spec.name))
        name, _, number = spec.name.partition("#")
        self._add_worker(replace(spec, name=f"{name}#{int(number or 1) + 1}"), at=at + self._rng.random())

    def _execute(self, command: Command, now: float) -> None:
        match command:
            case Suspend():
                worker = self._workers[command.worker]
                del worker.rows[command.uid]
                if command.why == "truncated":
                    self._release([command.uid], now)
                elif worker.spec.keeps_caches:
                    worker.cached_uids.add(command.uid)
            case RunSegment():
                self._run_segment(command, now)

    def _commit(self, rows: Sequence[RowReport], now: float) -> None:
        for row in rows:
            if row.turn_end is not None:
                self._step_environment(row.uid, row.num_tokens, now)
        self._release([row.uid for row in rows if row.finish], now)

    def _release(self, ended: Sequence[str], now: float) -> None:
        if self._release_rng is not None:
            released = tuple(uid for uid in ended if self._release_rng.random() < 0.5)
            self._post(Released(now + self._release_rng.random(), released))

    def _step_environment(self, uid: str, num_tokens: int, now: float) -> None:
        [turn] = [turn for turn in self.trace_samples[uid].turns if turn.end == num_tokens]
        assert (uid, turn.end) not in self.turns_given, f"{uid}: its environment got a turn a second time"
        self.turns_given.add((uid, turn.end))
        answer = RowReport(uid, turn.end + turn.observation, turn.finish)
        self._post(Answered(now + turn.latency_s, (answer,)))

    def _run_segment(self, command: RunSegment, now: float) -> None:
        worker = self._workers[command.worker]
        seconds = self._admit(worker, command.admit)
        rows = list(worker.rows.values())
        assert 0 < len(rows) <= worker.spec.slots, f"{command.worker}: {len(rows)} rows"
        steps = self._steps(command, [row.num_left for row in rows])
        lengths = [row.sample.prompt_length + row.num_tokens for row in rows]
        limit = worker.spec.max_length
        assert limit is None or max(lengths) + steps <= limit, f"{command.worker}: rows beyond {limit} tokens"
        seconds += steps * self.cost.step_s
        device = worker.spec.device or worker.spec.name.partition("#")[0]
        free_at = self._device_free_at.get(device, 0.0)
        starts = max(now, free_at)
        # The host makes a segment ready while another's still has the device.
        seconds += max(now + self.cost.segment_s, free_at) - starts
        self._device_free_at[device] = ends = starts + seconds
        self._post_report(command, worker, seconds, steps, ends)

    def _post_report(
        self, command: RunSegment, worker: _SimulatedWorker, seconds: float, steps: int, ends: float
    ) -> None:
        reports = []
        for uid, row in list(worker.rows.items()):
            finish, ends_turn, is_acting = None, row.num_left <= steps, row.turn is not None
            row.num_tokens += min(steps, row.num_left)
            if ends_turn and not is_acting:
                finish = "length" if row.num_tokens == self.max_new else "stop"
            if self._fault_occurs(self.faults.non_finite):
                finish = f"{DROPPED_PREFIX}non-finite logits"
            is_acting = is_acting and ends_turn and finish is None
            reports.append(RowReport(uid, row.num_tokens, finish, "stop" if is_acting else None))
            if finish is not None or is_acting:
                del worker.rows[uid]
            if is_acting:
                worker.acting[uid] = row.num_tokens
        spec = worker.spec
        if self._fault_occurs(self.faults.death):
            self._lose(spec, at=ends - seconds * self._rng.random())
        else:
            self._post(SegmentEnded(ends, command.worker, tuple(reports), seconds, steps))

    def _admit(self, worker: _SimulatedWorker, admitted: Sequence[Admit]) -> float:
        """Admits rows and returns the seconds."""
        num_moved = 0
        for one in admitted:
            traced = self.trace_samples[one.uid]
            traced = traced._replace(length=min(traced.length, self.max_new))
            assert one.uid not in worker.rows, f"{one.uid} is admitted a second time"
            worker.rows[one.uid] = _SimulatedRow(traced, one.num_tokens)
            if one.how == "resume":
                del worker.acting[one.uid]
                continue
            for holder in self._workers.values():
                holder.acting.pop(one.uid, None)
            if one.how == "copy":
                [holder] = [holder for holder in self._workers.values() if one.uid in holder.cached_uids]
                holder.cached_uids.remove(one.uid)
                num_moved += 1
        return num_moved * self.cost.move_s

    @staticmethod
    def _steps(command: RunSegment, left: list[int]) -> int:
        """Returns the decode steps until the segment ends, for rows with these numbers of remaining tokens."""
        left = sorted(left)
        steps = min(command.limits.length, left[-1])
        if 0 < command.limits.leave_when_finished <= len(left):
            steps = min(steps, left[command.limits.leave_when_finished - 1])
        if 0 < command.limits.leave_when_active < len(left):
            steps = min(steps, left[len(left) - command.limits.leave_when_active - 1])
        return steps
