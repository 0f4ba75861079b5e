"""The files of `grpo evaluate`: judged samples, and samples that a killed evaluation left behind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from app.distributed.collective_files import per_host_path
from app.evaluation.metadata import (
    CHANGEABLE_JUDGE_FACTS,
    JUDGE,
    JUDGE_FUNCTION,
    EvaluationMetadata,
    metadata_path,
    read_metadata,
)
from app.records.identity import first_difference
from app.records.jsonl import read_jsonl_tolerant
from app.records.partial_samples import PartFile, PartialSamples, part_path, whole_samples
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

    def complete_samples(self, found: Iterable[Sample]) -> SamplesByPrompt:
        """Returns the samples of the prompts that have all their samples."""
        places = {prompt.uid: place for place, prompt in enumerate(self.prompts)}
        samples: dict[int, dict[int, Sample]] = {}
        for one in found:
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
    drawn_samples(out, metadata).check()


def read_results(out: Path, metadata: EvaluationMetadata, evaluation_prompts: EvaluationPrompts) -> StoredSamples:
    """Returns the samples that this evaluation has already stored in its file; none if there is no file.

    Raises:
        InputError: the file belongs to another evaluation.
    """
    if not _has_results(out, metadata):
        return StoredSamples({}, is_complete=False)
    lines = list(read_jsonl_tolerant(out))
    prompts, num_samples = evaluation_prompts.prompts, evaluation_prompts.num_samples
    complete = evaluation_prompts.complete_samples(whole_samples(out, lines, prompts, num_samples=num_samples))
    samples = [sample for group in complete.values() for sample in group]
    has_all = len(samples) == len(lines) == len(prompts) * num_samples
    return StoredSamples(complete, has_all and all(map(_is_judged, samples)))


def _is_judged(sample: Sample) -> bool:
    """Returns whether the judge gave a value; a judge that failed may be fixed and run again."""
    return sample.rewards is not None and ERRORS_FIELD not in sample.extra


def drawn_samples(out: Path, metadata: EvaluationMetadata) -> PartialSamples:
    """Returns the samples that hosts have generated for an output.

    They have not been judged, so a killed evaluation from which this one continues may have had a different judge.
    """
    any_judge = (JUDGE, JUDGE_FUNCTION, *CHANGEABLE_JUDGE_FACTS)
    return PartialSamples(out, "evaluation", metadata.facts, ignored=any_judge)


def open_part_file(out: Path, metadata: EvaluationMetadata) -> PartFile:
    """Returns the file to which this host appends samples once generated. Raises InputError as `PartFile` does."""
    return drawn_samples(out, metadata).open_part(per_host_path(part_path(out)))


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
    has_failures = first_difference(stored.facts, metadata.facts) is not None and any(
        not isinstance(record, InputError) and ERRORS_FIELD in record for _, record in read_jsonl_tolerant(out)
    )
    ignored = CHANGEABLE_JUDGE_FACTS if has_failures else ()
    difference = first_difference(stored.facts, metadata.facts, ignored=ignored)
    if difference is not None:
        raise InputError(
            f"--out: {out} belongs to another evaluation ({stored.label}): {difference}; give another --out, or delete "
            "it"
        )
    return True
