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

from app.records.atomic_write import replacing
from app.records.file_lock import open_exclusive
from app.records.jsonl import parse_object
from app.rollout.scheduling.events import Command, Event, from_json, to_json
from app.rollout.scheduling.scheduler import Scheduler
from settings.errors import InputError

FORMAT = "grpo-rollout-log/1"
DRAWN = np.dtype("<i4")
DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError)
"""What comes of values that no scheduler has written."""
LONGEST_SHOWN = 40
"""Characters of a value in an error; what is longer is a hash."""

RunFacts = Mapping[str, Any]
"""What tells a run from others, by name: whatever decides its samples. Values as JSON has them."""


class LogRecord(NamedTuple):
    event: Event
    commands: tuple[Command, ...]


@dataclass(frozen=True)
class Begun:
    """A rollout as far as it has come."""

    start: Mapping[str, Any]
    """The scheduler's snapshot before the first event."""
    scheduler: Scheduler
    """After the last."""
    records: list[LogRecord] = field(default_factory=list)
    drawn: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """Uid -> int32 [3, tokens] of each commit: all that was."""

    @classmethod
    def now(cls, scheduler: Scheduler) -> Begun:
        """With nothing yet."""
        return cls(scheduler.snapshot(), scheduler)

    @property
    def at(self) -> float:
        """Of the last event, by the clock of the rollout."""
        return self.records[-1].event.at if self.records else 0.0


class EventLog:
    """The log of a rollout while it runs, and of one that was killed.

    No other process can open it meanwhile. As a context it closes; a log that holds nothing goes away.

    Raises:
        InputError: another process has it open, it cannot be written, it is damaged, of another run, or no log.
    """

    def __init__(self, path: Path, *, run: RunFacts):
        self.path = path
        self._run = run
        self._begun: Begun | None = None
        with ExitStack() as stack:
            self._file = stack.enter_context(open_exclusive(path, of="rollout"))
            if _has_no_header(path):
                self._file.seek(0)
                self._file.truncate()
            else:
                self._begun, num_bytes = _read(path, run=run)
                _check_drawn(self._begun, path)
                self._cut(num_bytes)
            stack.pop_all()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._file.closed:
            if self._file.tell() == 0:
                self.path.unlink()
            self._file.close()

    @property
    def begun(self) -> Begun | None:
        """What a rollout that was killed left here."""
        return self._begun

    def begin(self, scheduler: Scheduler) -> Begun:
        """Where the rollout stands; with `scheduler`, before its first event, if it is a new one."""
        if self._begun is None:
            self._begun = Begun.now(scheduler)
            self._write({"format": FORMAT, "run": self._run, "scheduler": self._begun.start})
        return self._begun

    def append(self, record: LogRecord, drawn: Mapping[str, np.ndarray]) -> None:
        """It is in the file when this returns: the process may be killed, though not the machine.

        Args:
            drawn: uid -> int32 [3, tokens] of what the record commits.
        """
        said = {"event": to_json(record.event), "commands": [to_json(one) for one in record.commands]}
        self._write(said | ({"drawn": {uid: _text(tokens) for uid, tokens in drawn.items()}} if drawn else {}))

    def finish(self, *, keep: Path | None = None) -> None:
        """The samples are where they should be: the log goes away, or is moved to `keep`, which may be where it is."""
        if keep is not None and keep.resolve() == self.path.resolve():
            self._file.close()
            return
        if keep is not None:
            with self.path.open("rb") as source, replacing(keep) as target:
                shutil.copyfileobj(source, target)
        self.path.unlink()
        self._file.close()

    def _cut(self, num_bytes: int) -> None:
        """Takes off what was being written when the process was killed."""
        self._file.truncate(num_bytes)
        with self.path.open("rb") as file:
            file.seek(num_bytes - 1)
            if file.read() != b"\n":
                self._file.write(b"\n")
        self._file.flush()

    def _write(self, values: Mapping[str, Any]) -> None:
        self._file.write(_line(values))
        self._file.flush()


