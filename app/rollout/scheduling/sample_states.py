"""The states of all samples. A sample has exactly one state, and its number of tokens never falls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from app.records.sample import DROPPED_PREFIX
from app.rollout.scheduling.protocol import NewSample, RowReport, SampleRole


class SampleState(StrEnum):
    NEW = "new"
    RUNNING = "running"
    """The sample is a row on a worker."""
    SUSPENDED = "suspended"
    """The sample has started, but is not on a worker."""
    ACTING = "acting"
    """The sample waits for its environment after a turn, and is not on a worker."""
    DONE = "done"
    DROPPED = "dropped"


WAITING = frozenset({SampleState.NEW, SampleState.SUSPENDED})
ENDED = frozenset({SampleState.DONE, SampleState.DROPPED})


@dataclass(slots=True)
class SampleEntry:
    """State of one sample; only `SampleTable` changes it."""

    sample: NewSample
    number: int
    """Position in the order of submission."""
    state: SampleState = SampleState.NEW
    worker: str | None = None
    """Name of the worker on which it runs; None if it does not run."""
    role: SampleRole = "any"
    """Role in which it was last admitted."""
    num_tokens: int = 0
    """Number of committed tokens."""
    seconds: float = 0.0
    """Decoding time by the executor's clock; in each segment, only the steps in which it took part count."""
    finish: str | None = None
    held_by: str | None = None
    """Name of the worker that keeps the cache of the suspended or acting row; None without a kept cache."""
    moves: int = 0
    """Number of times that it was suspended to move to another worker, except by `steal limit`."""

    @property
    def uid(self) -> str:
        return self.sample.uid

    @property
    def prompt(self) -> str:
        return self.sample.prompt

    @property
    def length(self) -> int:
        """Number of tokens of prompt and completion so far."""
        return self.sample.prompt_length + self.num_tokens


@dataclass
class SampleTable:
    """The entries of a rollout's samples, except forgotten ones, with uids as keys."""

    entries: dict[str, SampleEntry] = field(default_factory=dict)
    counts: Counter[SampleState] = field(default_factory=Counter)
    num_added: int = 0
    """Number of samples ever added, including forgotten ones."""

    def __getitem__(self, uid: str) -> SampleEntry:
        return self.entries[uid]

    def __iter__(self) -> Iterator[SampleEntry]:
        return iter(self.entries.values())

    @property
    def num_waiting(self) -> int:
        return self.counts[SampleState.NEW] + self.counts[SampleState.SUSPENDED]

    def add(self, sample: NewSample) -> SampleEntry:
        """Adds a sample and returns its entry."""
        assert sample.uid not in self.entries, f"{sample.uid} was submitted twice"
        entry = self.entries[sample.uid] = SampleEntry(sample, number=self.num_added)
        self.num_added += 1
        self.counts[SampleState.NEW] += 1
        return entry

    def start(self, entry: SampleEntry, worker: str, role: SampleRole = "any") -> None:
        """Makes the sample a row of the worker."""
        assert entry.state in WAITING, f"{entry.uid} is {entry.state} and cannot start"
        self._set_state(entry, SampleState.RUNNING)
        entry.worker, entry.role = worker, role
        entry.held_by = None

    def commit(self, worker: str, row: RowReport, *, seconds: float, steps: int) -> SampleEntry:
        """Commits a reported row, and returns its entry.

        Args:
            seconds: duration of the segment.
            steps: number of decode steps of the segment; the row is charged for those in which it took part.
        """
        entry = self.entries[row.uid]
        assert entry.worker == worker, f"{row.uid} is reported by {worker}, but is on {entry.worker}"
        assert row.num_tokens >= entry.num_tokens, f"{row.uid} has lost tokens"
        entry.seconds += seconds * min((row.num_tokens - entry.num_tokens) / max(steps, 1), 1.0)
        entry.num_tokens = row.num_tokens
        if row.finish is not None:
            self.end(entry, row.finish)
        elif row.turn_end is not None:
            self._set_state(entry, SampleState.ACTING)
            entry.worker, entry.held_by = None, worker if entry.num_tokens else None
        return entry

    def answer(self, uid: str, *, num_tokens: int, finish: str | None) -> SampleEntry:
        """Records the answer to the turn of an acting row, and returns its entry."""
        entry = self.entries[uid]
        assert entry.state is SampleState.ACTING, f"{uid} is {entry.state} and waits for no answer"
        entry.num_tokens = num_tokens
        if finish is not None:
            self.end(entry, finish)
        else:
            self._set_state(entry, SampleState.SUSPENDED if num_tokens else SampleState.NEW)
        return entry

    def suspend(self, entry: SampleEntry, *, held_by: str | None, is_move: bool) -> None:
        """Records that the row has left its worker, or was lost with it; the sample keeps its committed tokens.

        Args:
            held_by: name of the worker that keeps the cache; None = the cache is lost.
            is_move: whether this counts as a move of the sample.
        """
        assert entry.state is SampleState.RUNNING, f"{entry.uid} is {entry.state} and cannot leave a worker"
        self._set_state(entry, SampleState.SUSPENDED if entry.num_tokens else SampleState.NEW)
        entry.worker = None
        entry.held_by = held_by if entry.num_tokens else None
        entry.moves += is_move

    def forget_cache(self, entry: SampleEntry) -> None:
        """Records that the kept cache is lost or no longer needed."""
        entry.held_by = None

    def forget(self, entry: SampleEntry) -> None:
        """Removes an ended sample."""
        assert entry.state in ENDED, f"{entry.uid} is {entry.state} and cannot be forgotten"
        del self.entries[entry.uid]
        self.counts[entry.state] -= 1

    def end(self, entry: SampleEntry, finish: str) -> None:
        """Ends the sample with its current tokens."""
        self._set_state(entry, SampleState.DROPPED if finish.startswith(DROPPED_PREFIX) else SampleState.DONE)
        entry.finish = finish
        entry.worker = entry.held_by = None

    def _set_state(self, entry: SampleEntry, state: SampleState) -> None:
        assert entry.state not in ENDED, f"{entry.uid} has ended and cannot become {state}"
        self.counts[entry.state] -= 1
        self.counts[state] += 1
        entry.state = state
