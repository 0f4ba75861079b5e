"""What a scheduler was told and what it answered, as JSON Lines that can be replayed, and what was drawn meanwhile.

The first line is a header: the format, what the run is known by, and the scheduler before its first event. Each other
line is an event, the commands that answered it and, of every row that these commit, the tokens drawn since its last
commit: base64 of little-endian int32 [3, tokens], which are ids and the bits of two float32, their logprobs and the
logs of their kept mass.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from app.records.atomic_write import open_atomic
from app.records.file_lock import open_locked
from app.records.jsonl import parse_object
from app.rollout.scheduling.events import Command, Event, message_from_json, message_to_json
from app.rollout.scheduling.scheduler import Scheduler
from settings.errors import InputError

FORMAT = "grpo-rollout-log/1"
TOKEN_DTYPE = np.dtype("<i4")
PARSE_ERRORS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError)
"""What comes of values that no scheduler has written."""
MAX_SHOWN_CHARS = 40
"""Characters of a value in an error; what is longer is a hash."""

RunIdentity = Mapping[str, Any]
"""What tells a run from others, by name: whatever decides its samples. Values as JSON has them."""


class EventRecord(NamedTuple):
    event: Event
    commands: tuple[Command, ...]


@dataclass(frozen=True)
class RolloutState:
    """A rollout as far as it has come."""

    initial_snapshot: Mapping[str, Any]
    """The scheduler's snapshot before the first event."""
    scheduler: Scheduler
    """After the last."""
    records: list[EventRecord] = field(default_factory=list)
    committed_tokens: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """Uid -> int32 [3, tokens] of each commit: all that was."""

    @classmethod
    def new(cls, scheduler: Scheduler) -> RolloutState:
        """With nothing yet."""
        return cls(scheduler.snapshot(), scheduler)

    @property
    def last_event_s(self) -> float:
        """Of the last event, by the clock of the rollout."""
        return self.records[-1].event.at if self.records else 0.0


class EventLog:
    """The log of a rollout while it runs, and of one that was killed.

    No other process can open it meanwhile. As a context it closes; a log that holds nothing goes away.

    Raises:
        InputError: another process has it open, it cannot be written, it is damaged, of another run, or no log.
    """

    def __init__(self, path: Path, *, identity: RunIdentity):
        self.path = path
        self._identity = identity
        self._state: RolloutState | None = None
        with ExitStack() as stack:
            self._file = stack.enter_context(open_locked(path, command="rollout"))
            if _lacks_header(path):
                self._file.seek(0)
                self._file.truncate()
            else:
                self._state, num_bytes = _replay_log(path, identity=identity)
                _check_committed_tokens(self._state, path)
                self._truncate(num_bytes)
            stack.pop_all()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._file.closed:
            if self._file.tell() == 0:
                self.path.unlink()
            self._file.close()

    @property
    def state(self) -> RolloutState | None:
        """What a rollout that was killed left here."""
        return self._state

    def start_or_resume(self, scheduler: Scheduler) -> RolloutState:
        """Where the rollout stands; with `scheduler`, before its first event, if it is a new one."""
        if self._state is None:
            self._state = RolloutState.new(scheduler)
            self._write({"format": FORMAT, "run": self._identity, "scheduler": self._state.initial_snapshot})
        return self._state

    def append(self, record: EventRecord, tokens_by_uid: Mapping[str, np.ndarray]) -> None:
        """It is in the file when this returns: the process may be killed, though not the machine.

        Args:
            drawn: uid -> int32 [3, tokens] of what the record commits.
        """
        said = {"event": message_to_json(record.event), "commands": [message_to_json(one) for one in record.commands]}
        self._write(
            said
            | (
                {"drawn": {uid: _encode_tokens(tokens) for uid, tokens in tokens_by_uid.items()}}
                if tokens_by_uid
                else {}
            )
        )

    def finish(self, *, keep: Path | None = None) -> None:
        """The samples are where they should be: the log goes away, or is moved to `keep`, which may be where it is."""
        if keep is not None and keep.resolve() == self.path.resolve():
            self._file.close()
            return
        if keep is not None:
            with self.path.open("rb") as source, open_atomic(keep) as target:
                shutil.copyfileobj(source, target)
        self.path.unlink()
        self._file.close()

    def _truncate(self, num_bytes: int) -> None:
        """Takes off what was being written when the process was killed."""
        self._file.truncate(num_bytes)
        with self.path.open("rb") as file:
            file.seek(num_bytes - 1)
            if file.read() != b"\n":
                self._file.write(b"\n")
        self._file.flush()

    def _write(self, values: Mapping[str, Any]) -> None:
        self._file.write(_encode_line(values))
        self._file.flush()