def is_log(path: Path) -> bool:
    """Whether it is a file that begins as one."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_HEAD)) == _HEAD


_HEAD = b'{"format": "grpo-rollout-log/'


def _has_no_header(path: Path) -> bool:
    """Whether it is empty, or the process was killed while it wrote the header."""
    with path.open("rb") as file:
        line = file.readline()
    if line.endswith(b"\n") or not (line.startswith(_HEAD) or _HEAD.startswith(line)):
        return False
    try:
        parse_object(line, "")
    except InputError:
        return True
    return False


def read_log(path: Path, *, run: RunFacts | None = None) -> Begun:
    """What it tells, replayed. A last line that was cut off by a crash is left out.

    To go on after a crash, tell the scheduler that its workers are lost, and of new ones.

    Args:
        run: whose it must be; None: any.

    Raises:
        InputError: no log, one of another run, a line that is none; or the scheduler answers otherwise than it did: the
            program has changed since.
    """
    return _read(path, run=run)[0]


def _read(path: Path, *, run: RunFacts | None) -> tuple[Begun, int]:
    """Also the bytes of its whole lines."""
    lines = _lines(path)
    _, num_bytes, header = next(lines)
    if header.get("format") != FORMAT:
        raise _no_log(path, repr(header.get("format")))
    try:
        known, start = header["run"], header["scheduler"]
        begun = Begun(start, Scheduler.restore(start))
    except DAMAGE as error:
        raise _damaged(f"{path}:1", f"no header of an event log: {error!r}") from None
    if run is not None and known != run:
        raise InputError(_says_otherwise(path, known, run))
    for line in lines:
        where = f"{path}:{line.number}"
        try:
            record = LogRecord(from_json(line.values["event"]), tuple(map(from_json, line.values["commands"])))
            answer = tuple(begun.scheduler.handle(record.event))
            for uid, text in line.values.get("drawn", {}).items():
                begun.drawn.setdefault(uid, []).append(_tokens(text))
        except DAMAGE as error:
            raise _damaged(where, f"no record of an event log: {error!r}") from None
        if answer != record.commands:
            raise InputError(
                f"{where}: this program answers {type(record.event).__name__} otherwise than the one that wrote it; "
                "finish the rollout with that one, or delete the file to start over"
            )
        begun.records.append(record)
        num_bytes = line.end
    return begun, num_bytes


class _Line(NamedTuple):
    number: int
    end: int
    """Bytes of the file up to here."""
    values: dict[str, Any]


def _lines(path: Path) -> Iterator[_Line]:
    """At least one."""
    broken, number, end = None, 0, 0
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if broken is not None:
                    raise _no_log(path, "something else") if number == 2 else broken
                end += len(raw)
                try:
                    yield _Line(number, end, parse_object(raw, f"{path}:{number}"))
                except InputError as error:
                    broken = _damaged(str(error))
    except OSError as error:
        raise InputError(f"{path.absolute()}: cannot be read: {error.strerror}") from error
    if number <= 1 and broken is not None:
        raise _no_log(path, "something else")
    if number == 0:
        raise _no_log(path, "an empty file")


def _no_log(path: Path, got: str) -> InputError:
    return InputError(
        f"{path}: expected a rollout's event log ({FORMAT}), got {got}; move it away, or choose another --out"
    )


def _damaged(*what: str) -> InputError:
    return InputError(f"{': '.join(what)}; the log is damaged: delete it to start the rollout over")


def _says_otherwise(path: Path, known: Any, run: RunFacts) -> str:
    known = known if isinstance(known, dict) else {}
    differing = [name for name in {**known, **run} if known.get(name) != run.get(name)]
    pairs = {name: (json.dumps(known.get(name)), json.dumps(run.get(name))) for name in differing}
    told = [
        f"{name} ({there} there, {here} here)" if max(len(there), len(here)) <= LONGEST_SHOWN else name
        for name, (there, here) in pairs.items()
    ]
    return (
        f"{path}: the event log of another run, which was not finished. What differs: {', '.join(told)}. Set it as it "
        "was to finish that run, delete the log to start over, or choose another --out"
    )


def _check_drawn(begun: Begun, path: Path) -> None:
    for entry in begun.scheduler.ledger:
        found = sum(tokens.shape[1] for tokens in begun.drawn.get(entry.uid, ()))
        if found != entry.num_tokens:
            raise _damaged(str(path), f"{entry.uid} has {found} tokens, and {entry.num_tokens} were committed")


def _line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, allow_nan=False).encode("ascii") + b"\n"


def _text(tokens: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(tokens, DRAWN).tobytes()).decode("ascii")


def _tokens(text: str) -> np.ndarray:
    """Raises ValueError, TypeError where there are none."""
    return np.frombuffer(base64.b64decode(text, validate=True), DRAWN).reshape(3, -1).astype(np.int32)
