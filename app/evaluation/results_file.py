"""The files of `grpo evaluate`: samples that are done, and those that one that was killed had drawn."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from app.distributed.lockstep import of_host
from app.evaluation.metadata import Subject, begins_as_subject, facts_file, read_subject, subject_from_json
from app.records.file_lock import open_exclusive
from app.records.jsonl import read_jsonl_lines, to_line
from app.records.sample import Prompt, Sample
from app.records.sample_json import sample_from_record, sample_to_record
from app.reward.aggregate import ERRORS_FIELD
from settings.errors import InputError

PART = ".part"
"""What the name of a file ends in that holds samples nobody has judged yet, behind a line that says of what."""

OfPlaces = Mapping[int, Sequence[Sample]]
"""Place of a prompt -> all its samples, in order."""


@dataclass(frozen=True)
class Questions:
    """The prompts of an evaluation, by their places, and how often each is asked."""

    prompts: Sequence[Prompt]
    num_samples: int

    def found(self, records: Iterable[tuple[int, Mapping[str, object] | InputError]], path: Path) -> OfPlaces:
        """The prompts whose samples are all there. Lines that are torn, or are of no such sample, are passed over."""
        places = {prompt.uid: place for place, prompt in enumerate(self.prompts)}
        samples: dict[int, dict[int, Sample]] = {}
        for line, record in records:
            if isinstance(record, InputError):
                continue
            with suppress(InputError):
                sample = sample_from_record(record, where=f"{path}:{line}")
                place = places.get(sample.prompt.uid)
                if place is not None and self._is_one(sample, self.prompts[place]):
                    whole = replace(sample, prompt=self.prompts[place], group_id=place)
                    samples.setdefault(place, {})[sample.sample_index] = whole
        return {
            place: [of_prompt[i] for i in range(self.num_samples)]
            for place, of_prompt in samples.items()
            if len(of_prompt) == self.num_samples
        }

    def _is_one(self, sample: Sample, prompt: Prompt) -> bool:
        asked = np.array_equal(sample.prompt.token_ids, prompt.token_ids)
        return asked and 0 <= sample.sample_index < self.num_samples


class Result(NamedTuple):
    """What the file of an evaluation holds."""

    samples: OfPlaces
    is_whole: bool
    """All samples, each once, with what the judge made of them, and nothing else."""


def check_out(out: Path, subject: Subject) -> None:
    """Raises InputError where an evaluation cannot go on from what is at `out`, which is of something else."""
    _has_result(out, subject)
    for path in _parts(out):
        _is_begun(path, subject)


def read_result(out: Path, subject: Subject, questions: Questions) -> Result:
    """What the same evaluation has in its file already; nothing where there is no file.

    Raises:
        InputError: the file is of something else.
    """
    if not _has_result(out, subject):
        return Result({}, is_whole=False)
    lines = list(read_jsonl_lines(out))
    found = questions.found(lines, out)
    samples = [sample for of_prompt in found.values() for sample in of_prompt]
    has_all = len(samples) == len(lines) == len(questions.prompts) * questions.num_samples
    return Result(found, has_all and all(map(_is_judged, samples)))


def _is_judged(sample: Sample) -> bool:
    """Its judge came to a value, or had none to give; one that failed may be mended."""
    return sample.rewards is not None and ERRORS_FIELD not in sample.extra


def read_parts(out: Path, subject: Subject, questions: Questions) -> OfPlaces:
    """What the hosts of an evaluation that was killed had drawn, as far as this one sees their files.

    Nobody has judged them, so the judge may have been another.

    Raises:
        InputError: a file is of something else.
    """
    drawn: dict[int, Sequence[Sample]] = {}
    for path in _parts(out):
        if _is_begun(path, subject):
            records = read_jsonl_lines(path)
            next(records)
            drawn |= questions.found(records, path)
    return drawn


def _has_result(out: Path, subject: Subject) -> bool:
    """Whether the file is there. Raises InputError where it is of something else."""
    if not out.exists():
        return False
    found = read_subject(out)
    if found is None:
        raise InputError(
            f"--out: {out} is there, and no {facts_file(out).name} beside it says of which evaluation; give another "
            "--out, or delete it"
        )
    if subject.differs(found) is not None and _has_failures(out):
        # They are judged anew, and all others with them.
        subject, found = subject.unmended, found.unmended
    _check_same(out, subject, found)
    return True


def _has_failures(out: Path) -> bool:
    """Whether there are samples on which the judge failed."""
    return any(not isinstance(record, InputError) and ERRORS_FIELD in record for _, record in read_jsonl_lines(out))


def _is_begun(path: Path, subject: Subject) -> bool:
    """Whether a part says of what it is; one that was killed before does not. Raises InputError as `_has_result`."""
    try:
        with path.open("rb") as file:
            head = file.readline()
        if not head.endswith(b"\n") and begins_as_subject(head):
            return False
        found = subject_from_json(head)
    except FileNotFoundError:
        # Another host has removed it.
        return False
    except OSError as error:
        raise InputError(f"--out: {path} cannot be read: {error.strerror}; give another --out") from error
    except ValueError as error:
        raise InputError(f"--out: {path} is no part of an evaluation ({error}); delete it") from error
    _check_same(path, subject.unjudged, found.unjudged)
    return True


def remove_parts(out: Path) -> None:
    for path in _parts(out):
        # Hosts that share a folder clear it at the same time.
        path.unlink(missing_ok=True)


class PartFile:
    """Where this host's samples go as they are drawn, each at once, behind those of an evaluation that was killed.

    Raises:
        InputError: another process is at it, or it cannot be written or locked.
    """

    def __init__(self, out: Path, subject: Subject) -> None:
        self.path = of_host(out.with_name(f"{out.name}{PART}"))
        self._file = open_exclusive(self.path, of="evaluation")
        if self._is_torn():
            self._file.write(b"\n")
        if not self._file.tell():
            self._file.write(f"{subject.to_json()}\n".encode())
        self._file.flush()

    def keeping(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """The same; each is on its way to the disk before it is passed on."""
        for sample in samples:
            self._file.write(to_line(sample_to_record(sample), str(self.path)))
            self._file.flush()
            yield sample

    def close(self) -> None:
        self._file.close()

    def _is_torn(self) -> bool:
        """Its last line has no end, because the process was killed in the middle of it."""
        content = self.path.read_bytes()
        if b"\n" not in content:
            # Not even the first line is whole.
            self._file.truncate(0)
            self._file.seek(0)
            return False
        return not content.endswith(b"\n")


def _parts(out: Path) -> list[Path]:
    """Of all hosts, whatever their number."""
    alone = out.with_name(f"{out.name}{PART}")
    of_hosts = out.parent.glob(f"{glob.escape(alone.stem)}.host_*_of_*{PART}")
    return [path for path in (alone, *sorted(of_hosts)) if path.is_file()]


def _check_same(path: Path, subject: Subject, found: Subject) -> None:
    name = subject.differs(found)
    if name is not None:
        was, now = (one.facts.get(name) for one in (found, subject))
        raise InputError(
            f"--out: {path} is of another evaluation ({found.label}): {name} was {was!r} there, and is {now!r} now; "
            "give another --out, or delete it"
        )
