"""What a policy decides: which sample a worker takes next, and which rows leave it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, NamedTuple

from app.rollout.scheduling.events import Kind, Role
from app.rollout.scheduling.length_estimator import Lengths
from app.rollout.scheduling.sample_states import Entry, Ledger, State
from settings.schema.rollout import Pdsr


@dataclass(slots=True)
class Worker:
    name: str
    kind: Kind
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
    def has_room(self) -> bool:
        return len(self.rows) < self.slots

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Worker:
        return cls(**{**values, "rungs": tuple(values["rungs"]), "rows": list(values["rows"])})


class Eviction(NamedTuple):
    uid: str
    why: str
    """As in `Suspend`; `truncated` ends the sample."""


@dataclass
class Context:
    """What all policies see. Only the scheduler changes it."""

    ledger: Ledger
    workers: dict[str, Worker]
    """Alive, in the order of joining."""
    lengths: Lengths
    rules: Pdsr
    threshold: float | None = None
    """Beyond which a sample is heavy, as of the last one that finished."""

    def measure(self, entry: Entry) -> float:
        """How long a sample is so far, in the unit of the rules."""
        return entry.seconds if self.rules.unit == "seconds" else entry.num_tokens

    def expected(self, entry: Entry) -> float:
        """How long it will be, as far as is known, in the unit of the rules. Earlier epochs know tokens only."""
        if self.rules.unit == "tokens":
            return self.lengths.estimate(entry)
        return max(self.lengths.group_measure.get(entry.prompt, 0.0), self.measure(entry))

    def over(self, entry: Entry, *, tokens: int, seconds: float) -> bool:
        """Whether a sample is past a limit."""
        return entry.num_tokens >= tokens or (self.rules.unit == "seconds" and entry.seconds >= seconds)

    def update_threshold(self) -> None:
        running = [self.measure(entry) for w in self.workers.values() for entry in map(self.ledger.__getitem__, w.rows)]
        self.threshold = self.lengths.threshold(
            running, percentile=self.rules.percentile, min_finished=self.rules.window_min
        )

    def has(self, kind: Kind) -> bool:
        return any(worker.kind == kind for worker in self.workers.values())

    def serves(self, worker: Worker, kind: Kind) -> bool:
        """Whether work of a kind is the worker's: its own kind's, and that of a kind that has no worker left."""
        return worker.kind == kind or not self.has(kind)

    def has_idle_room(self, kind: Kind) -> bool:
        return any(w.kind == kind and not w.is_busy and w.has_room for w in self.workers.values())


class Policy(ABC):
    """Holds every sample that waits, and nothing about those that run. Deterministic."""

    name: ClassVar[str]
    refills: ClassVar[bool] = True
    """Whether workers look up between segments for samples that wait, and for smaller programs."""

    def __init__(self, context: Context):
        self.context = context

    @abstractmethod
    def add(self, entry: Entry) -> None:
        """A sample was submitted."""

    @abstractmethod
    def give_back(self, entry: Entry) -> None:
        """A sample was suspended, or lost with its worker."""

    @abstractmethod
    def offers(self, worker: Worker) -> bool:
        """Whether `take` would give the worker a sample."""

    @abstractmethod
    def take(self, worker: Worker) -> tuple[str, Role] | None:
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

    def observe(self, entry: Entry, *, grew: bool) -> None:  # noqa: B027 - a policy may learn nothing
        """A row was committed; `grew` says that it made its group longer than any sibling had."""

    def forget(self, prompt: str) -> None:  # noqa: B027 - a policy may know nothing of prompts
        """No sample of the prompt is left; if it comes again, it is a new one."""

    def evictions(self, worker: Worker) -> list[Eviction]:
        """Rows that leave a worker between two segments."""
        return []

    def limit(self, entry: Entry, worker: Worker) -> int | None:
        """Tokens at which it wants to look at the row again."""
        return None


class Probes:
    """One sample of each prompt, the first submitted, runs ahead; its siblings are held back until a verdict."""

    def __init__(self) -> None:
        self.uid_of: dict[str, str] = {}
        self.verdicts: dict[str, Kind] = {}
        self.held: dict[str, list[str]] = {}

    def admits(self, entry: Entry) -> bool:
        """Whether the sample may run: a probe, or one whose prompt has a verdict. Else it is held back from now on."""
        if entry.prompt in self.verdicts or self.uid_of.setdefault(entry.prompt, entry.uid) == entry.uid:
            return True
        self.held.setdefault(entry.prompt, []).append(entry.uid)
        return False

    def is_probe(self, entry: Entry) -> bool:
        return self.uid_of.get(entry.prompt) == entry.uid

    def judge(self, prompt: str, verdict: Kind) -> list[str]:
        """Returns who was held back for it."""
        self.verdicts[prompt] = verdict
        return self.held.pop(prompt, [])

    def forget(self, prompt: str) -> None:
        self.uid_of.pop(prompt, None)
        self.verdicts.pop(prompt, None)

    def waiting(self) -> list[str]:
        return [uid for uids in self.held.values() for uid in uids]

    def to_json(self) -> dict[str, Any]:
        held = {prompt: list(uids) for prompt, uids in self.held.items()}
        return {"uid_of": dict(self.uid_of), "verdicts": dict(self.verdicts), "held": held}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Probes:
        probes = cls()
        probes.uid_of, probes.verdicts = dict(values["uid_of"]), dict(values["verdicts"])
        probes.held = {prompt: list(uids) for prompt, uids in values["held"].items()}
        return probes


def running_rows(context: Context, worker: Worker) -> list[Entry]:
    entries = [context.ledger[uid] for uid in worker.rows]
    assert all(entry.state is State.RUNNING for entry in entries), "a row that does not run"
    return entries
