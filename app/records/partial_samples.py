"""Samples that a command has drawn so far, in a file next to its output until that output is complete.

The first line of a part file is a header: JSON that identifies the work of the command. Each other line is a sample.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from app.records.file_lock import FileLockedError, lock_file
from app.records.jsonl import read_jsonl_tolerant, to_json_line
from app.records.sample import Prompt, Sample
from app.records.sample_json import sample_from_record, sample_to_record
from settings.errors import InputError

PART_SUFFIX = ".part"

NumberedRecord = tuple[int, Mapping[str, Any] | InputError]
"""A line number and the record of that line, or the error that explains why the line has none."""


class PartFile:
    """Appends samples to a part file, which no other process can open meanwhile.

    The header is written before the first sample. A file that got no samples is removed when it is closed.

    Args:
        path: part file of this host.
        header: one line of JSON. If the file has a header already, `read_parts` must have accepted it.
        command: what to call the work in errors, such as `rollout`.

    Raises:
        InputError: another process has opened the file, or it cannot be written or locked.
    """

    def __init__(self, path: Path, *, header: str, command: str) -> None:
        self.path, self._header = path, header
        try:
            self._file = lock_file(path)
        except FileLockedError:
            raise InputError(
                f"--out: another process is running this {command} ({path}); wait for it, or give another --out"
            ) from None
        except OSError as error:
            raise InputError(
                f"--out: {path} cannot be written or locked: {error.strerror}; give another --out on a disk with locks"
            ) from error
        content = path.read_bytes()
        if b"\n" not in content:
            # The process was killed while it wrote the header.
            self._file.truncate(0)
            self._file.seek(0)
        elif not content.endswith(b"\n"):
            # The process was killed while it wrote a sample.
            self._file.write(b"\n")
            self._file.flush()

    def __enter__(self) -> PartFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, sample: Sample) -> None:
        """Writes a sample, which survives the end of this process from then on."""
        if not self._file.tell():
            self._file.write(f"{self._header}\n".encode())
        self._file.write(to_json_line(sample_to_record(sample), str(self.path)))
        self._file.flush()

    def write_through(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Yields the samples, each after it was appended."""
        for sample in samples:
            self.append(sample)
            yield sample

    def close(self) -> None:
        if not self._file.closed:
            if not self._file.tell():
                self.path.unlink(missing_ok=True)
            self._file.close()


def part_path(out: Path) -> Path:
    """Returns the part file of the output `out` on a single host; several hosts insert `.host_0_of_2`."""
    return out.with_name(f"{out.name}{PART_SUFFIX}")


def part_paths(out: Path) -> list[Path]:
    """Returns the part files of `out` that exist, of all hosts of this run and of runs on other numbers of hosts."""
    per_host = out.parent.glob(f"{glob.escape(out.name)}.host_*_of_*{PART_SUFFIX}")
    return [path for path in (part_path(out), *sorted(per_host)) if path.is_file()]


def read_parts(
    out: Path, check_header: Callable[[Path, bytes], None]
) -> Iterator[tuple[Path, Iterator[NumberedRecord]]]:
    """Yields every part file of `out` with its records. Incomplete lines are errors among the records.

    Args:
        check_header: raises InputError if a part file holds samples of other work; gets its path and first line.

    Raises:
        InputError: `check_header` refused a file, a file cannot be read or is not a part file.
    """
    for path in part_paths(out):
        try:
            with path.open("rb") as file:
                header = file.readline()
        except FileNotFoundError:
            # Hosts that share a folder remove the files at the same time.
            continue
        except OSError as error:
            raise InputError(f"--out: {path} cannot be read: {error.strerror}; give another --out") from error
        if not header.endswith(b"\n") and b'{"'.startswith(header[:2]):
            # The process was killed while it wrote the header.
            continue
        check_header(path, header)
        records = read_jsonl_tolerant(path)
        next(records)
        yield path, records


def whole_samples(
    path: Path, records: Iterable[NumberedRecord], prompts: Mapping[str, Prompt], *, num_samples: int
) -> Iterator[Sample]:
    """Yields the samples of these prompts, by uid, among the records; damaged and other lines are skipped.

    Args:
        num_samples: samples per prompt.
    """
    for number, record in records:
        if isinstance(record, InputError):
            continue
        with suppress(InputError):
            sample = sample_from_record(record, where=f"{path}:{number}")
            prompt = prompts.get(sample.prompt.uid)
            whole = prompt and sample.with_prompt(prompt)
            if whole is not None and 0 <= sample.sample_index < num_samples:
                yield whole


def remove_parts(out: Path) -> None:
    """Removes all part files of `out`; other hosts may do the same at the same time."""
    for path in part_paths(out):
        path.unlink(missing_ok=True)
