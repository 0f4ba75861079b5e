"""Where every sample is: in exactly one state, under a fencing epoch, with tokens that only grow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from app.records.sample import DROPPED_PREFIX
from app.rollout.scheduling.events import FINISH_LENGTH, NewSample, RowReport


class SampleState(StrEnum):
    NEW = "new"
    RUNNING = "running"
    """A row of a worker, under the entry's epoch; what comes under another epoch is thrown away."""
    SUSPENDED = "suspended"
    """Begun, and in no worker."""
    DONE = "done"
    DROPPED = "dropped"


WAITING = frozenset({SampleState.NEW, SampleState.SUSPENDED})
ENDED = frozenset({SampleState.DONE, SampleState.DROPPED})


@dataclass(slots=True)
class SampleEntry:
    """One sample. Only the ledger changes it."""

    sample: NewSample
    number: int
    """In the order of submission."""
    state: SampleState = SampleState.NEW
    worker: str | None = None
    """Where it runs."""
    epoch: int = 0
    """How often it was admitted."""
    num_tokens: int = 0
    """Committed."""
    seconds: float = 0.0
    """That it was resident for, by the shell's clock."""
    finish: str | None = None
    held_by: str | None = None
    """The worker that keeps the cache of a suspended row."""
    moves: int = 0
    """How often it was suspended."""

    @property
    def uid(self) -> str:
        return self.sample.uid

    @property
    def prompt(self) -> str:
        return self.sample.prompt


@dataclass
class SampleTable:
    entries: dict[str, SampleEntry] = field(default_factory=dict)
    counts: Counter[SampleState] = field(default_factory=Counter)
    num_added: int = 0
    """Of all that were ever added, forgotten ones among them."""

    def __getitem__(self, uid: str) -> SampleEntry:
        return self.entries[uid]

    def __contains__(self, uid: str) -> bool:
        return uid in self.entries

    def __iter__(self) -> Iterator[SampleEntry]:
        return iter(self.entries.values())

    @property
    def num_waiting(self) -> int:
        return self.counts[SampleState.NEW] + self.counts[SampleState.SUSPENDED]

    @property
    def all_ended(self) -> bool:
        return self.counts[SampleState.DONE] + self.counts[SampleState.DROPPED] == len(self.entries)

    def add(self, sample: NewSample) -> SampleEntry | None:
        """The new entry; None for a uid that is known."""
        if sample.uid in self.entries:
            return None
        entry = self.entries[sample.uid] = SampleEntry(sample, number=self.num_added)
        self.num_added += 1
        self.counts[SampleState.NEW] += 1
        return entry

    def start(self, entry: SampleEntry, worker: str) -> None:
        """The sample becomes a row of the worker, under a new epoch."""
        assert entry.state in WAITING, f"{entry.uid} is {entry.state}, and was to start"
        self._set_state(entry, SampleState.RUNNING)
        entry.worker = worker
        entry.epoch += 1
        entry.held_by = None

    def commit(self, worker: str, row: RowReport, seconds: float) -> bool:
        """Takes over what a row has become; False, and no change, where the row is not the worker's any more."""
        entry = self.entries.get(row.uid)
        if entry is None or (entry.state, entry.worker, entry.epoch) != (SampleState.RUNNING, worker, row.epoch):
            return False
        if row.num_tokens < entry.num_tokens:
            return False
        entry.num_tokens = row.num_tokens
        entry.seconds += seconds
        if row.finish is not None:
            self._end(entry, row.finish)
        return True

    def suspend(self, entry: SampleEntry, *, held_by: str | None) -> None:
        """Takes the row out of its worker, as chosen."""
        self._to_waiting(entry)
        entry.held_by = held_by if entry.num_tokens else None
        entry.moves += 1

    def mark_lost(self, entry: SampleEntry) -> None:
        """The worker is gone; the sample is back at what was committed."""
        self._to_waiting(entry)

    def forget_cache(self, entry: SampleEntry) -> None:
        """Whoever kept it is gone."""
        entry.held_by = None

    def truncate(self, entry: SampleEntry) -> None:
        """The sample is complete as it stands."""
        self._end(entry, FINISH_LENGTH)

    def forget(self, entry: SampleEntry) -> None:
        """An ended sample; messages about it change nothing any more."""
        assert entry.state in ENDED, f"{entry.uid} is {entry.state}, and was to be forgotten"
        del self.entries[entry.uid]
        self.counts[entry.state] -= 1

    def _to_waiting(self, entry: SampleEntry) -> None:
        assert entry.state is SampleState.RUNNING, f"{entry.uid} is {entry.state}, and was to be suspended"
        self._set_state(entry, SampleState.SUSPENDED if entry.num_tokens else SampleState.NEW)
        entry.worker = None

    def _end(self, entry: SampleEntry, finish: str) -> None:
        self._set_state(entry, SampleState.DROPPED if finish.startswith(DROPPED_PREFIX) else SampleState.DONE)
        entry.finish = finish
        entry.worker = None

    def _set_state(self, entry: SampleEntry, state: SampleState) -> None:
        assert entry.state not in ENDED, f"{entry.uid} has ended, and was to become {state}"
        self.counts[entry.state] -= 1
        self.counts[state] += 1
        entry.state = state

    def check_invariants(self) -> None:
        """Raises AssertionError where an entry contradicts itself or the counts."""
        assert +self.counts == Counter(entry.state for entry in self), "counts differ from states"
        for entry in self:
            assert (entry.state is SampleState.RUNNING) == (entry.worker is not None), (
                f"{entry.uid}: worker while not running"
            )
            assert (entry.state in ENDED) == (entry.finish is not None), f"{entry.uid}: finish while not ended"
            assert entry.held_by is None or entry.state in WAITING, f"{entry.uid}: a kept cache while {entry.state}"
            assert 0 <= entry.num_tokens <= entry.sample.max_new, f"{entry.uid}: {entry.num_tokens} tokens"
            assert entry.state is not SampleState.SUSPENDED or entry.num_tokens, (
                f"{entry.uid}: suspended before it began"
            )
            assert entry.epoch or entry.state is SampleState.NEW, f"{entry.uid}: {entry.state} without being admitted"

    def to_json(self) -> dict[str, Any]:
        return {"num_added": self.num_added, "entries": [asdict(entry) for entry in self]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SampleTable:
        entries = [
            SampleEntry(**{**one, "sample": NewSample(**one["sample"]), "state": SampleState(one["state"])})
            for one in values["entries"]
        ]
        counts = Counter(entry.state for entry in entries)
        return cls({entry.uid: entry for entry in entries}, counts, values["num_added"])
