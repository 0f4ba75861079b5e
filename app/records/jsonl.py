"""JSON Lines files: read with the line number in every error, and written atomically."""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from app.records.atomic_write import open_atomic
from settings.errors import InputError

NUMBER_SHAPE_TABLE = bytes(
    ord("0") if chr(i) in "0123456789" else ord("e") if chr(i) in "eE" else i for i in range(256)
)
NON_FINITE_PATTERNS = (b"NaN", b"Infinity", b"e000", b"e+000", b"0" * 309)
"""After translation by `NUMBER_SHAPE_TABLE`, every number that Python reads as NaN or infinity, such as one too large
for float64, contains one of these patterns. Searching for them is 30 times as fast as a regular expression."""


def read_jsonl(path: str | Path, *, reads_nan: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number from 1, object) for every line that is not blank.

    Accepts a byte-order mark and CRLF line ends. A file whose name ends in .gz is decompressed.

    Args:
        reads_nan: whether NaN, which only other programs write, is read as None rather than refused.

    Raises:
        InputError: the file cannot be read, or a line is not UTF-8, not JSON, not an object, or has a number that is
            not finite.
    """
    for number, record in read_jsonl_tolerant(path, reads_nan=reads_nan):
        if isinstance(record, InputError):
            raise record
        yield number, record


def read_jsonl_tolerant(
    path: str | Path, *, reads_nan: bool = False
) -> Iterator[tuple[int, dict[str, Any] | InputError]]:
    """Yields the lines as `read_jsonl` does, but for an unusable line the InputError in place of its object.

    Raises:
        InputError: the file cannot be read.
    """
    path = Path(path)
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if number == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                if not raw.strip():
                    continue
                try:
                    record = parse_object(raw, f"{path}:{number}", reads_nan=reads_nan)
                except InputError as error:
                    record = error
                yield number, record
    except FileNotFoundError:
        raise InputError(f"{path.absolute()}: no such file; correct the path") from None
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"{path.absolute()}: cannot be read: {getattr(error, 'strerror', None) or error}; give another file"
        ) from error


def parse_object(raw: bytes, where: str, *, reads_nan: bool = False) -> dict[str, Any]:
    """Parses the object in a line of JSON Lines; see `read_jsonl` for `reads_nan`. Errors start with `where`."""
    try:
        # Without the newline, so that an error at the end of the line is not at column 1 of the next.
        value = json.loads(raw.decode("utf-8").rstrip("\r\n"))
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where}: not UTF-8 text: {error.reason} at byte {error.start + 1}; save the file as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise InputError(
            f"{where}: not JSON: {error.msg.removesuffix(' at')} at column {error.colno}; correct or remove the line"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: unusable JSON: {error}; correct or remove the line") from None
    if not isinstance(value, dict):
        way_out = "put one object on each line: `jq -c '.[]'` converts a list"
        way_out = way_out if isinstance(value, list) else "correct or remove the line"
        raise InputError(f"{where}: expected a JSON object, got {type(value).__name__}; {way_out}")
    shape = raw.translate(NUMBER_SHAPE_TABLE)
    if any(part in shape for part in NON_FINITE_PATTERNS):
        value = replace_floats(value, math.isnan) if reads_nan else value
        if problem := _find_non_finite(value):
            raise InputError(f"{where}: unusable JSON: {problem}; correct or remove the line")
    return value


def replace_floats(value: Any, is_absent: Callable[[float], bool]) -> Any:
    """Returns a JSON value in which each float for which `is_absent` is true, such as NaN, is replaced by None."""
    if isinstance(value, dict):
        return {name: replace_floats(item, is_absent) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_floats(item, is_absent) for item in value]
    return None if isinstance(value, float) and is_absent(value) else value


def _find_non_finite(value: Any) -> str | None:
    """Returns where the first NaN or infinity is, such as `behavior_logprobs[3] is NaN`; None if there is none."""
    waiting = [("", value)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, float) and not math.isfinite(value):
            name = "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity, or too large for a float64"
            return f"{place} is {name}"
        if isinstance(value, dict):
            waiting += [(f"{place}.{name}" if place else name, item) for name, item in reversed(value.items())]
        elif isinstance(value, list):
            waiting += [(f"{place}[{i}]", item) for i, item in reversed([*enumerate(value)])]
    return None


def check_output_path(path: str | Path, option: str | None = None) -> None:
    """Checks that a file can be written at `path`, which an option may have named; call it before any long work.

    Raises:
        InputError: `path` is a folder or a device, or its folder does not exist or is not writable.
    """
    path = Path(path).absolute()
    place = f"{option}: {path}" if option else path
    if path.exists() and not path.is_file():
        raise InputError(f"{place}: expected the name of a file, got a {'folder' if path.is_dir() else 'device'}")
    if not path.parent.is_dir():
        raise InputError(f"{place}: the folder {path.parent} does not exist; create it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise InputError(f"{place}: the folder {path.parent} is not writable; choose another one")


def check_distinct_paths(paths: Mapping[str, Path | None]) -> None:
    """Raises InputError if two options of a command name the same file; an option that was not given is None."""
    named: dict[Path, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        other = named.setdefault(path.resolve(), option)
        if other != option:
            raise InputError(f"{other} and {option} both name {path}; give each its own file")


def write_jsonl(path: str | Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Writes one object per line, atomically.

    Floats are written with enough digits to read back the same float64.

    Raises:
        InputError: `path` cannot be written (see `check_output_path`).
        ValueError: a record contains NaN or an infinity, which JSON does not support.
    """
    check_output_path(path)
    path = Path(path).absolute()
    with open_atomic(path) as file:
        file.writelines(to_json_line(record, str(path)) for record in records)


def to_json_line(record: Mapping[str, Any], where: str) -> bytes:
    """Returns an object as one line.

    Args:
        where: the start of error messages.

    Raises:
        ValueError: it contains NaN or an infinity, which JSON does not support.
    """
    try:
        return json.dumps(record, allow_nan=False).encode("ascii") + b"\n"
    except ValueError as error:
        raise ValueError(f"{where} ({record.get('uid', 'no uid')}): {error}") from error
