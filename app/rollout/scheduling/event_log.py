"""What a scheduler was told and what it answered, as JSON Lines that can be replayed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from app.jsonl import read_jsonl_lines
from app.rollout.scheduling.events import Command, Event, from_json, to_json
from app.rollout.scheduling.scheduler import Scheduler
from settings.errors import InputError

FORMAT = "grpo-rollout-log/1"


class LogRecord(NamedTuple):
    event: Event
    commands: tuple[Command, ...]


class EventLog:
    """A log that is being written; every record is in the file when `append` returns.

    Args:
        run: what tells this run from others: a log is replayed for its own run only.
        scheduler: before its first event.
    """

    def __init__(self, path: Path, *, run: str, scheduler: Scheduler):
        self._file = path.open("w", encoding="utf-8")
        self._write({"format": FORMAT, "run": run, "scheduler": scheduler.snapshot()})

    def append(self, record: LogRecord) -> None:
        self._write({"event": to_json(record.event), "commands": [to_json(one) for one in record.commands]})

    def _write(self, values: dict[str, Any]) -> None:
        self._file.write(json.dumps(values, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def write_log(path: Path, records: Iterable[LogRecord], *, run: str, scheduler: Scheduler) -> None:
    """`scheduler` as it was before the first record."""
    log = EventLog(path, run=run, scheduler=scheduler)
    for record in records:
        log.append(record)
    log.close()


def read_log(path: Path, *, run: str) -> tuple[Scheduler, Iterator[LogRecord]]:
    """The scheduler as it was at the start, and what followed. A last line that was cut off by a crash is left out.

    Raises:
        InputError: no log, one of another run, or a line that is none.
    """
    lines = read_jsonl_lines(path)
    _, header = next(lines, (0, {}))
    if isinstance(header, InputError):
        raise header
    if header.get("format") != FORMAT:
        raise InputError(f"{path}: expected a rollout's event log ({FORMAT}), got {header.get('format')!r}")
    if header["run"] != run:
        raise InputError(
            f"{path}: the event log of another run: {header['run']!r}, and this is {run!r}; the settings, the model or "
            "the prompts differ. Start over in a new file"
        )
    return Scheduler.restore(header["scheduler"]), _records(path, lines)


def _records(path: Path, lines: Iterator[tuple[int, dict[str, Any] | InputError]]) -> Iterator[LogRecord]:
    broken: InputError | None = None
    for number, line in lines:
        if broken is not None:
            raise broken
        if isinstance(line, InputError):
            broken = line
            continue
        try:
            yield LogRecord(from_json(line["event"]), tuple(from_json(one) for one in line["commands"]))
        except (KeyError, TypeError) as error:
            raise InputError(f"{path}:{number}: no record of an event log: {error!r}") from None


def replay(path: Path, *, run: str) -> Scheduler:
    """The scheduler as it was after the last record.

    To go on after a crash, tell it that its workers are lost, and of new ones.

    Raises:
        InputError: as `read_log`; or the scheduler answers otherwise than it did: the program has changed since.
    """
    scheduler, records = read_log(path, run=run)
    for number, (event, commands) in enumerate(records, start=2):
        answer = tuple(scheduler.handle(event))
        if answer != commands:
            raise InputError(
                f"{path}:{number}: this program answers {type(event).__name__} otherwise than the one that wrote it"
            )
    return scheduler
