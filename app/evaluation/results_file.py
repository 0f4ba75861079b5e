"""The files of `grpo evaluate`: judged samples, and samples that a killed evaluation left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from app.distributed.collective_files import per_host_path
from app.evaluation.metadata import (
    CHANGEABLE_JUDGE_FACTS,
    JUDGE,
    JUDGE_FUNCTION,
    EvaluationMetadata,
    metadata_from_json,
    metadata_path,
    read_metadata,
)
from app.records.jsonl import read_jsonl_tolerant
from app.records.partial_samples import NumberedRecord, PartFile, part_path, read_parts, whole_samples
from app.records.sample import Prompt, Sample
from app.reward.aggregate import ERRORS_FIELD
from settings.errors import InputError

SamplesByPrompt = Mapping[int, Sequence[Sample]]
"""Index of a prompt -> all its samples, in order."""


@dataclass(frozen=True)
class EvaluationPrompts:
    """The prompts of an evaluation, and the number of samples per prompt."""

    prompts: Sequence[Prompt]
    num_samples: int

    def complete_samples(self, records: Iterable[NumberedRecord], path: Path) -> SamplesByPrompt:
        """Returns the samples of the prompts that have all their samples. Incomplete and unknown lines are skipped."""
        by_uid = {prompt.uid: prompt for prompt in self.prompts}
        places = {prompt.uid: place for place, prompt in enumerate(self.prompts)}
        samples: dict[int, dict[int, Sample]] = {}
        for one in whole_samples(path, records, by_uid, num_samples=self.num_samples):
            place = places[one.prompt.uid]
            samples.setdefault(place, {})[one.sample_index] = replace(one, group_id=place)
        return {
            place: [by_index[i] for i in range(self.num_samples)]
            for place, by_index in samples.items()
            if len(by_index) == self.num_samples
        }


class StoredSamples(NamedTuple):
    """The content of an evaluation's results file."""

    samples: SamplesByPrompt
    is_complete: bool
    """Whether the file has every sample exactly once, judged, and nothing else."""


def check_results_file(out: Path, metadata: EvaluationMetadata) -> None:
    """Raises InputError if the files at `out` belong to another evaluation."""
    _has_results(out, metadata)
    for _ in read_parts(out, _header_check(metadata)):
        pass


def read_results(out: Path, metadata: EvaluationMetadata, evaluation_prompts: EvaluationPrompts) -> StoredSamples:
    """Returns the samples that this evaluation has already stored in its file; none if there is no file.

    Raises:
        InputError: the file belongs to another evaluation.
    """
    if not _has_results(out, metadata):
        return StoredSamples({}, is_complete=False)
    lines = list(read_jsonl_tolerant(out))
    complete = evaluation_prompts.complete_samples(lines, out)
    samples = [sample for group in complete.values() for sample in group]
    has_all = len(samples) == len(lines) == len(evaluation_prompts.prompts) * evaluation_prompts.num_samples
    return StoredSamples(complete, has_all and all(map(_is_judged, samples)))


def _is_judged(sample: Sample) -> bool:
    """Returns whether the judge gave a value; a judge that failed may be fixed and run again."""
    return sample.rewards is not None and ERRORS_FIELD not in sample.extra


def read_drawn_samples(
    out: Path, metadata: EvaluationMetadata, evaluation_prompts: EvaluationPrompts
) -> SamplesByPrompt:
    """Returns the samples that the hosts of a killed evaluation had generated, from the part files this host sees.

    These samples have not been judged, so the killed evaluation may have had a different judge.

    Raises:
        InputError: a part file belongs to another evaluation.
    """
    drawn: dict[int, Sequence[Sample]] = {}
    for path, records in read_parts(out, _header_check(metadata)):
        drawn |= evaluation_prompts.complete_samples(records, path)
    return drawn


def open_part_file(out: Path, metadata: EvaluationMetadata) -> PartFile:
    """Returns the file to which this host appends samples once generated. Raises InputError as `PartFile` does."""
    return PartFile(per_host_path(part_path(out)), header=metadata.to_json(), command="evaluation")


def _header_check(metadata: EvaluationMetadata) -> Callable[[Path, bytes], None]:
    """Returns a function that checks that a part file belongs to this evaluation, whatever the judge."""

    def check(path: Path, header: bytes) -> None:
        try:
            stored = metadata_from_json(header)
        except (ValueError, RecursionError) as error:
            raise InputError(f"--out: {path} is not a part file of an evaluation ({error}); delete it") from error
        _check_same_evaluation(path, metadata, stored, ignored=(JUDGE, JUDGE_FUNCTION, *CHANGEABLE_JUDGE_FACTS))

    return check


def _has_results(out: Path, metadata: EvaluationMetadata) -> bool:
    """Returns whether the file exists. Raises InputError if it belongs to another evaluation."""
    if not out.exists():
        return False
    stored = read_metadata(out)
    if stored is None:
        raise InputError(
            f"--out: {out} exists without {metadata_path(out).name}, which would identify its evaluation; give "
            "another --out, or delete the file"
        )
    # If the judge failed on any sample, all will be judged again.
    has_failures = metadata.first_difference(stored) is not None and any(
        not isinstance(record, InputError) and ERRORS_FIELD in record for _, record in read_jsonl_tolerant(out)
    )
    _check_same_evaluation(out, metadata, stored, ignored=CHANGEABLE_JUDGE_FACTS if has_failures else ())
    return True


def _check_same_evaluation(
    path: Path, metadata: EvaluationMetadata, stored: EvaluationMetadata, *, ignored: Sequence[str]
) -> None:
    name = metadata.first_difference(stored, ignored)
    if name is not None:
        was, now = (one.facts.get(name) for one in (stored, metadata))
        raise InputError(
            f"--out: {path} belongs to another evaluation ({stored.label}): {name} was {was!r} there, and is {now!r} "
            "now; give another --out, or delete it"
        )
