"""What a policy decides: which sample a worker takes next, and which rows leave it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, NamedTuple

from app.rollout.scheduling.events import SampleRole, WorkerKind
from app.rollout.scheduling.length_estimator import LengthEstimator
from app.rollout.scheduling.sample_states import SampleEntry, SampleState, SampleTable
from settings.schema.rollout import PdsrSettings


@dataclass(slots=True)
class WorkerState:
    name: str
    kind: WorkerKind
    slots: int
    rungs: tuple[int, ...]
    device: str | None = None
    rows: list[str] = field(default_factory=list)
    """Uids, in the order of admission."""
    segment: int = 0
    """The last one that was started."""
    is_busy: bool = False
    """In a segment."""
    num_carried: int = 0
    """Rows that it keeps from its last segment into the next."""

    @property
    def has_free_slot(self) -> bool:
        return len(self.rows) < self.slots

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> WorkerState:
        return cls(**{**values, "rungs": tuple(values["rungs"]), "rows": list(values["rows"])})


class Eviction(NamedTuple):
    uid: str
    why: str
    """As in `Suspend`; `truncated` ends the sample."""


@dataclass
class SchedulingContext:
    """What all policies see. Only the scheduler changes it."""

    samples: SampleTable
    workers: dict[str, WorkerState]
    """Alive, in the order of joining."""
    lengths: LengthEstimator
    pdsr: PdsrSettings
    threshold: float | None = None
    """Beyond which a sample is heavy, as of the last one that finished."""

    def measure(self, entry: SampleEntry) -> float:
        """How long a sample is so far, in the unit of the rules."""
        return entry.seconds if self.pdsr.unit == "seconds" else entry.num_tokens

    def expected_length(self, entry: SampleEntry) -> float:
        """How long it will be, as far as is known, in the unit of the rules. Earlier epochs know tokens only."""
        if self.pdsr.unit == "tokens":
            return self.lengths.estimate(entry)
        return max(self.lengths.group_measure.get(entry.prompt, 0.0), self.measure(entry))

    def is_over_limit(self, entry: SampleEntry, *, tokens: int, seconds: float) -> bool:
        """Whether a sample is past a limit."""
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
        """Whether work of a kind is the worker's: its own kind's, and that of a kind that has no worker left."""
        return worker.kind == kind or not self.has_worker(kind)

    def has_idle_slot(self, kind: WorkerKind) -> bool:
        return any(w.kind == kind and not w.is_busy and w.has_free_slot for w in self.workers.values())


class SchedulingPolicy(ABC):
    """Holds every sample that waits, and nothing about those that run. Deterministic."""

    name: ClassVar[str]
    refills: ClassVar[bool] = True
    """Whether workers look up between segments for samples that wait, and for smaller programs."""

    def __init__(self, context: SchedulingContext):
        self.context = context

    @abstractmethod
    def add(self, entry: SampleEntry) -> None:
        """A sample was submitted."""

    @abstractmethod
    def requeue(self, entry: SampleEntry) -> None:
        """A sample was suspended, or lost with its worker."""

    @abstractmethod
    def has_sample_for(self, worker: WorkerState) -> bool:
        """Whether `take` would give the worker a sample."""

    @abstractmethod
    def next_sample(self, worker: WorkerState) -> tuple[str, SampleRole] | None:
        """The sample that should start on a worker which has room; it waits no more."""

    @abstractmethod
    def waiting(self) -> list[str]:
        """Every sample that waits, held back or not; for checks."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Its state."""

    @abstractmethod
    def load_json(self, values: Mapping[str, Any]) -> None:
        """Takes over the state of another of its kind."""

    def observe(self, entry: SampleEntry, *, grew: bool) -> None:  # noqa: B027 - a policy may learn nothing
        """A row was committed; `grew` says that it made its group longer than any sibling had."""

    def forget(self, prompt: str) -> None:  # noqa: B027 - a policy may know nothing of prompts
        """No sample of the prompt is left; if it comes again, it is a new one."""

    def evictions(self, worker: WorkerState) -> list[Eviction]:
        """Rows that leave a worker between two segments."""
        return []

    def token_limit(self, entry: SampleEntry, worker: WorkerState) -> int | None:
        """Tokens at which it wants to look at the row again."""
        return None


class Probes:
    """One sample of each prompt, the first submitted, runs ahead; its siblings are held back until a verdict."""

    def __init__(self) -> None:
        self.probe_uids: dict[str, str] = {}
        self.verdicts: dict[str, WorkerKind] = {}
        self.held_back: dict[str, list[str]] = {}

    def admit_or_hold_back(self, entry: SampleEntry) -> bool:
        """Whether the sample may run: a probe, or one whose prompt has a verdict. Else it is held back from now on."""
        if entry.prompt in self.verdicts or self.probe_uids.setdefault(entry.prompt, entry.uid) == entry.uid:
            return True
        self.held_back.setdefault(entry.prompt, []).append(entry.uid)
        return False

    def is_probe(self, entry: SampleEntry) -> bool:
        return self.probe_uids.get(entry.prompt) == entry.uid

    def set_verdict(self, prompt: str, verdict: WorkerKind) -> list[str]:
        """Returns who was held back for it."""
        self.verdicts[prompt] = verdict
        return self.held_back.pop(prompt, [])

    def forget(self, prompt: str) -> None:
        self.probe_uids.pop(prompt, None)
        self.verdicts.pop(prompt, None)

    def waiting(self) -> list[str]:
        return [uid for uids in self.held_back.values() for uid in uids]

    def to_json(self) -> dict[str, Any]:
        held = {prompt: list(uids) for prompt, uids in self.held_back.items()}
        return {"uid_of": dict(self.probe_uids), "verdicts": dict(self.verdicts), "held": held}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Probes:
        probes = cls()
        probes.probe_uids, probes.verdicts = dict(values["uid_of"]), dict(values["verdicts"])
        probes.held_back = {prompt: list(uids) for prompt, uids in values["held"].items()}
        return probes


def running_rows(context: SchedulingContext, worker: WorkerState) -> list[SampleEntry]:
    entries = [context.samples[uid] for uid in worker.rows]
    assert all(entry.state is SampleState.RUNNING for entry in entries), "a row that does not run"
    return entries
