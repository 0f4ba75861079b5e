"""The protocol between the scheduler and its executor: the scheduler answers events with commands.

The executor (real workers, or the simulator of the tests) owns devices, threads and the clock. It passes each event to
the scheduler and carries out the commands that answer it, in order:

1. It sends `WorkerJoined` for each worker, `Submitted` for samples, and `Closed` when no more samples will come, in
   any order. More samples may be submitted before `Closed`, and samples that have ended may be `Released`.
2. A worker keeps its rows between segments and does nothing without a command. `Suspend` takes rows out of it.
   `RunSegment` puts rows in and decodes. A worker gets the next `RunSegment` only after its `SegmentEnded`.
3. `SegmentEnded` reports every row that the worker had in that segment. From then on their tokens are committed, and
   the executor gives finished samples to the caller and finished turns to environments.
4. A row whose turn has ended is reported with `turn_end`. It has left its slot, but its worker keeps its cache. Its
   environment answers once, at any later time, which `Answered` reports. The sample then ends or continues. If it
   continues, its worker takes it back with `resume` as soon as it is idle and has a free slot, before other samples. If
   it is admitted in any other way, the kept cache is no longer needed. A worker without rows needs no command to wait.
5. `WorkerLost` reports a worker whose process died with its rows and the caches that it kept. It sends no further
   events. Its rows continue on other workers from their committed tokens; the next tokens are the same, because PRNG
   keys depend on the position.

`at` is the time in seconds by the executor's clock; it is recorded, but no decision depends on it unless
`rollout.pdsr.unit` is `seconds`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from app.rollout.scheduling.segment_limits import SegmentLimits

WorkerKind = Literal["fast", "heavy"]
SampleRole = Literal["probe", "fast", "heavy", "any"]
"""Role of an admitted sample: `probe` of its prompt, expected to be short (`fast`) or long (`heavy`), or `any`."""
AdmitMethod = Literal["recompute", "copy", "resume"]

FINISH_LENGTH = "length"
"""Finish reason of a sample that has reached its maximum number of tokens."""


@dataclass(frozen=True, slots=True)
class NewSample:
    uid: str
    """Unique during the lifetime of a scheduler."""
    prompt: str
    """Uid of the prompt. Lengths learned for a prompt are used when it is submitted again."""
    index: int
    """Index among the samples of the prompt."""
    prompt_length: int
    max_new: int
    """Maximum number of tokens, at which the worker ends the sample with finish reason `length`."""


@dataclass(frozen=True, slots=True)
class Submitted:
    at: float
    samples: tuple[NewSample, ...]


@dataclass(frozen=True, slots=True)
class Released:
    """Makes the scheduler forget samples that have ended.

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
    rungs: tuple[int, ...]
    """Batch sizes of its smaller decode programs, ascending, without `slots`."""
    device: str | None
    """Name of a device on which it takes turns with other workers; None = the worker has its own devices."""
    capacity: int
    """Number of tokens that its KV cache holds."""
    max_length: int | None
    """Maximum length of prompt plus completion in its slots, longer than any prompt; None = any sample fits."""
    keeps_caches: bool
    """Whether caches of suspended rows are kept, for use by any worker; otherwise they are recomputed."""


@dataclass(frozen=True, slots=True)
class WorkerLost:
    at: float
    worker: str


@dataclass(frozen=True, slots=True)
class RowReport:
    """The state of a row at the end of a segment, or when its last turn has been answered."""

    uid: str
    num_tokens: int
    """Length of the whole completion so far, observations included."""
    finish: str | None
    """`stop`, `length` or `dropped:<why>` (such as non-finite logits); None for an unfinished row."""
    turn_end: str | None = None
    """How the turn ended, `stop` or `length`, if the environment must answer; `finish` is then None."""


@dataclass(frozen=True, slots=True)
class SegmentEnded:
    at: float
    worker: str
    rows: tuple[RowReport, ...]
    """All rows that the worker had. Those that are finished or have ended a turn have left it."""
    seconds: float
    """Duration of the segment, including prefill and insertion."""
    steps: int
    """Number of decode steps."""


@dataclass(frozen=True, slots=True)
class Answered:
    """Reports that environments have answered turns; each of these samples then ends or continues."""

    at: float
    rows: tuple[RowReport, ...]
    """All answers that have arrived. They are reported together, because the first one starts a segment on an idle
    worker, and later ones would have to wait for its end."""


Event = Submitted | Released | Closed | WorkerJoined | WorkerLost | SegmentEnded | Answered


@dataclass(frozen=True, slots=True)
class Admit:
    uid: str
    num_tokens: int
    """Number of committed tokens; 0 for a sample that has not started."""
    how: AdmitMethod
    """How the row gets its cache. `recompute`: from the prompt and all committed tokens. `copy`: from the cache kept at
    suspension. `resume`: from the cache that this worker kept while the environment answered, plus the tokens of the
    observation."""
    role: SampleRole


@dataclass(frozen=True, slots=True)
class Suspend:
    """Takes a row out of a worker, which keeps the row's cache if it `keeps_caches` and the sample continues."""

    worker: str
    uid: str
    why: str
    """`row limit` (it no longer fits the slots), `probe limit`, `breaker`, `steal limit`, `spread`, or `truncated` (the
    sample ends)."""


@dataclass(frozen=True, slots=True)
class RunSegment:
    """Admits samples to a worker and decodes its rows until a limit is reached or all are done.

    A row whose turn has ended counts as finished.
    """

    worker: str
    admit: tuple[Admit, ...]
    limits: SegmentLimits


@dataclass(frozen=True, slots=True)
class Verdict:
    """Reports whether P-DSR will run the samples of a prompt on fast or on heavy workers; recorded, never executed."""

    prompt: str
    kind: WorkerKind
    threshold: float | None
    """Length above which a prompt is heavy, in `rollout.pdsr.unit`; None if too few samples have finished."""


Command = Suspend | RunSegment | Verdict


class EventRecord(NamedTuple):
    """One event and the commands with which the scheduler answered it."""

    event: Event
    commands: tuple[Command, ...]
