"""The contract between the scheduler and whatever runs it: events go in, commands come out.

A shell (real workers, or the virtual clock) owns devices, threads and the clock. It tells the scheduler what happened
and does what the answer says, in its order:

1. `WorkerJoined` for each worker, `Submitted` for samples, and `Closed` once no more will come. These may be mixed;
   more samples may be submitted at any time before `Closed`, and samples that have ended may be `Released`.
2. A worker holds its rows between segments and does nothing unless told. `Suspend` takes rows out of it, `RunSegment`
   puts rows in and decodes. A worker gets no second `RunSegment` before its `SegmentEnded` was handled.
3. `SegmentEnded` reports every row that the worker held in that segment. `Commit` answers it: only then do tokens
   count. What was not committed is thrown away; it will be drawn again, the same, because noise is keyed by position.
4. A worker that died, or is silent for longer than its lease (the shell's choice; three times what the segment should
   take is usual), is `WorkerLost`. `Retire` answers: nothing that it still says counts. It may come back empty, under a
   name that was never used before.
5. `Finished` comes once: after `Closed`, when every sample is done or dropped.

Messages about workers may come late, twice or in another order: a name that is gone, a segment number that is not the
current one and an epoch that is not the row's change nothing. `at` is the shell's clock in seconds; it is recorded, and
decides nothing unless `rollout.pdsr.unit` is `seconds`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

WorkerKind = Literal["fast", "heavy"]
SampleRole = Literal["probe", "fast", "heavy", "any"]
"""Why a row was admitted: to learn about its prompt, as one that is expected to be short or long, or as any other."""
AdmitMethod = Literal["prefill", "copy", "replay"]

FINISH_LENGTH = "length"
"""The finish of a sample that ends because no more tokens are allowed."""


@dataclass(frozen=True, slots=True)
class NewSample:
    uid: str
    """Never used twice in the life of a scheduler."""
    prompt: str
    """What siblings share. The same prompt submitted again is the same prompt: what was learned about it holds."""
    index: int
    """Among the siblings."""
    prompt_length: int
    max_new: int
    """Tokens it may have; the worker ends it there with the finish `length`."""


@dataclass(frozen=True, slots=True)
class Submitted:
    at: float
    samples: tuple[NewSample, ...]
    """A uid that is known already is passed over."""


@dataclass(frozen=True, slots=True)
class Released:
    """These samples have been taken and are forgotten; one that has not ended, or is not known, is passed over.

    With its last sample a prompt becomes one of an earlier epoch: all that is remembered is how long its samples were.
    """

    at: float
    uids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Closed:
    """Nothing more will be submitted."""

    at: float


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    at: float
    worker: str
    kind: WorkerKind
    slots: int
    rungs: tuple[int, ...] = ()
    """Numbers of rows that the worker can be compacted to, ascending, without `slots` itself."""
    device: str | None = None
    """Workers with the same one take turns on it; None: devices of its own."""

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
    """What a row has become."""

    uid: str
    epoch: int
    """As it was admitted with."""
    num_tokens: int
    """Of the whole completion so far."""
    finish: str | None
    """`stop`, `length`, `dropped:<why>` (as for logits that are not finite), or None for a row that goes on."""


@dataclass(frozen=True, slots=True)
class SegmentEnded:
    at: float
    worker: str
    segment: int
    """Of the `RunSegment`."""
    rows: tuple[RowReport, ...]
    """Every row that the worker held; those with a finish have left it."""
    seconds: float
    """From the start of the segment, prefill and insertion included."""
    steps: int
    """Decode steps that it ran."""


Event = Submitted | Released | Closed | WorkerJoined | WorkerLost | SegmentEnded


@dataclass(frozen=True, slots=True)
class Admit:
    uid: str
    epoch: int
    """To be reported with the row."""
    num_tokens: int
    """Committed; 0 for a sample that starts."""
    how: AdmitMethod
    """`prefill` of the prompt and all committed tokens; `copy` of the cache that `source` kept when it suspended the
    row (which may be the same worker); `replay`: prefill of the prompt, then the committed tokens through the decode
    program, so that every bit is as it was."""
    source: str | None
    """Only for `copy`."""
    role: SampleRole


@dataclass(frozen=True, slots=True)
class Suspend:
    """The worker takes rows out, and keeps the cache of each until it is admitted again, unless it was truncated."""

    worker: str
    uids: tuple[str, ...]
    why: str
    """`probe limit`, `breaker`, `spread`, or `truncated`: it ends here, a `Commit` follows."""


@dataclass(frozen=True, slots=True)
class RunSegment:
    """Put `admit` in, then decode at most `length` tokens of each row the worker holds, and report `SegmentEnded`.

    It ends earlier when every row is done; when `leave_when_finished` rows have finished in this segment (work is
    waiting for their slots); or when at most `leave_when_active` rows are active (a smaller program fits). 0 = never.
    """

    worker: str
    segment: int
    """1, 2, ... of the worker."""
    admit: tuple[Admit, ...]
    length: int
    leave_when_finished: int
    leave_when_active: int


@dataclass(frozen=True, slots=True)
class CommittedRow:
    uid: str
    num_tokens: int
    """These tokens are the sample's."""
    finish: str | None
    """The sample is complete, or dropped; None: it goes on."""


