"""The protocol between the scheduler and its executor: events go in, commands come out.

The executor (real workers, or the simulator of the tests) owns devices, threads and the clock. It passes each event to
the scheduler and carries out the commands that answer it, in their order:

1. It sends `WorkerJoined` for each worker, `Submitted` for samples, and `Closed` when no more samples will come. These
   may be mixed. More samples may be submitted before `Closed`, and samples that have ended may be `Released`.
2. A worker keeps its rows between segments and does nothing without a command. `Suspend` takes rows out of it.
   `RunSegment` puts rows in and decodes. A worker gets the next `RunSegment` only after its `SegmentEnded`.
3. `SegmentEnded` reports every row that the worker had in that segment. `Commit` answers it: only committed tokens
   count. Other tokens are discarded and drawn again; they are the same, because noise is keyed by position.
4. `WorkerLost` reports a worker that died, or was silent for longer than its lease. `Retire` answers it: later reports
   of that worker are ignored. It may join again, empty, under a name that was never used before.
5. `Finished` is sent once, after `Closed`, when every sample is done or dropped.

Events about workers may arrive late, twice or in another order. A lost worker's name, an old segment number and an old
epoch of a row change nothing. `at` is the executor's clock in seconds. It is recorded, and affects no decision unless
`rollout.pdsr.unit` is `seconds`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

WorkerKind = Literal["fast", "heavy"]
SampleRole = Literal["probe", "fast", "heavy", "any"]
"""Why a sample was admitted: as its prompt's probe, as expected to be short or long, or without expectation."""
AdmitMethod = Literal["prefill", "copy", "replay"]

FINISH_LENGTH = "length"
"""Finish reason of a sample that has as many tokens as allowed."""


@dataclass(frozen=True, slots=True)
class NewSample:
    uid: str
    """Unique in the life of a scheduler."""
    prompt: str
    """Uid of the prompt, which siblings share. What was learned about a prompt holds when it is submitted again."""
    index: int
    """Index among the siblings."""
    prompt_length: int
    max_new: int
    """Maximum number of tokens, at which the worker ends the sample with the finish `length`."""


@dataclass(frozen=True, slots=True)
class Submitted:
    at: float
    samples: tuple[NewSample, ...]
    """New samples; a known uid is skipped."""


@dataclass(frozen=True, slots=True)
class Released:
    """Makes the scheduler forget samples that were collected; unknown or unfinished samples are skipped.

    When the last sample of a prompt is forgotten, only the mean length of its samples is kept.
    """

    at: float
    uids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Closed:
    """Announces that no more samples will be submitted."""

    at: float


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    at: float
    worker: str
    kind: WorkerKind
    slots: int
    rungs: tuple[int, ...] = ()
    """Numbers of rows to which the worker can be compacted, ascending, without `slots` itself."""
    device: str | None = None
    """Device that this worker shares with others in turns; None: the worker has devices of its own."""

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise TypeError(f"a worker of {self.slots} slots")


@dataclass(frozen=True, slots=True)
class WorkerLost:
    at: float
    worker: str
    why: str


@dataclass(frozen=True, slots=True)
class RowReport:
    """The state of a row at the end of a segment."""

    uid: str
    epoch: int
    """Epoch of its `Admit`."""
    num_tokens: int
    """Length of the whole completion so far."""
    finish: str | None
    """`stop`, `length` or `dropped:<why>` (such as logits that are not finite); None for an unfinished row."""


@dataclass(frozen=True, slots=True)
class SegmentEnded:
    at: float
    worker: str
    segment: int
    """Number in the `RunSegment`."""
    rows: tuple[RowReport, ...]
    """Every row that the worker had; finished rows have left it."""
    seconds: float
    """Duration of the segment, with prefill and insertion."""
    steps: int
    """Number of decode steps."""


Event = Submitted | Released | Closed | WorkerJoined | WorkerLost | SegmentEnded


@dataclass(frozen=True, slots=True)
class Admit:
    uid: str
    epoch: int
    """Epoch to report with the row."""
    num_tokens: int
    """Number of committed tokens; 0 for a sample that starts."""
    how: AdmitMethod
    """How the cache is made. `prefill`: from the prompt and all committed tokens. `copy`: from the cache that `source`
    kept when it suspended the row. `replay`: prefill of the prompt, then the committed tokens through the decode
    program, which gives the same bits."""
    source: str | None
    """Worker that kept the cache, for `copy`; it may be the same worker."""
    role: SampleRole


@dataclass(frozen=True, slots=True)
class Suspend:
    """Takes rows out of a worker, which keeps their caches until they are admitted again or were truncated."""

    worker: str
    uids: tuple[str, ...]
    why: str
    """`probe limit`, `breaker`, `spread`, or `truncated`: the samples end here, and a `Commit` follows."""


@dataclass(frozen=True, slots=True)
class RunSegment:
    """Admits samples to a worker and decodes at most `length` tokens of each of its rows.

    The segment ends earlier when every row is done, when `leave_when_finished` rows have finished in it (samples wait
    for their slots), or when at most `leave_when_active` rows are active (a smaller program fits). 0 means never.
    """

    worker: str
    segment: int
    """Number of the segment on its worker, from 1."""
    admit: tuple[Admit, ...]
    length: int
    leave_when_finished: int
    leave_when_active: int


@dataclass(frozen=True, slots=True)
class CommittedRow:
    uid: str
    num_tokens: int
    """Number of tokens that count from now on."""
    finish: str | None
    """Finish reason of a complete or dropped sample; None: it continues."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Accepts the tokens of rows."""

    rows: tuple[CommittedRow, ...]


@dataclass(frozen=True, slots=True)
class Retire:
    """Stops a worker that may still run; its rows and the caches it kept are discarded."""

    worker: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Announces that every sample is done or dropped and no more will come."""


Command = Suspend | RunSegment | Commit | Retire | Finished


class EventRecord(NamedTuple):
    """One event and the commands with which the scheduler answered it."""

    event: Event
    commands: tuple[Command, ...]