def is_event_log(path: Path) -> bool:
    """Whether it is a file that begins as one."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_HEADER_PREFIX)) == _HEADER_PREFIX


_HEADER_PREFIX = b'{"format": "grpo-rollout-log/'


def _lacks_header(path: Path) -> bool:
    """Whether it is empty, or the process was killed while it wrote the header."""
    with path.open("rb") as file:
        line = file.readline()
    if line.endswith(b"\n") or not (line.startswith(_HEADER_PREFIX) or _HEADER_PREFIX.startswith(line)):
        return False
    try:
        parse_object(line, "")
    except InputError:
        return True
    return False


def read_event_log(path: Path, *, identity: RunIdentity | None = None) -> RolloutState:
    """What it tells, replayed. A last line that was cut off by a crash is left out.

    To go on after a crash, tell the scheduler that its workers are lost, and of new ones.

    Args:
        run: whose it must be; None: any.

    Raises:
        InputError: no log, one of another run, a line that is none; or the scheduler answers otherwise than it did: the
            program has changed since.
    """
    return _replay_log(path, identity=identity)[0]


def _replay_log(path: Path, *, identity: RunIdentity | None) -> tuple[RolloutState, int]:
    """Also the bytes of its whole lines."""
    lines = _read_lines(path)
    _, num_bytes, header = next(lines)
    if header.get("format") != FORMAT:
        raise _not_a_log(path, repr(header.get("format")))
    try:
        known, start = header["run"], header["scheduler"]
        begun = RolloutState(start, Scheduler.restore(start))
    except PARSE_ERRORS as error:
        raise _damaged_log(f"{path}:1", f"no header of an event log: {error!r}") from None
    if identity is not None and known != identity:
        raise InputError(_other_run_message(path, known, identity))
    for line in lines:
        where = f"{path}:{line.number}"
        try:
            record = EventRecord(
                message_from_json(line.values["event"]), tuple(map(message_from_json, line.values["commands"]))
            )
            answer = tuple(begun.scheduler.handle(record.event))
            for uid, text in line.values.get("drawn", {}).items():
                begun.committed_tokens.setdefault(uid, []).append(_decode_tokens(text))
        except PARSE_ERRORS as error:
            raise _damaged_log(where, f"no record of an event log: {error!r}") from None
        if answer != record.commands:
            raise InputError(
                f"{where}: this program answers {type(record.event).__name__} otherwise than the one that wrote it; "
                "finish the rollout with that one, or delete the file to start over"
            )
        begun.records.append(record)
        num_bytes = line.end
    return begun, num_bytes


class _LogLine(NamedTuple):
    number: int
    end: int
    """Bytes of the file up to here."""
    values: dict[str, Any]


def _read_lines(path: Path) -> Iterator[_LogLine]:
    """At least one."""
    broken, number, end = None, 0, 0
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if broken is not None:
                    raise _not_a_log(path, "something else") if number == 2 else broken
                end += len(raw)
                try:
                    yield _LogLine(number, end, parse_object(raw, f"{path}:{number}"))
                except InputError as error:
                    broken = _damaged_log(str(error))
    except OSError as error:
        raise InputError(f"{path.absolute()}: cannot be read: {error.strerror}") from error
    if number <= 1 and broken is not None:
        raise _not_a_log(path, "something else")
    if number == 0:
        raise _not_a_log(path, "an empty file")


def _not_a_log(path: Path, got: str) -> InputError:
    return InputError(
        f"{path}: expected a rollout's event log ({FORMAT}), got {got}; move it away, or choose another --out"
    )


def _damaged_log(*what: str) -> InputError:
    return InputError(f"{': '.join(what)}; the log is damaged: delete it to start the rollout over")


def _other_run_message(path: Path, logged: Any, identity: RunIdentity) -> str:
    logged = logged if isinstance(logged, dict) else {}
    differing = [name for name in {**logged, **identity} if logged.get(name) != identity.get(name)]
    pairs = {name: (json.dumps(logged.get(name)), json.dumps(identity.get(name))) for name in differing}
    told = [
        f"{name} ({there} there, {here} here)" if max(len(there), len(here)) <= MAX_SHOWN_CHARS else name
        for name, (there, here) in pairs.items()
    ]
    return (
        f"{path}: the event log of another run, which was not finished. What differs: {', '.join(told)}. Set it as it "
        "was to finish that run, delete the log to start over, or choose another --out"
    )


def _check_committed_tokens(state: RolloutState, path: Path) -> None:
    for entry in state.scheduler.samples:
        found = sum(tokens.shape[1] for tokens in state.committed_tokens.get(entry.uid, ()))
        if found != entry.num_tokens:
            raise _damaged_log(str(path), f"{entry.uid} has {found} tokens, and {entry.num_tokens} were committed")


def _encode_line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, allow_nan=False).encode("ascii") + b"\n"


def _encode_tokens(tokens: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(tokens, TOKEN_DTYPE).tobytes()).decode("ascii")


def _decode_tokens(text: str) -> np.ndarray:
    """Raises ValueError, TypeError where there are none."""
    return np.frombuffer(base64.b64decode(text, validate=True), TOKEN_DTYPE).reshape(3, -1).astype(np.int32)
