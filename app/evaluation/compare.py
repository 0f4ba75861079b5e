"""`grpo evaluate --compare`: what has changed between two evaluations of the same prompts. Starts no device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from app.evaluation.comparison_report import EvaluationComparison, PairedMetric, check_plot_path, is_shown, write_plot
from app.evaluation.metadata import (
    CHECKPOINT,
    JUDGE,
    JUDGE_FILE,
    JUDGE_FUNCTION,
    MODEL,
    PROMPTS,
    EvaluationMetadata,
    metadata_path,
    read_metadata,
)
from app.evaluation.metrics import (
    ACCURACY,
    DIFFICULTY,
    ERROR_COUNT,
    NON_BINARY_COUNT,
    PromptTable,
    accuracy_metric_name,
    difficulty_levels,
    estimate_mean,
    estimate_metrics,
    prompt_columns,
)
from app.records.jsonl import check_distinct_paths, read_jsonl
from app.records.sample import Prompt, Sample
from app.records.sample_json import sample_from_record
from app.report.confidence_intervals import MetricEstimate, mean_interval, sign_test
from app.reward.tasks import is_task_reward, reference_answer
from settings.errors import InputError

EXPECTED_DIFFERENCES = {MODEL, CHECKPOINT, PROMPTS}
"""What may differ, as the labels say; of the prompts, as a look at the records says."""
CHANGE_DECIMALS = 9
"""Of a change: what is behind them comes of adding the same values in another order."""
MAX_SHOWN = 8
"""Numbers of samples in an error."""


@dataclass(frozen=True)
class EvaluationResults:
    """A file of judged samples."""

    path: Path
    metadata: EvaluationMetadata | None
    """None where nothing stands beside the file, as beside those that a run has written."""
    judge: str
    num_samples: int
    """Of each prompt."""
    groups: Mapping[str, Sequence[Sample]]
    """By prompt."""

    @property
    def label(self) -> str:
        return str(self.path) if self.metadata is None else f"{self.metadata.label} ({self.path})"

    def prompt_table(self, uids: Sequence[str]) -> PromptTable:
        samples = [sample for uid in uids for sample in self.groups[uid]]
        columns = prompt_columns(samples, judge=self.judge, num_samples=self.num_samples)
        return {name: np.asarray(column, np.float64) for name, column in columns.items()}

    def prompt(self, uid: str) -> Prompt:
        return self.groups[uid][0].prompt


def compare_evaluations(before: Path, after: Path, *, plot_path: Path | None) -> EvaluationComparison:
    """Both files' figures, the differences prompt by prompt, and how likely chance alone would give as much.

    Raises:
        InputError: files that cannot be read or compared, or a picture that cannot be written.
    """
    check_distinct_paths({"--compare BEFORE": before, "--compare AFTER": after, "--picture": plot_path})
    if plot_path is not None:
        check_plot_path(plot_path)
    first, second = read_evaluation_results(before), read_evaluation_results(after)
    _check_comparable(first, second)
    uids = [*first.groups]
    tables = first.prompt_table(uids), second.prompt_table(uids)
    change = _prompt_differences(*tables, ACCURACY)
    better, worse = int((change > 0).sum()), int((change < 0).sum())
    right_or_wrong = all(np.isin(table[ACCURACY][~np.isnan(table[ACCURACY])], (0, 1)).all() for table in tables)
    comparison = EvaluationComparison(
        first.label,
        second.label,
        num_prompts=len(uids),
        judge=first.judge,
        has_plugin_judge=not is_task_reward(first.judge),
        metrics=_paired_metrics(first, second, *tables),
        num_better=better,
        num_worse=worse,
        num_equal=int((change == 0).sum()),
        test="exact McNemar test" if right_or_wrong else "exact sign test over prompts",
        p_value=sign_test(better, worse),
        notes=[*_unjudged_notes(change), *_notes(first, second)],
    )
    if plot_path is not None:
        write_plot(plot_path, comparison)
    return comparison


def read_evaluation_results(path: Path) -> EvaluationResults:
    """The samples of an evaluation's file, its own or one that a run has written.

    Raises:
        InputError: it cannot be read, or does not hold the judged samples of an evaluation.
    """
    groups: dict[str, list[Sample]] = {}
    for line, record in read_jsonl(path):
        sample = sample_from_record(record, where=f"{path}:{line}")
        groups.setdefault(sample.prompt.uid, []).append(sample)
    if not groups:
        raise InputError(f"--compare: {path} holds no samples")
    subject = read_metadata(path)
    judge = _find_judge(path, subject, groups)
    num_samples = max(len({sample.sample_index for sample in samples}) for samples in groups.values())
    for uid, samples in groups.items():
        samples.sort(key=lambda sample: sample.sample_index)
        there = [sample.sample_index for sample in samples]
        if there != [*range(num_samples)]:
            shown = ", ".join(map(str, there[:MAX_SHOWN])) + ", ..." * (len(there) > MAX_SHOWN)
            raise InputError(
                f"--compare: {path} is not whole: {uid} has samples {shown}, others 0 to {num_samples - 1}; the same "
                "grpo evaluate command again mends it"
            )
    if num_samples > 1 and is_task_reward(judge):
        _check_majority_answers(path, judge, [samples[0].prompt for samples in groups.values()])
    return EvaluationResults(path, subject, judge, num_samples, groups)


def _check_majority_answers(path: Path, judge: str, prompts: Sequence[Prompt]) -> None:
    """Raises InputError where nobody can say which vote of the majority is right."""
    unknown = [prompt.uid for prompt in prompts if reference_answer(judge, prompt) is None]
    if unknown:
        others = f" (and {len(unknown) - 1:,} more prompts are like it)" if len(unknown) > 1 else ""
        raise InputError(
            f"--compare: {path}: several samples of a prompt vote for a number, and `answer` of {unknown[0]} holds "
            f"none{others}; grpo evaluate --out writes the answers of the data set there"
        )


def _find_judge(path: Path, metadata: EvaluationMetadata | None, groups: Mapping[str, Sequence[Sample]]) -> str:
    """The one function whose values the samples have."""
    samples = [sample for of_prompt in groups.values() for sample in of_prompt]
    names = sorted({name for sample in samples for name in sample.rewards or {}})
    if metadata is not None and all(sample.rewards is not None for sample in samples):
        names = [metadata.facts[JUDGE]]
    if len(names) != 1:
        found = f"the values of {', '.join(names)}" if names else "none"
        raise InputError(
            f"--compare: expected the judged samples of an evaluation, whose `rewards` hold one value, and {path} has "
            f"{found}; grpo evaluate --out writes such files"
        )
    return names[0]


def _check_comparable(first: EvaluationResults, second: EvaluationResults) -> None:
    """Raises InputError where they are not of the same questions, or not judged alike."""
    both = f"{first.path} and {second.path}"
    if first.judge != second.judge:
        raise InputError(f"--compare: {both} are not judged alike: by {first.judge}, and by {second.judge}")
    if first.metadata and second.metadata:
        for name, how in ((JUDGE_FUNCTION, "is another function"), (JUDGE_FILE, "is in a file that has changed")):
            was, now = (one.facts.get(name) for one in (first.metadata, second.metadata))
            if was != now:
                raise InputError(
                    f"--compare: {both} are not judged alike: {first.judge} {how}: {name} was {was}, and is {now}"
                )
    if first.num_samples != second.num_samples:
        raise InputError(
            f"--compare: {both} have not the same number of samples of each prompt: eval.num_samples was "
            f"{first.num_samples}, and is {second.num_samples}. Even of one model, prompts would not be better as "
            "often as worse; evaluate one of them again with the eval.num_samples of the other, and another --out"
        )
    only = [[uid for uid in one.groups if uid not in other.groups] for one, other in ((first, second), (second, first))]
    if only[0] or only[1]:
        raise InputError(
            f"--compare: {both} are not of the same prompts: {len(only[0])} are in the first alone, {len(only[1])} in "
            f"the second alone, such as {(only[0] or only[1])[0]}; evaluate both with the same data.eval_source, "
            "data.eval_split and eval.num_prompts"
        )
    for uid in first.groups:
        one, other = first.prompt(uid), second.prompt(uid)
        if (one.source, one.answer) != (other.source, other.answer):
            raise InputError(f"--compare: {both} are not of the same data: {uid} has another question or answer")
        if one.extra != other.extra and not is_task_reward(first.judge):
            raise InputError(
                f"--compare: {both} are not of the same data: {uid} has other columns, which {first.judge} may read"
            )


def _prompt_differences(before: PromptTable, after: PromptTable, column: str) -> np.ndarray:
    """Of every prompt; NaN where it has no value before or after."""
    return np.round(after[column] - before[column], CHANGE_DECIMALS)


def _paired_metrics(
    first: EvaluationResults, second: EvaluationResults, before: PromptTable, after: PromptTable
) -> list[PairedMetric]:
    """A row for each figure that both have."""
    figures = [
        estimate_metrics(table, num_samples=one.num_samples) for one, table in ((first, before), (second, after))
    ]
    everywhere = np.ones(len(before[ACCURACY]), bool)
    columns = {name: (name, everywhere) for name in before if name not in (DIFFICULTY, NON_BINARY_COUNT)}
    columns |= {
        accuracy_metric_name(level): (ACCURACY, before[DIFFICULTY] == level) for level in difficulty_levels(before)
    }
    rows = []
    for name, (column, where) in columns.items():
        if name not in figures[1] or not any(is_shown(name, one[name]) for one in figures):
            continue
        measured = all(one[name].value is not None for one in figures)
        change = _prompt_differences(before, after, column)[where] if measured else np.zeros(0)
        # Failures are counted over all prompts, everything else is a mean over them.
        counted = (
            MetricEstimate(float(change.sum()), None) if name == ERROR_COUNT else estimate_mean(change, mean_interval)
        )
        rows.append(PairedMetric(name, figures[0][name], figures[1][name], counted))
    return rows


def _unjudged_notes(change: np.ndarray) -> Iterator[str]:
    if num_unknown := int(np.isnan(change).sum()):
        yield f"{num_unknown} of the prompts have no value in one of the files, and are neither better, worse nor alike"


def _notes(first: EvaluationResults, second: EvaluationResults) -> Iterator[str]:
    """What else is not the same, and what nobody knows to be."""
    for one in (first, second):
        if one.metadata is None:
            yield f"no {metadata_path(one.path).name} says under which settings {one.path} was made"
    if first.metadata and second.metadata:
        known = first.metadata.facts, second.metadata.facts
        for name in dict.fromkeys([*known[0], *known[1]]):
            was, now = (facts.get(name) for facts in known)
            if was != now and name not in EXPECTED_DIFFERENCES:
                yield f"{name} differs" if name == "the tokenizer" else f"{name} was {was}, and is {now}"
    if any(not np.array_equal(first.prompt(uid).token_ids, second.prompt(uid).token_ids) for uid in first.groups):
        yield "the same questions are other tokens: another tokenizer, chat template or data.system_prompt"
