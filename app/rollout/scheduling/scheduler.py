"""The scheduler: a state machine that answers each event with commands for idle workers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from app.rollout.scheduling.adaptive import AdaptivePolicy
from app.rollout.scheduling.length_estimator import NOTHING_LEARNED, LearnedLengths, LengthEstimator
from app.rollout.scheduling.pdsr_v1 import PdsrV1Policy
from app.rollout.scheduling.pdsr_v2 import PdsrV2Policy
from app.rollout.scheduling.protocol import (
    FINISH_LENGTH,
    Admit,
    AdmitMethod,
    Answered,
    Closed,
    Command,
    Event,
    Released,
    RowReport,
    RunSegment,
    SampleRole,
    SegmentEnded,
    Submitted,
    Suspend,
    WorkerJoined,
    WorkerLost,
)
from app.rollout.scheduling.sample_states import SampleEntry, SampleState, SampleTable
from app.rollout.scheduling.scheduling_policy import (
    SchedulingContext,
    SchedulingPolicy,
    WorkerState,
)
from app.rollout.scheduling.segment_limits import SegmentLimits, prior_mean_length, segment_limits
from app.rollout.scheduling.sync import SyncPolicy
from settings.schema.rollout import PdsrSettings, SegmentSettings

POLICIES: dict[str, type[SchedulingPolicy]] = {
    policy.name: policy for policy in (SyncPolicy, PdsrV1Policy, PdsrV2Policy, AdaptivePolicy)
}


class Scheduler:
    """Answers events with commands (`app.rollout.scheduling.protocol`). The same events give the same commands.

    Args:
        policy: name in `POLICIES`.
        learned: length statistics of earlier schedules.
        has_turns: whether environments answer the turns of samples; also detected at the end of the first turn.
        max_suspended: maximum number of samples per worker that give up their slots while their environments answer;
            None = `SUSPENDED_PER_SLOT` for each slot, 0 = samples keep their slots.
    """

    def __init__(
        self,
        policy: str,
        *,
        pdsr: PdsrSettings,
        segment: SegmentSettings,
        learned: LearnedLengths = NOTHING_LEARNED,
        has_turns: bool = False,
        max_suspended: int | None = None,
    ):
        self.has_turns, self.max_suspended = has_turns, max_suspended
        self.segment = segment
        lengths = LengthEstimator(window=pdsr.window, unit=pdsr.unit, learned=learned)
        self.context = SchedulingContext(SampleTable(), {}, lengths, pdsr)
        self.policy = POLICIES[policy](self.context)
        self.context.update_threshold(self.policy.percentile)
        self.is_closed = False

    @property
    def samples(self) -> SampleTable:
        return self.context.samples

    def handle(self, event: Event) -> list[Command]:
        """Returns the commands that answer an event, in the order of their execution."""
        match event:
            case Submitted():
                assert not self.is_closed, "samples were submitted after `Closed`"
                for sample in event.samples:
                    self.policy.add(self.samples.add(sample))
            case Released():
                self._release(event)
            case Closed():
                self.is_closed = True
            case WorkerJoined():
                self._add_worker(event)
            case WorkerLost():
                self._remove_worker(event.worker)
            case SegmentEnded():
                self._segment_ended(event)
            case Answered():
                for row in event.rows:
                    self._answered(row)
        commands = self._issue_commands()
        verdicts, self.context.new_verdicts = self.context.new_verdicts, []
        return [*verdicts, *commands]

    @property
    def is_stuck(self) -> bool:
        """Whether samples wait although no worker is busy and no answer of an environment is pending."""
        is_moving = self.samples.counts[SampleState.ACTING] or any(w.is_busy for w in self.context.workers.values())
        return self.samples.num_waiting > 0 and not is_moving

    def _release(self, event: Released) -> None:
        lengths: dict[str, list[int]] = {}
        for uid in event.uids:
            entry = self.samples[uid]
            self.samples.forget(entry)
            known = lengths.setdefault(entry.prompt, [])
            if entry.state is SampleState.DONE:
                known.append(entry.num_tokens)
        left = {entry.prompt for entry in self.samples}
        for prompt, known in lengths.items():
            if prompt not in left:
                self.context.lengths.finish_prompt(prompt, mean=sum(known) / len(known) if known else None)
                self.policy.forget(prompt)

    def _add_worker(self, event: WorkerJoined) -> None:
        assert event.worker not in self.context.workers, f"{event.worker} joined twice"
        self.context.workers[event.worker] = WorkerState(
            *(event.worker, event.kind, event.slots, tuple(event.rungs), event.device, event.capacity),
            max_length=event.max_length,
            keeps_caches=event.keeps_caches,
            max_suspended=self.max_suspended,
        )
        longest_row = math.inf if event.max_length is None else event.max_length
        known = self.context.longest_rows.get(event.kind, 0)
        self.context.longest_rows[event.kind] = max(known, longest_row)

    def _remove_worker(self, name: str) -> None:
        worker = self.context.workers.pop(name)
        for entry in self.samples:
            if entry.held_by == name:
                self.samples.forget_cache(entry)
        for uid in worker.rows:
            entry = self.samples[uid]
            self.samples.suspend(entry, held_by=None, is_move=False)
            self.policy.requeue(entry)
        for uid in worker.answered:
            self.policy.requeue(self.samples[uid])

    def _segment_ended(self, event: SegmentEnded) -> None:
        worker = self.context.workers[event.worker]
        assert worker.is_busy, f"{event.worker} reports a segment that was not requested"
        worker.is_busy = False
        if event.steps:
            worker.step_s = event.seconds / event.steps
        committed = [
            self.samples.commit(event.worker, row, seconds=event.seconds, steps=event.steps) for row in event.rows
        ]
        worker.rows = [uid for uid in worker.rows if self.samples[uid].state is SampleState.RUNNING]
        acting = [entry for entry in committed if entry.state is SampleState.ACTING]
        worker.acting += [entry.uid for entry in acting if entry.held_by]
        self.has_turns |= bool(acting)
        self._observe(committed)

    def _observe(self, entries: Sequence[SampleEntry]) -> None:
        """Updates the length statistics and the policy with rows that have grown or ended."""
        grown = {entry.prompt for entry in entries if self.context.lengths.observe(entry)}
        if any(entry.finish is not None for entry in entries):
            self.context.update_threshold(self.policy.percentile)
        for entry in entries:
            self.policy.observe(entry, grew=entry.prompt in grown)

    def _answered(self, row: RowReport) -> None:
        """Gives an answered row back to the worker that keeps its cache, or to the policy if it does not fit there."""
        holder = next((one for one in self.context.workers.values() if row.uid in one.acting), None)
        entry = self.samples.answer(row.uid, num_tokens=row.num_tokens, finish=row.finish)
        if holder is not None:
            holder.acting.remove(entry.uid)
        self._observe([entry])
        if entry.finish is not None:
            return
        if holder is not None and holder.fits(entry):
            holder.answered.append(entry.uid)
        else:
            self.samples.forget_cache(entry)
            self.policy.requeue(entry)

    def _issue_commands(self) -> list[Command]:
        """Takes rows out of idle workers, assigns samples to them, and starts their segments."""
        idle = [worker for worker in self.context.workers.values() if not worker.is_busy]
        commands: list[Command] = []
        for worker in idle:
            commands += self._evict(worker)
        admitted = self._assign_samples(idle)
        for worker in idle:
            if worker.rows:
                commands.append(self._run_segment(worker, admitted[worker.name]))
        return commands

    def _evict(self, worker: WorkerState) -> list[Suspend]:
        leaving = self.policy.evictions(worker)
        outgrown = {uid for uid in worker.rows if not worker.fits(self.samples[uid])} - {one.uid for one in leaving}
        leaving += [Suspend(worker.name, uid, "row limit") for uid in worker.rows if uid in outgrown]
        for one in leaving:
            worker.rows.remove(one.uid)
            entry = self.samples[one.uid]
            if one.why == "truncated":
                self.samples.end(entry, FINISH_LENGTH)
                self.context.lengths.observe(entry)
                self.policy.observe(entry, grew=False)
            else:
                held_by = worker.name if worker.keeps_caches else None
                self.samples.suspend(entry, held_by=held_by, is_move=one.why != "steal limit")
                self.policy.requeue(entry)
        return leaving

    def _assign_samples(self, idle: list[WorkerState]) -> dict[str, list[Admit]]:
        """Gives workers their answered rows, then other samples one by one, each to the emptiest suitable worker."""
        admitted: dict[str, list[Admit]] = {}
        for worker in idle:
            worker.num_carried = worker.num_begun
            admitted[worker.name] = self._resume_answered(worker)
        while True:
            for worker in sorted(idle, key=lambda worker: worker.num_begun / worker.slots):
                taken = self.policy.next_sample(worker) if worker.has_free_slot else None
                if taken is not None:
                    uid, role = taken
                    entry = self.samples[uid]
                    how = "copy" if entry.held_by is not None else "recompute"
                    admitted[worker.name].append(self._admit(worker, entry, role, how))
                    break
            else:
                return admitted

    def _resume_answered(self, worker: WorkerState) -> list[Admit]:
        num_resumed = min(worker.slots - len(worker.rows), len(worker.answered))
        entries = [self.samples[uid] for uid in worker.answered[:num_resumed]]
        del worker.answered[:num_resumed]
        return [self._admit(worker, entry, entry.role, "resume") for entry in entries]

    def _admit(self, worker: WorkerState, entry: SampleEntry, role: SampleRole, how: AdmitMethod) -> Admit:
        self.samples.start(entry, worker.name, role)
        worker.rows.append(entry.uid)
        return Admit(entry.uid, entry.num_tokens, how, role)

    def _run_segment(self, worker: WorkerState, admitted: list[Admit]) -> RunSegment:
        worker.is_busy = True
        rows = [self.samples[uid] for uid in worker.rows]
        fitting = min(worker.num_fitting(entry) for entry in rows)
        if not (self.policy.refills or self.has_turns):
            length = int(min(self.segment.max, fitting))
            return RunSegment(worker.name, tuple(admitted), SegmentLimits(length))
        # Samples held back for a verdict count as waiting: for the end of a probe, then for a slot of any worker. With
        # turns, segments also end early: a turn is sent to the environment only when it is committed, and an answered
        # row returns only between segments.
        awaited = self.has_turns or self.policy.find(worker) is not None or self.policy.may_release()
        limits = segment_limits(
            self.segment,
            num_active=len(rows),
            has_waiting=awaited or not self.is_closed,
            mean_length=self.context.lengths.mean_length(default=prior_mean_length(rows[0].sample.max_new)),
            batch_sizes=worker.rungs,
            capacity=worker.capacity,
        )
        looks = [(entry, limit) for entry in rows if (limit := self.policy.limit(entry, worker)) is not None]
        left = [
            self.context.steps_to_limit(entry, limit, worker, default=self.segment.min)
            for entry, limit in looks
            if not self.context.is_over_limit(entry, limit)
        ]
        limits = limits._replace(length=int(min([limits.length, fitting, *left])))
        return RunSegment(worker.name, tuple(admitted), limits)
