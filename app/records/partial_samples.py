"""Stores a rollout's samples in part files next to its output, so that an interrupted rollout can continue.

The first line of a part file is a header: JSON with the identity of the rollout. Each other line is a sample.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from app.records.file_lock import FileLockedError, lock_file
from app.records.identity import Identity, first_difference
from app.records.jsonl import read_jsonl_tolerant, to_json_line
from app.records.sample import Prompt, Sample
from app.records.sample_json import sample_from_record, sample_to_record
from app.records.shared_rows import ROW_FIELDS
from settings.errors import InputError

PART_SUFFIX = ".part"
FORMAT = "grpo-part/3"


@dataclass(frozen=True)
class PartialSamples:
    """Samples that are generated but not yet written to the output."""

    out: Path
    identity: Identity

    @property
    def header(self) -> str:
        return json.dumps({"format": FORMAT, "identity": dict(self.identity)})

    def read(self, prompts: Sequence[Prompt], *, num_samples: int) -> dict[str, Sample]:
        """Returns the samples of the prompts in the part files visible to this host, with their uids as keys.

        Damaged lines are skipped.

        Args:
            num_samples: samples per prompt.

        Raises:
            InputError: a part file belongs to another rollout, or is not a part file.
        """
        by_uid = {prompt.uid: prompt for prompt in prompts}
        found: dict[str, Sample] = {}
        for path in filter(self._has_header, part_paths(self.out)):
            for number, record in read_jsonl_tolerant(path):
                if number == 1 or isinstance(record, InputError):
                    continue
                with suppress(InputError):
                    sample = sample_from_record(record, where=f"{path}:{number}")
                    prompt = by_uid.get(sample.prompt.uid)
                    whole = prompt and sample.with_prompt(prompt)
                    if whole is not None and 0 <= sample.sample_index < num_samples:
                        found[whole.uid] = whole
        return found

    def _has_header(self, path: Path) -> bool:
        """Returns whether a part file has a header; raises InputError if the header is of another rollout."""
        with path.open("rb") as file:
            header = file.readline()
        if not header.endswith(b"\n") and b'{"'.startswith(header[:2]):
            # The process was killed while it wrote the header.
            return False
        try:
            stored = json.loads(header)
            identity = dict(stored["identity"]) if stored["format"] == FORMAT else None
        except (ValueError, LookupError, TypeError, RecursionError):
            identity = None
        if identity is None:
            raise InputError(f"--out: {path} is not a part file of a rollout; move it, or give another --out")
        difference = first_difference(identity, self.identity)
        if difference is not None:
            raise InputError(
                f"--out: {path} has samples of another, unfinished rollout: {difference}. Use the same settings to "
                "finish it, delete the file to start over, or give another --out"
            )
        return True


class PartFile:
    """Appends samples to a part file, which other processes cannot open in the meantime.

    The header is written before the first sample. A file without samples is removed when it is closed.

    Args:
        path: part file of this host.
        header: the header of `PartialSamples`; the caller must have checked that an existing file has the same one.

    Raises:
        InputError: another process has opened the file, or it cannot be written or locked.
    """

    def __init__(self, path: Path, *, header: str) -> None:
        self.path, self._header = path, header
        try:
            self._file = lock_file(path)
        except FileLockedError:
            raise InputError(
                f"--out: another process is running this rollout ({path}); wait for it, or give another --out"
            ) from None
        except OSError as error:
            raise InputError(
                f"--out: {path} cannot be written or locked: {error.strerror}; give another --out on a disk that "
                "supports locks"
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
        if not self._file.tell():
            self.path.unlink(missing_ok=True)
        self._file.close()

    def append(self, sample: Sample) -> None:
        """Writes and flushes a sample, so that it is kept if this process is killed."""
        if not self._file.tell():
            self._file.write(f"{self._header}\n".encode())
        record = sample_to_record(sample)
        # These fields come from the prompt, whose digest is in the header.
        for name in ROW_FIELDS:
            record.pop(name, None)
        self._file.write(to_json_line(record, str(self.path)))
        self._file.flush()

    def write_through(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Yields the samples, each after it has been appended."""
        for sample in samples:
            self.append(sample)
            yield sample


def part_path(out: Path) -> Path:
    """Returns the part file of the output `out` on a single host; several hosts insert `.host_0_of_2`."""
    return out.with_name(f"{out.name}{PART_SUFFIX}")


def part_paths(out: Path) -> list[Path]:
    """Returns the existing part files of `out`, whatever the number of hosts that wrote them."""
    per_host = out.parent.glob(f"{glob.escape(out.name)}.host_*_of_*{PART_SUFFIX}")
    return [path for path in (part_path(out), *sorted(per_host)) if path.is_file()]


def remove_parts(out: Path) -> None:
    """Removes all part files of `out`; other hosts may do the same at the same time."""
    for path in part_paths(out):
        path.unlink(missing_ok=True)
