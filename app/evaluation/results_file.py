"""The files of `grpo evaluate`: samples that are done, and those that one that was killed had drawn."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from app.distributed.lockstep import per_host_path
from app.evaluation.metadata import (
    EvaluationMetadata,
    is_metadata_prefix,
    metadata_from_json,
    metadata_path,
    read_metadata,
)
from app.records.file_lock import open_locked
from app.records.jsonl import read_jsonl_tolerant, to_json_line
from app.records.sample import Prompt, Sample
from app.records.sample_json import sample_from_record, sample_to_record
from app.reward.aggregate import ERRORS_FIELD
from settings.errors import InputError

PART_SUFFIX = ".part"
"""What the name of a file ends in that holds samples nobody has judged yet, behind a line that says of what."""

SamplesByPrompt = Mapping[int, Sequence[Sample]]
"""Place of a prompt -> all its samples, in order."""


@dataclass(frozen=True)
class EvaluationPrompts:
    """The prompts of an evaluation, by their places, and how often each is asked."""

    prompts: Sequence[Prompt]
    num_samples: int

    def complete_samples(
        self, records: Iterable[tuple[int, Mapping[str, object] | InputError]], path: Path
    ) -> SamplesByPrompt:
        """The prompts whose samples are all there. Lines that are torn, or are of no such sample, are passed over."""
        places = {prompt.uid: place for place, prompt in enumerate(self.prompts)}
        samples: dict[int, dict[int, Sample]] = {}
        for line, record in records:
            if isinstance(record, InputError):
                continue
            with suppress(InputError):
                sample = sample_from_record(record, where=f"{path}:{line}")
                place = places.get(sample.prompt.uid)
                if place is not None and self._is_expected(sample, self.prompts[place]):
                    whole = replace(sample, prompt=self.prompts[place], group_id=place)
                    samples.setdefault(place, {})[sample.sample_index] = whole
        return {
            place: [of_prompt[i] for i in range(self.num_samples)]
            for place, of_prompt in samples.items()
            if len(of_prompt) == self.num_samples
        }

    def _is_expected(self, sample: Sample, prompt: Prompt) -> bool:
        asked = np.array_equal(sample.prompt.token_ids, prompt.token_ids)
        return asked and 0 <= sample.sample_index < self.num_samples


class StoredSamples(NamedTuple):
    """What the file of an evaluation holds."""

    samples: SamplesByPrompt
    is_complete: bool
    """All samples, each once, with what the judge made of them, and nothing else."""


def check_results_file(out: Path, metadata: EvaluationMetadata) -> None:
    """Raises InputError where an evaluation cannot go on from what is at `out`, which is of something else."""
    _has_results(out, metadata)
    for path in _part_paths(out):
        _has_valid_header(path, metadata)


def read_results(out: Path, metadata: EvaluationMetadata, evaluation_prompts: EvaluationPrompts) -> StoredSamples:
    """What the same evaluation has in its file already; nothing where there is no file.

    Raises:
        InputError: the file is of something else.
    """
    if not _has_results(out, metadata):
        return StoredSamples({}, is_complete=False)
    lines = list(read_jsonl_tolerant(out))
    found = evaluation_prompts.complete_samples(lines, out)
    samples = [sample for of_prompt in found.values() for sample in of_prompt]
    has_all = len(samples) == len(lines) == len(evaluation_prompts.prompts) * evaluation_prompts.num_samples
    return StoredSamples(found, has_all and all(map(_is_judged, samples)))


def _is_judged(sample: Sample) -> bool:
    """Its judge came to a value, or had none to give; one that failed may be mended."""
    return sample.rewards is not None and ERRORS_FIELD not in sample.extra


def read_parts(out: Path, metadata: EvaluationMetadata, evaluation_prompts: EvaluationPrompts) -> SamplesByPrompt:
    """What the hosts of an evaluation that was killed had drawn, as far as this one sees their files.

    Nobody has judged them, so the judge may have been another.

    Raises:
        InputError: a file is of something else.
    """
    drawn: dict[int, Sequence[Sample]] = {}
    for path in _part_paths(out):
        if _has_valid_header(path, metadata):
            records = read_jsonl_tolerant(path)
            next(records)
            drawn |= evaluation_prompts.complete_samples(records, path)
    return drawn


def _has_results(out: Path, metadata: EvaluationMetadata) -> bool:
    """Whether the file is there. Raises InputError where it is of something else."""
    if not out.exists():
        return False
    found = read_metadata(out)
    if found is None:
        raise InputError(
            f"--out: {out} is there, and no {metadata_path(out).name} beside it says of which evaluation; give another "
            "--out, or delete it"
        )
    if metadata.first_difference(found) is not None and _has_failures(out):
        # They are judged anew, and all others with them.
        metadata, found = metadata.without_judge_details, found.without_judge_details
    _check_same_evaluation(out, metadata, found)
    return True


def _has_failures(out: Path) -> bool:
    """Whether there are samples on which the judge failed."""
    return any(not isinstance(record, InputError) and ERRORS_FIELD in record for _, record in read_jsonl_tolerant(out))


def _has_valid_header(path: Path, metadata: EvaluationMetadata) -> bool:
    """Whether a part says of what it is; one that was killed before does not. Raises InputError as `_has_result`."""
    try:
        with path.open("rb") as file:
            head = file.readline()
        if not head.endswith(b"\n") and is_metadata_prefix(head):
            return False
        found = metadata_from_json(head)
    except FileNotFoundError:
        # Another host has removed it.
        return False
    except OSError as error:
        raise InputError(f"--out: {path} cannot be read: {error.strerror}; give another --out") from error
    except ValueError as error:
        raise InputError(f"--out: {path} is no part of an evaluation ({error}); delete it") from error
    _check_same_evaluation(path, metadata.without_judge, found.without_judge)
    return True


def remove_parts(out: Path) -> None:
    for path in _part_paths(out):
        # Hosts that share a folder clear it at the same time.
        path.unlink(missing_ok=True)


class PartFile:
    """Where this host's samples go as they are drawn, each at once, behind those of an evaluation that was killed.

    Raises:
        InputError: another process is at it, or it cannot be written or locked.
    """

    def __init__(self, out: Path, metadata: EvaluationMetadata) -> None:
        self.path = per_host_path(out.with_name(f"{out.name}{PART_SUFFIX}"))
        self._file = open_locked(self.path, command="evaluation")
        if self._ends_in_torn_line():
            self._file.write(b"\n")
        if not self._file.tell():
            self._file.write(f"{metadata.to_json()}\n".encode())
        self._file.flush()

    def write_through(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """The same; each is on its way to the disk before it is passed on."""
        for sample in samples:
            self._file.write(to_json_line(sample_to_record(sample), str(self.path)))
            self._file.flush()
            yield sample

    def close(self) -> None:
        self._file.close()

    def _ends_in_torn_line(self) -> bool:
        """Its last line has no end, because the process was killed in the middle of it."""
        content = self.path.read_bytes()
        if b"\n" not in content:
            # Not even the first line is whole.
            self._file.truncate(0)
            self._file.seek(0)
            return False
        return not content.endswith(b"\n")


def _part_paths(out: Path) -> list[Path]:
    """Of all hosts, whatever their number."""
    alone = out.with_name(f"{out.name}{PART_SUFFIX}")
    of_hosts = out.parent.glob(f"{glob.escape(alone.stem)}.host_*_of_*{PART_SUFFIX}")
    return [path for path in (alone, *sorted(of_hosts)) if path.is_file()]


def _check_same_evaluation(path: Path, metadata: EvaluationMetadata, stored: EvaluationMetadata) -> None:
    name = metadata.first_difference(stored)
    if name is not None:
        was, now = (one.facts.get(name) for one in (stored, metadata))
        raise InputError(
            f"--out: {path} is of another evaluation ({stored.label}): {name} was {was!r} there, and is {now!r} now; "
            "give another --out, or delete it"
        )
