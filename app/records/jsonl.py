"""JSON Lines files: read with the line named in every error, written whole or not at all."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from app.records.atomic_write import open_atomic
from settings.errors import InputError

NUMBER_SHAPE_TABLE = bytes(
    ord("0") if chr(i) in "0123456789" else ord("e") if chr(i) in "eE" else i for i in range(256)
)
OVERFLOW_PATTERNS = (b"e000", b"e+000", b"0" * 309)
"""One stands in the outline of every JSON number that is too large for a float64, which Python would read as an
infinity. A translation and three searches: a pattern of `re` takes thirty times as long, more than the parsing."""


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number from 1, object) for every line that is not blank.

    A byte-order mark and CRLF line ends are accepted.

    Raises:
        InputError: the file cannot be read, or a line is not UTF-8, not JSON, not an object, or holds a number that is
            none, such as NaN.
    """
    for number, raw in _nonblank_lines(path):
        yield number, parse_object(raw, f"{path}:{number}")


def read_jsonl_tolerant(path: str | Path) -> Iterator[tuple[int, dict[str, Any] | InputError]]:
    """As `read_jsonl`, but a line that is no object yields the InputError that says why, and reading goes on.

    Raises:
        InputError: the file cannot be read.
    """
    for number, raw in _nonblank_lines(path):
        yield number, _parse_or_error(raw, f"{path}:{number}")


def _nonblank_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Those that are not blank."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if number == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                if raw.strip():
                    yield number, raw
    except FileNotFoundError:
        raise InputError(f"{path.absolute()}: no such file") from None
    except OSError as error:
        raise InputError(f"{path.absolute()}: cannot be read: {error.strerror}") from error


def _parse_or_error(raw: bytes, where: str) -> dict[str, Any] | InputError:
    try:
        return parse_object(raw, where)
    except InputError as error:
        return error


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """One line's object. `where` opens every error.

    Raises:
        InputError: as `read_jsonl`.
    """
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text: {error.reason} at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    except _NonFiniteNumberError as error:
        raise InputError(f"{where}: not usable JSON: {_find_non_finite(json.loads(raw))} is {error}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not usable JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{where}: expected a JSON object, got {type(value).__name__}")
    outline = raw.translate(NUMBER_SHAPE_TABLE)
    if any(part in outline for part in OVERFLOW_PATTERNS) and (place := _find_non_finite(value)):
        raise InputError(f"{where}: {place} is too large for a float64")
    return value


class _NonFiniteNumberError(ValueError):
    """NaN, Infinity or -Infinity, which Python reads and JSON does not know."""


def _refuse_constant(name: str) -> NoReturn:
    raise _NonFiniteNumberError(f"{name}, which is no number")


def _find_non_finite(value: Any) -> str | None:
    """Where the first NaN or infinity stands, such as `behavior_logprobs[3]`; None where there is none."""
    waiting = [("", value)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, float) and not math.isfinite(value):
            return place or "it"
        if isinstance(value, dict):
            waiting += [(f"{place}.{name}" if place else name, item) for name, item in reversed(value.items())]
        elif isinstance(value, list):
            waiting += [(f"{place}[{i}]", item) for i, item in reversed([*enumerate(value)])]
    return None


def check_output_path(path: str | Path) -> None:
    """Passes when a file could be written at `path`; meant to be called before any long work.

    Raises:
        InputError: `path` is a folder or a device, or its folder is absent or not writable.
    """
    path = Path(path).absolute()
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: expected a file name, got a {'folder' if path.is_dir() else 'device'}")
    if not path.parent.is_dir():
        raise InputError(f"{path}: the folder {path.parent} does not exist; create it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise InputError(f"{path}: the folder {path.parent} is not writable")


def check_distinct_paths(paths: Mapping[str, Path | None]) -> None:
    """Raises InputError where two options of a command name the same file; `paths` by option, None where not given."""
    named: dict[Path, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        other = named.setdefault(path.resolve(), option)
        if other != option:
            raise InputError(f"{other} and {option} both name {path}; give each a file of its own")


def write_jsonl(path: str | Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Writes one object a line, the file whole or not at all.

    Floats are written with the digits that read back as the same float64.

    Raises:
        InputError: `path` cannot be a file (see `check_output`).
        ValueError: a record holds NaN or an infinity, which JSON cannot say.
    """
    check_output_path(path)
    path = Path(path).absolute()
    with open_atomic(path) as file:
        for number, record in enumerate(records, start=1):
            file.write(to_json_line(record, f"{path}: record {number}"))


def to_json_line(record: Mapping[str, Any], where: str) -> bytes:
    """One object as its line. `where` opens the error.

    Raises:
        ValueError: it holds NaN or an infinity, which JSON cannot say.
    """
    try:
        return json.dumps(record, allow_nan=False).encode("ascii") + b"\n"
    except ValueError as error:
        raise ValueError(f"{where} ({record.get('uid', 'no uid')}): {error}") from error
