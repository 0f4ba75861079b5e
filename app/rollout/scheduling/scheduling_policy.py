"""The interface of scheduling policies, which decide which sample a worker takes next and which rows leave it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from app.rollout.scheduling.length_estimator import LengthEstimator
from app.rollout.scheduling.priority_queue import PriorityQueue
from app.rollout.scheduling.protocol import SampleRole, Suspend, Verdict, WorkerKind
from app.rollout.scheduling.sample_states import SampleEntry, SampleState, SampleTable
from settings.schema.rollout import PDSR_WINDOW_MIN, PdsrSettings

SUSPENDED_PER_SLOT = 4
"""Default of `env.max_suspended` per slot: number of samples that may wait for their environments without a slot.

It takes slots * (1 + latency of the environment / generation time per turn) samples to keep all slots busy.
"""


def admission_budget(num_free: int, num_suspended: int, *, num_slots: int, limit: int | None) -> int:
    """Returns how many new samples may take free slots (none if negative).

    Each suspended sample beyond the limit reserves a slot.

    Args:
        num_free: number of slots without a row.
        num_suspended: number of samples that will return to a slot: acting or answered.
        limit: maximum number of suspended samples (`env.max_suspended`); None = `SUSPENDED_PER_SLOT` per slot.
    """
    return num_free - max(num_suspended - (SUSPENDED_PER_SLOT * num_slots if limit is None else limit), 0)


PROBE_SECONDS_SHARE = 0.5
"""Limit of probes in seconds, as a fraction of `rollout.pdsr.fast_limit_s`."""
STEAL_LIMIT_SHARE = 0.25
"""Fraction of the fast limit after which a stolen sample should go back to a heavy worker."""


@dataclass(slots=True)
class WorkerState:
    """A worker as the scheduler sees it."""

    name: str
    kind: WorkerKind
    slots: int
    rungs: tuple[int, ...]
    device: str | None
    capacity: int
    max_length: int | None
    keeps_caches: bool
    max_suspended: int | None
    """Maximum number of samples that wait without a slot; see `limit` of `admission_budget`."""
    rows: list[str] = field(default_factory=list)
    """Uids in the order of admission."""
    acting: list[str] = field(default_factory=list)
    """Uids of the rows that wait for their environments and whose caches this worker keeps."""
    answered: list[str] = field(default_factory=list)
    """Uids of answered rows that this worker takes back next, in the order of their answers."""
    is_busy: bool = False
    """Whether a segment is running."""
    num_carried: int = 0
    """Number of rows kept from the last segment, with or without a slot."""
    step_s: float | None = None
    """Mean seconds per decode step in the last segment; None before the first."""

    @property
    def num_begun(self) -> int:
        """Number of samples that are rows of this worker or will return to it."""
        return len(self.rows) + len(self.acting) + len(self.answered)

    @property
    def num_free_slots(self) -> int:
        """Number of slots that are free for samples of the policy; may be negative."""
        num_free, num_suspended = self.slots - len(self.rows), len(self.acting) + len(self.answered)
        return admission_budget(num_free, num_suspended, num_slots=self.slots, limit=self.max_suspended)

    @property
    def has_free_slot(self) -> bool:
        return self.num_free_slots > 0

    def num_fitting(self, entry: SampleEntry) -> float:
        """Returns how many more tokens of a sample fit into a slot."""
        if self.max_length is None:
            return math.inf
        return self.max_length - entry.length

    def fits(self, entry: SampleEntry) -> bool:
        return self.num_fitting(entry) > 0


class RowLimit(NamedTuple):
    """The length or decoding time of a row at which the policy must decide about it again."""

    tokens: float
    seconds: float
    """Limit of the decoding time; used only if `rollout.pdsr.unit` is `seconds`."""

    def times(self, factor: float) -> RowLimit:
        return RowLimit(self.tokens * factor, self.seconds * factor)


@dataclass
class SchedulingContext:
    """The state of the schedule that all policies share, and the constants of P-DSR."""

    samples: SampleTable
    workers: dict[str, WorkerState]
    """Live workers, in the order of joining."""
    lengths: LengthEstimator
    pdsr: PdsrSettings
    longest_rows: dict[WorkerKind, float] = field(default_factory=dict)
    """Kind of worker -> maximum row length on any worker of this kind, including lost workers."""
    threshold: float | None = None
    """Length above which a sample is heavy; updated when a sample finishes."""
    new_verdicts: list[Verdict] = field(default_factory=list)
    """Verdicts since the last event was answered."""
    window_min: int = PDSR_WINDOW_MIN
    probe_advance: int = 256
    """Number of samples that a probe may overtake in the queue. Without this bound, new prompts would starve older
    ones."""
    max_moves: int = 2
    """Number of moves after which `adaptive` stops moving a sample, and `pdsr_v2` leaves it to heavy workers. Stolen
    samples that go back, and samples too long for their slots, always move."""

    @property
    def fast_limit(self) -> RowLimit:
        return RowLimit(self.pdsr.fast_limit_tokens, self.pdsr.fast_limit_s)

    @property
    def probe_limit(self) -> RowLimit:
        return RowLimit(self.pdsr.probe_limit_tokens, PROBE_SECONDS_SHARE * self.pdsr.fast_limit_s)

    def expected_length(self, entry: SampleEntry) -> float:
        """Returns the expected length in `rollout.pdsr.unit`; earlier epochs are used only if the unit is `tokens`."""
        if self.pdsr.unit == "tokens":
            return self.lengths.estimate(entry)
        return max(self.lengths.group_measure.get(entry.prompt, 0.0), self.lengths.measure(entry))

    def known_verdict(self, prompt: str) -> WorkerKind | None:
        """Returns the verdict on a prompt from the lengths of its samples in an earlier epoch; None if unknown.

        These lengths are in tokens, so there is no verdict if `rollout.pdsr.unit` is `seconds`.
        """
        length = self.lengths.history.get(prompt)
        if length is None or self.threshold is None or self.pdsr.unit == "seconds":
            return None
        return "heavy" if length > self.threshold else "fast"

    def outgrows(self, entry: SampleEntry, kind: WorkerKind) -> bool:
        """Returns whether a sample is too long for all workers of a kind that have ever joined."""
        return entry.length >= self.longest_rows.get(kind, math.inf)

    def is_over_limit(self, entry: SampleEntry, limit: RowLimit) -> bool:
        """Returns whether a sample has reached a limit."""
        return entry.num_tokens >= limit.tokens or (self.pdsr.unit == "seconds" and entry.seconds >= limit.seconds)

    def steps_to_limit(self, entry: SampleEntry, limit: RowLimit, worker: WorkerState, *, default: int) -> float:
        """Returns the number of decode steps, at least 1, after which a sample will have reached a limit.

        Args:
            default: number of steps to assume if the limit is in seconds and the worker's time per step is unknown.
        """
        steps = limit.tokens - entry.num_tokens
        if self.pdsr.unit == "seconds":
            left_s = limit.seconds - entry.seconds
            steps = min(steps, default if worker.step_s is None else math.ceil(left_s / max(worker.step_s, 1e-9)))
        return max(steps, 1)

    def update_threshold(self, percentile: float) -> None:
        begun = [uid for worker in self.workers.values() for uid in (*worker.rows, *worker.acting, *worker.answered)]
        running = [self.lengths.measure(self.samples[uid]) for uid in begun]
        self.threshold = self.lengths.threshold(running, percentile=percentile, min_finished=self.window_min)

    def serves(self, worker: WorkerState, kind: WorkerKind) -> bool:
        """Returns whether the worker serves a kind of work: its own kind, or a kind without workers."""
        return worker.kind == kind or all(other.kind != kind for other in self.workers.values())

    def has_idle_slot(self, kind: WorkerKind, uid: str) -> bool:
        """Returns whether a sample could start on a worker of a kind now."""
        entry = self.samples[uid]
        return any(worker.has_free_slot and worker.fits(entry) for worker in self._idle_workers(kind))

    def num_idle_slots(self, kind: WorkerKind) -> int:
        """Returns the number of free slots of idle workers of a kind."""
        return sum(worker.num_free_slots for worker in self._idle_workers(kind))

    def _idle_workers(self, kind: WorkerKind) -> list[WorkerState]:
        return [worker for worker in self.workers.values() if worker.kind == kind and not worker.is_busy]

    def first_fitting(self, queue: PriorityQueue, worker: WorkerState) -> str | None:
        """Returns the first sample of a queue that fits a worker, without removing it."""
        return next((uid for uid in queue if worker.fits(self.samples[uid])), None)


class SchedulingPolicy(ABC):
    """Base class of scheduling policies. A policy queues the waiting samples, and must be deterministic."""

    name: ClassVar[str]
    refills: ClassVar[bool] = True
    """Whether segments end early to admit waiting samples or to use smaller programs."""
    served_by: ClassVar[Mapping[str, WorkerKind | None]] = {"any": None}
    """Queue -> kind of worker that serves it (None = any), in the order in which a worker checks the queues."""

    def __init__(self, context: SchedulingContext):
        self.context = context
        self.queues = {name: PriorityQueue() for name in self.served_by}

    @abstractmethod
    def add(self, entry: SampleEntry) -> None:
        """Queues a submitted sample."""

    def requeue(self, entry: SampleEntry) -> None:
        """Queues a sample that has left its worker unfinished."""
        self.add(entry)

    def find(self, worker: WorkerState) -> tuple[str, str] | None:
        """Returns the uid and the queue of the next sample for a worker, without removing it; None if it gets none."""
        for queue, kind in self.served_by.items():
            if kind is None or self.context.serves(worker, kind):
                uid = self.context.first_fitting(self.queues[queue], worker)
                if uid is not None:
                    return uid, queue
        return None

    def next_sample(self, worker: WorkerState) -> tuple[str, SampleRole] | None:
        """Removes the next sample for a worker with a free slot, and returns it with its role; None if it gets none."""
        found = self.find(worker)
        if found is None:
            return None
        uid, queue = found
        self.queues[queue].remove(uid)
        return uid, self.start(self.context.samples[uid], queue, worker)

    @abstractmethod
    def start(self, entry: SampleEntry, queue: str, worker: WorkerState) -> SampleRole:
        """Records that a sample taken from a queue starts on a worker, and returns its role."""

    @property
    def percentile(self) -> float:
        """Percentile of the lengths in the window above which a sample is heavy."""
        return self.context.pdsr.percentile

    def may_release(self) -> bool:
        """Returns whether the end of a single row may release samples that wait for a verdict."""
        return False

    def observe(self, entry: SampleEntry, *, grew: bool) -> None:  # noqa: B027 - a policy may learn nothing
        """Updates the policy with a committed row.

        Args:
            grew: whether the maximum length of the row's group has grown.
        """

    def forget(self, prompt: str) -> None:  # noqa: B027 - a policy may know nothing of prompts
        """Forgets a prompt whose samples were all released."""

    def evictions(self, worker: WorkerState) -> list[Suspend]:
        """Returns the commands that take rows out of a worker between two segments."""
        return []

    def limit(self, entry: SampleEntry, worker: WorkerState) -> RowLimit | None:
        """Returns the limit at which the policy must decide about a row again; None = no limit."""
        return None


class Probes:
    """Tracks the probe (first sample) of each prompt, and holds other samples back until the prompt has a verdict.

    A prompt with known lengths from an earlier epoch gets its verdict without a probe.
    """

    def __init__(self, context: SchedulingContext) -> None:
        self._context = context
        self.probe_uids: dict[str, str] = {}
        self.verdicts: dict[str, WorkerKind] = {}
        self.held_back: dict[str, list[str]] = {}

    def admit_or_hold_back(self, entry: SampleEntry) -> bool:
        """Returns whether the sample may run: it is a probe, or its prompt has a verdict. Otherwise holds it back."""
        is_new = entry.prompt not in self.probe_uids and entry.prompt not in self.verdicts
        if is_new and (known := self._context.known_verdict(entry.prompt)) is not None:
            self.set_verdict(entry.prompt, known)
        if entry.prompt in self.verdicts or self.probe_uids.setdefault(entry.prompt, entry.uid) == entry.uid:
            return True
        self.held_back.setdefault(entry.prompt, []).append(entry.uid)
        return False

    def is_probe(self, entry: SampleEntry) -> bool:
        return self.probe_uids.get(entry.prompt) == entry.uid

    def set_verdict(self, prompt: str, verdict: WorkerKind) -> list[str]:
        """Sets the verdict of a prompt and returns the uids of the samples held back until now."""
        if self.verdicts.get(prompt) != verdict:
            self.verdicts[prompt] = verdict
            self._context.new_verdicts.append(Verdict(prompt, verdict, self._context.threshold))
        return self.held_back.pop(prompt, [])

    def forget(self, prompt: str) -> None:
        self.probe_uids.pop(prompt, None)
        self.verdicts.pop(prompt, None)


def running_rows(context: SchedulingContext, worker: WorkerState) -> list[SampleEntry]:
    """Returns the entries of a worker's rows, all of which must be running."""
    entries = [context.samples[uid] for uid in worker.rows]
    assert all(entry.state is SampleState.RUNNING for entry in entries), "a row of the worker is not running"
    return entries