@dataclass(frozen=True, slots=True)
class Commit:
    rows: tuple[CommittedRow, ...]


@dataclass(frozen=True, slots=True)
class Retire:
    """Stop the worker, if it still runs, and forget its rows and the caches it kept."""

    worker: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Every sample is done or dropped, and no more will come."""


Command = Suspend | RunSegment | Commit | Retire | Finished

_MESSAGES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(Submitted, Released, Closed, WorkerJoined, WorkerLost, SegmentEnded),
        *(Suspend, RunSegment, Commit, Retire, Finished),
    )
}

MAX_NUMBER = 2**32
"""Of the numbers in a message: tokens, steps, seconds."""


def message_to_json(message: Event | Command) -> dict[str, Any]:
    """What `json.dumps` takes; `type` says which message it is."""
    return {"type": type(message).__name__, **fields_to_json(message)}


def fields_to_json(message: Any) -> dict[str, Any]:
    """Its fields by name, those of items inside as well."""
    found = {}
    for field in fields(message):
        value = getattr(message, field.name)
        if isinstance(value, tuple):
            value = [fields_to_json(item) if is_dataclass(item) else item for item in value]
        found[field.name] = value
    return found


def message_from_json(values: Mapping[str, Any]) -> Any:
    """The message that `to_json` wrote.

    Raises:
        KeyError, TypeError: no such message, or not its fields.
    """
    kind = _MESSAGES[values["type"]]
    return _build_message(kind, {name: value for name, value in values.items() if name != "type"})


def _build_message(kind: type, values: Mapping[str, Any]) -> Any:
    hints = _type_hints(kind)
    return kind(
        **{name: _convert_value(value, hints[name], f"{kind.__name__}.{name}") for name, value in values.items()}
    )


_type_hints = functools.cache(get_type_hints)


def _convert_value(value: Any, hint: Any, where: str) -> Any:
    """A value of JSON as a field has it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is tuple and isinstance(value, list):
        return tuple(_convert_value(item, arguments[0], where) for item in value)
    if is_dataclass(hint) and isinstance(value, dict):
        return _build_message(cast(type, hint), value)
    kinds = arguments if origin is UnionType else (hint,)
    if origin is Literal:
        fits = value in arguments
    elif type(value) in (int, float):
        fits = (type(value) in kinds or float in kinds) and 0 <= value <= MAX_NUMBER
    else:
        fits = type(value) in kinds
    if not fits:
        raise TypeError(f"{where}: got {value!r}")
    return value
