"""The interface of scheduling policies: which sample a worker takes next, and which rows leave it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from app.rollout.scheduling.length_estimator import LengthEstimator
from app.rollout.scheduling.protocol import DEFAULT_CAPACITY, SampleRole, WorkerKind
from app.rollout.scheduling.sample_states import SampleEntry, SampleState, SampleTable
from settings.schema.rollout import PdsrSettings


@dataclass(slots=True)
class WorkerState:
    """A worker as the scheduler sees it."""

    name: str
    kind: WorkerKind
    slots: int
    rungs: tuple[int, ...]
    device: str | None = None
    capacity: int = DEFAULT_CAPACITY
    rows: list[str] = field(default_factory=list)
    """Uids in the order of admission."""
    segment: int = 0
    """Number of the last segment started."""
    is_busy: bool = False
    """Whether a segment is running."""
    num_carried: int = 0
    """Number of rows kept from the last segment."""

    @property
    def has_free_slot(self) -> bool:
        return len(self.rows) < self.slots


class Eviction(NamedTuple):
    """A row to take out of its worker."""

    uid: str
    why: str
    """Reason as in `Suspend`; `truncated` ends the sample."""


@dataclass
class SchedulingContext:
    """State that all policies read and only the scheduler changes."""

    samples: SampleTable
    workers: dict[str, WorkerState]
    """Live workers, in the order of joining."""
    lengths: LengthEstimator
    pdsr: PdsrSettings
    threshold: float | None = None
    """Length above which a sample is heavy; updated when a sample finishes."""

    def measure(self, entry: SampleEntry) -> float:
        """Returns the length of a sample so far, in `rollout.pdsr.unit`."""
        return entry.seconds if self.pdsr.unit == "seconds" else entry.num_tokens

    def expected_length(self, entry: SampleEntry) -> float:
        """Returns the expected length in `rollout.pdsr.unit`. The history of earlier epochs is in tokens only."""
        if self.pdsr.unit == "tokens":
            return self.lengths.estimate(entry)
        return max(self.lengths.group_measure.get(entry.prompt, 0.0), self.measure(entry))

    def is_over_limit(self, entry: SampleEntry, *, tokens: int, seconds: float) -> bool:
        """Returns whether a sample has reached a limit."""
        return entry.num_tokens >= tokens or (self.pdsr.unit == "seconds" and entry.seconds >= seconds)

    def update_threshold(self) -> None:
        running = [
            self.measure(entry) for w in self.workers.values() for entry in map(self.samples.__getitem__, w.rows)
        ]
        self.threshold = self.lengths.threshold(
            running, percentile=self.pdsr.percentile, min_finished=self.pdsr.window_min
        )

    def has_worker(self, kind: WorkerKind) -> bool:
        return any(worker.kind == kind for worker in self.workers.values())

    def serves(self, worker: WorkerState, kind: WorkerKind) -> bool:
        """Returns whether the worker serves a kind of work: its own kind, or a kind without workers."""
        return worker.kind == kind or not self.has_worker(kind)

    def has_idle_slot(self, kind: WorkerKind) -> bool:
        return any(w.kind == kind and not w.is_busy and w.has_free_slot for w in self.workers.values())


class SchedulingPolicy(ABC):
    """Queues the waiting samples. A policy must be deterministic."""

    name: ClassVar[str]
    refills: ClassVar[bool] = True
    """Whether segments end early to admit waiting samples or to use smaller programs."""

    def __init__(self, context: SchedulingContext):
        self.context = context

    @abstractmethod
    def add(self, entry: SampleEntry) -> None:
        """Queues a submitted sample."""

    @abstractmethod
    def requeue(self, entry: SampleEntry) -> None:
        """Queues a sample that was suspended, or lost with its worker."""

    @abstractmethod
    def has_sample_for(self, worker: WorkerState) -> bool:
        """Returns whether `next_sample` would give the worker a sample."""

    @abstractmethod
    def next_sample(self, worker: WorkerState) -> tuple[str, SampleRole] | None:
        """Removes and returns the next sample for a worker with a free slot; None if it gets none."""

    @abstractmethod
    def waiting(self) -> list[str]:
        """Returns all waiting samples, including those held back, for the invariant checks."""

    def observe(self, entry: SampleEntry, *, grew: bool) -> None:  # noqa: B027 - a policy may learn nothing
        """Learns from a committed row; `grew`: its group's maximum length has grown."""

    def forget(self, prompt: str) -> None:  # noqa: B027 - a policy may know nothing of prompts
        """Forgets a prompt whose samples were all released."""

    def evictions(self, worker: WorkerState) -> list[Eviction]:
        """Returns the rows that should leave a worker between two segments."""
        return []

    def token_limit(self, entry: SampleEntry, worker: WorkerState) -> int | None:
        """Returns the number of tokens at which the policy must look at the row again; None = no limit."""
        return None


class Probes:
    """Tracks the probe of each prompt, its first sample; holds siblings back until the prompt has a verdict."""

    def __init__(self) -> None:
        self.probe_uids: dict[str, str] = {}
        self.verdicts: dict[str, WorkerKind] = {}
        self.held_back: dict[str, list[str]] = {}

    def admit_or_hold_back(self, entry: SampleEntry) -> bool:
        """Returns whether the sample may run: a probe, or one whose prompt has a verdict. Otherwise holds it back."""
        if entry.prompt in self.verdicts or self.probe_uids.setdefault(entry.prompt, entry.uid) == entry.uid:
            return True
        self.held_back.setdefault(entry.prompt, []).append(entry.uid)
        return False

    def is_probe(self, entry: SampleEntry) -> bool:
        return self.probe_uids.get(entry.prompt) == entry.uid

    def set_verdict(self, prompt: str, verdict: WorkerKind) -> list[str]:
        """Sets the verdict of a prompt and returns the samples held back until now."""
        self.verdicts[prompt] = verdict
        return self.held_back.pop(prompt, [])

    def forget(self, prompt: str) -> None:
        self.probe_uids.pop(prompt, None)
        self.verdicts.pop(prompt, None)

    def waiting(self) -> list[str]:
        return [uid for uids in self.held_back.values() for uid in uids]


def running_rows(context: SchedulingContext, worker: WorkerState) -> list[SampleEntry]:
    """Returns the samples running on a worker."""
    entries = [context.samples[uid] for uid in worker.rows]
    assert all(entry.state is SampleState.RUNNING for entry in entries), "a row of the worker is not running"
    return entries
