"""`grpo evaluate --compare`: compares two evaluations of the same prompts, without a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from app.evaluation.metadata import JUDGE, EvaluationMetadata, metadata_path, read_metadata
from app.evaluation.printed_summary import format_estimate, is_shown
from app.evaluation.prompt_metrics import (
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
from app.records.atomic_write import write_atomic
from app.records.identity import CHECKPOINT, MODEL, PROMPTS, TOKENIZER, different_names
from app.records.jsonl import check_distinct_paths
from app.records.run_directory import RunDirectory
from app.records.sample import Prompt, Sample
from app.records.sample_json import read_samples
from app.records.text_format import format_interval, format_table
from app.report.before_after import format_metric
from app.report.confidence_intervals import MetricEstimate, mean_interval, sign_test
from app.report.matplotlib_figures import check_picture_path, new_figure, save_figure
from app.report.plots import BLUE, GREY, ORANGE, escape_label
from app.reward.builtin_tasks import is_task_reward
from settings.errors import InputError, join_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXPECTED_DIFFERENCES = {MODEL, CHECKPOINT}
"""Facts whose differences need no note, because the labels show them."""
HASHED_FACTS = {PROMPTS: "the prompts differ in their tokens or in other columns", TOKENIZER: f"{TOKENIZER} differs"}
"""Maps each fact that is stored as a digest to the note that is shown if it differs."""
CHANGE_DECIMALS = 9
"""Number of decimals to which differences are rounded; others may be errors from the order of summation."""


ROW_HEIGHT, MARGIN, WIDTH = 0.42, 1.5, 9.0
"""Sizes of the plot in inches."""
MARKER_OFFSET = 0.16
"""Offset of the before and after markers from the middle of their row, in rows."""
MIN_SHOWN_P = 1e-6


@dataclass(frozen=True, slots=True)
class PairedMetric:
    """The estimates of one metric in both evaluations, and of its change."""

    name: str
    """Name as in `metrics.jsonl`, such as `eval/accuracy`."""
    before: MetricEstimate
    after: MetricEstimate
    difference: MetricEstimate
    """The mean of after - before, over the prompts with a value in both."""


@dataclass(frozen=True, slots=True)
class EvaluationComparison:
    """The result of comparing two evaluations prompt by prompt."""

    before: str
    after: str
    """`before` and `after` are the labels of the evaluated models."""
    num_prompts: int
    judge: str
    has_plugin_judge: bool
    """Whether the judge is a plug-in, whose values need not be in [0, 1]."""
    metrics: Sequence[PairedMetric]
    num_better: int
    num_worse: int
    num_equal: int
    """`num_better`, `num_worse` and `num_equal` count prompts with higher, lower and equal accuracy; prompts without an
    accuracy before or after are not counted."""
    test: str
    p_value: float
    notes: Sequence[str]
    """Notes on differences between the evaluations other than the model."""

    def to_dict(self) -> dict[str, Any]:
        metrics = {
            row.name: {end: getattr(row, end)._asdict() for end in ("before", "after", "difference")}
            for row in self.metrics
        }
        return {
            "before": self.before,
            "after": self.after,
            "prompts": self.num_prompts,
            "judge": self.judge,
            "metrics": metrics,
            "better": self.num_better,
            "worse": self.num_worse,
            "alike": self.num_equal,
            "test": self.test,
            "p": self.p_value,
            "notes": [*self.notes],
        }

    @property
    def verdict(self) -> str:
        """The numbers of prompts with higher, lower and equal accuracy, and the p-value, as text."""
        p = f"p < {MIN_SHOWN_P:g}" if self.p_value < MIN_SHOWN_P else f"p = {self.p_value:.2g}"
        return f"{self.num_better} prompts better, {self.num_worse} worse, {self.num_equal} equal: {p} ({self.test})"

    def to_text(self) -> str:
        rows = [
            (
                row.name.removeprefix("eval/"),
                *(" ".join(format_estimate(row.name, end, self.has_plugin_judge)) for end in (row.before, row.after)),
                self._format_difference(row),
            )
            for row in self.metrics
        ]
        lines = [
            f"before  {self.before}",
            f"after   {self.after}",
            f"{self.num_prompts} prompts, graded by {self.judge}; 95 % intervals in brackets",
            "",
            format_table(rows, header=("", "before", "after", "difference")),
            "",
            self.verdict,
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _format_difference(self, row: PairedMetric) -> str:
        """Formats a difference with its sign; differences of fractions are in percentage points."""
        if row.difference.value is None:
            return "–"

        def signed(change: float) -> str:
            text = format_metric(row.name, change, by_plug_in=self.has_plugin_judge)
            return "+" * (not text.startswith("-")) + text

        text = f"{signed(row.difference.value)} {format_interval(row.difference.interval, signed)}"
        return text.replace(" %", " pp", 1).replace(" %", "").rstrip()


@dataclass(frozen=True)
class EvaluationResults:
    """The content of a file of graded samples."""

    path: Path
    metadata: EvaluationMetadata | None
    """Content of the metadata file; None for the evaluations during a run, which have none."""
    judge: str
    num_samples: int
    """Samples per prompt."""
    groups: Mapping[str, Sequence[Sample]]
    """Maps the uid of each prompt to its samples."""

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
    """Computes the metrics of both files, their differences prompt by prompt, and a significance test.

    Raises:
        InputError: the files cannot be read or compared, or the plot cannot be written.
    """
    check_distinct_paths({"--compare BEFORE": before, "--compare AFTER": after, "--picture": plot_path})
    if plot_path is not None:
        check_picture_path(plot_path, "--picture", (".png",))
    first, second = read_evaluation_results(before), read_evaluation_results(after)
    _check_comparable(first, second)
    uids = [*first.groups]
    tables = first.prompt_table(uids), second.prompt_table(uids)
    changes = _prompt_differences(*tables, ACCURACY)
    better, worse = int((changes > 0).sum()), int((changes < 0).sum())
    is_binary = all(np.isin(table[ACCURACY][~np.isnan(table[ACCURACY])], (0, 1)).all() for table in tables)
    comparison = EvaluationComparison(
        first.label,
        second.label,
        num_prompts=len(uids),
        judge=first.judge,
        has_plugin_judge=not is_task_reward(first.judge),
        metrics=_paired_metrics(*tables, num_samples=first.num_samples),
        num_better=better,
        num_worse=worse,
        num_equal=int((changes == 0).sum()),
        test="exact McNemar test" if is_binary else "exact sign test over prompts",
        p_value=sign_test(better, worse),
        notes=[*_notes(first, second, num_unjudged=int(np.isnan(changes).sum()))],
    )
    if plot_path is not None:
        write_plot(plot_path, comparison)
    return comparison


def read_evaluation_results(path: Path) -> EvaluationResults:
    """Reads the samples of `grpo evaluate --out` or of an evaluation during training.

    Raises:
        InputError: the file cannot be read, or lacks graded samples of the evaluation.
    """
    groups: dict[str, list[Sample]] = {}
    for _, sample in read_samples(path):
        groups.setdefault(sample.prompt.uid, []).append(sample)
    if not groups:
        raise InputError(f"--compare: {path} contains no samples; give a file written by grpo evaluate --out")
    metadata = read_metadata(path)
    judge = _find_judge(path, metadata, [sample for group in groups.values() for sample in group])
    num_samples = max(len({sample.sample_index for sample in group}) for group in groups.values())
    for uid, group in groups.items():
        group.sort(key=lambda sample: sample.sample_index)
        if [sample.sample_index for sample in group] != [*range(num_samples)]:
            expected = "sample 0" if num_samples == 1 else f"each of the samples 0 to {num_samples - 1}"
            raise InputError(
                f"--compare: {path} is incomplete: expected {expected} of {uid} once; write it again with grpo "
                "evaluate --out"
            )
    return EvaluationResults(path, metadata, judge, num_samples, groups)


def _find_judge(path: Path, metadata: EvaluationMetadata | None, samples: Sequence[Sample]) -> str:
    """Returns the name of the reward function that graded the samples."""
    if metadata is not None and all(sample.rewards is not None for sample in samples):
        return metadata.facts[JUDGE]
    names = sorted({name for sample in samples for name in sample.rewards or {}})
    if len(names) != 1:
        got = f"the values of {join_words(names, last='and')}" if names else "no values"
        raise InputError(
            f"--compare: expected graded samples with one value each in `rewards`; {path} has {got}; use a file from "
            "grpo evaluate --out"
        )
    return names[0]


def _check_comparable(first: EvaluationResults, second: EvaluationResults) -> None:
    """Raises InputError if the judge, the number of samples per prompt or the prompts differ."""
    both = f"{first.path} and {second.path}"
    if first.judge != second.judge:
        raise InputError(
            f"--compare: {both} were graded by different functions: {first.judge} and {second.judge}; "
            "evaluate both with the same reward.functions"
        )
    if first.num_samples != second.num_samples:
        raise InputError(
            f"--compare: {both} have different numbers of samples per prompt: eval.num_samples is {first.num_samples} "
            f"in the first and {second.num_samples} in the second. The sign test would be biased even for one model; "
            "evaluate one of them again with the eval.num_samples of the other and a new --out"
        )
    missing = {
        "first": [uid for uid in first.groups if uid not in second.groups],
        "second": [uid for uid in second.groups if uid not in first.groups],
    }
    if any(missing.values()):
        only = [f"{len(uids)} only in the {file} (such as {uids[0]})" for file, uids in missing.items() if uids]
        raise InputError(
            f"--compare: {both} have different prompts, {' and '.join(only)}; evaluate both with the same "
            "data.eval_source, data.eval_split and eval.num_prompts"
        )
    for uid in first.groups:
        one, other = first.prompt(uid), second.prompt(uid)
        if (one.source, one.answer) != (other.source, other.answer):
            raise InputError(
                f"--compare: {both} come from different data: the question or answer of {uid} differs; "
                "evaluate both on the same data"
            )


def _prompt_differences(before: PromptTable, after: PromptTable, column: str) -> np.ndarray:
    """Returns after - before for every prompt; NaN for a prompt without a value before or after."""
    return np.round(after[column] - before[column], CHANGE_DECIMALS)


def _paired_metrics(before: PromptTable, after: PromptTable, *, num_samples: int) -> list[PairedMetric]:
    """Returns a row for each metric that both evaluations measure."""
    old, new = (estimate_metrics(table, num_samples=num_samples) for table in (before, after))
    columns = {name: (name, slice(None)) for name in before if name not in (DIFFICULTY, NON_BINARY_COUNT)}
    columns |= {
        accuracy_metric_name(level): (ACCURACY, before[DIFFICULTY] == level) for level in difficulty_levels(before)
    }
    rows = []
    for name, (column, selection) in columns.items():
        if name not in new or not (is_shown(name, old[name]) or is_shown(name, new[name])):
            continue
        is_measured = old[name].value is not None and new[name].value is not None
        changes = _prompt_differences(before, after, column)[selection] if is_measured else np.zeros(0)
        # Errors are counted over all prompts; every other metric is a mean over them.
        is_count = name == ERROR_COUNT
        difference = MetricEstimate(float(changes.sum()), None) if is_count else estimate_mean(changes, mean_interval)
        rows.append(PairedMetric(name, old[name], new[name], difference))
    return rows


def _notes(first: EvaluationResults, second: EvaluationResults, *, num_unjudged: int) -> Iterator[str]:
    """Yields notes on differences between the evaluations other than the model, and on unknown facts."""
    if num_unjudged:
        yield f"{num_unjudged} of the prompts have no value in one of the files and are not counted"
    folders = {one.path.resolve().parent for one in (first, second)}
    # Evaluations of one run differ only in their step.
    are_of_a_run = len(folders) == 1 and RunDirectory(folders.pop().parent).has_settings
    for one in (first, second):
        if one.metadata is None and not are_of_a_run:
            yield f"{metadata_path(one.path).name} does not exist, so the settings that produced {one.path} are unknown"
    if first.metadata and second.metadata:
        old, new = first.metadata.facts, second.metadata.facts
        for name in different_names(old, new):
            if name not in EXPECTED_DIFFERENCES:
                yield HASHED_FACTS.get(name, f"{name} was {old.get(name)} and is now {new.get(name)}")


def write_plot(path: Path, comparison: EvaluationComparison) -> None:
    """Plots the metrics before and after, and their differences, with intervals. The file is reproducible to the byte.

    Only metrics that fit on one axis are drawn: fractions, or the accuracies of a plug-in judge.
    """
    from matplotlib.ticker import PercentFormatter

    by_plugin = comparison.has_plugin_judge
    metrics = [
        row
        for row in comparison.metrics
        if (row.name.startswith("eval/accuracy") if by_plugin else not row.name.endswith(("_length", "_count")))
    ]
    with new_figure(WIDTH, MARGIN + ROW_HEIGHT * max(len(metrics), 2)) as figure:
        values, changes = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
        places = np.arange(len(metrics))
        before, after, difference = (
            [getattr(row, end) for row in metrics] for end in ("before", "after", "difference")
        )
        _draw_points(values, before, places - MARKER_OFFSET, GREY, f"before: {comparison.before}")
        _draw_points(values, after, places + MARKER_OFFSET, BLUE, f"after: {comparison.after}")
        _draw_points(changes, difference, places, ORANGE, "difference")
        changes.axvline(0, color=GREY, linewidth=1.0, zorder=0)
        values.set_yticks(places, [escape_label(row.name.removeprefix("eval/")) for row in metrics])
        values.set_ylim(len(metrics) - 0.5, -0.5)
        for axes in (values, changes):
            axes.tick_params(axis="y", length=0)
            axes.grid(axis="y", visible=False)
            axes.margins(x=0.05)
            if not by_plugin:
                axes.xaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
        if not by_plugin:
            values.set_xlim(-0.02, 1.02)
        values.set_xlabel("mean over prompts, 95 % interval")
        changes.set_xlabel("after − before, per prompt")
        figure.suptitle(f"{comparison.num_prompts} prompts. {comparison.verdict}", x=0.01, ha="left", fontsize=9)
        figure.legend(loc="outside lower left", ncols=1, frameon=False)
        write_atomic(path, save_figure(figure, "png"))


def _draw_points(axes: Axes, estimates: Sequence[MetricEstimate], places: np.ndarray, color: str, label: str) -> None:
    """Draws each estimate as a dot with its interval, at the given height."""
    values = np.array([np.nan if one.value is None else one.value for one in estimates])
    ends = np.array([one.interval or (value, value) for one, value in zip(estimates, values, strict=True)])
    style = {"fmt": "o", "color": color, "markersize": 5, "elinewidth": 1.6, "label": escape_label(label)}
    axes.errorbar(values, places, xerr=np.abs(ends.reshape(-1, 2).T - values), **style)
