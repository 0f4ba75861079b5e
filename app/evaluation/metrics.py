"""Judged samples of held-out prompts -> the figures of an evaluation, with how far to trust them. Needs no device.

Every figure is a mean over prompts. A table holds a row for each prompt, so that what a prompt's samples have in common
counts once, and two evaluations of the same prompts can be compared prompt by prompt.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from app.prompts.dataset import DatasetRow
from app.records.sample import Prompt, Sample
from app.report.confidence_intervals import Interval, MetricEstimate, clustered_share_interval, mean_interval
from app.reward.aggregate import ERRORS_FIELD, was_dropped_in_rollout
from app.reward.pass_at_k import majority_vote_accuracy, pass_at_k
from app.reward.tasks import extract_answer, is_formatted, is_task_reward, reference_answer
from settings.errors import InputError
from settings.loading.fields import did_you_mean, nearest_names

PromptTable = Mapping[str, np.ndarray]
"""Column -> a value for each prompt, NaN where there is none."""

ACCURACY, FORMAT_RATE, TRUNCATED_FRACTION = "eval/accuracy", "eval/format_rate", "eval/truncated_fraction"
MEAN_LENGTH, ERROR_COUNT = "eval/mean_length", "eval/error_count"
PASS_AT_PREFIX, MAJORITY_PREFIX = "eval/pass@", "eval/maj@"
DIFFICULTY, NON_BINARY_COUNT = "difficulty", "values that are neither 0 nor 1"
"""Columns that are no figures."""


def pass_at_k_sizes(num_samples: int) -> list[int]:
    """Of how many samples pass@k is told: 2, 4, 8, ... and all. pass@1 is the accuracy."""
    return sorted({*(1 << i for i in range(1, num_samples.bit_length())), num_samples} - {1})


def accuracy_metric_name(difficulty: float) -> str:
    """The name of the accuracy on problems of one difficulty."""
    return f"{ACCURACY}/difficulty_{difficulty:g}"


def prompt_columns(samples: Sequence[Sample], *, judge: str, num_samples: int) -> dict[str, list[float]]:
    """A row for each prompt, whose samples stand together. The columns do not depend on the samples.

    Args:
        judge: the function whose values say what is right.
        num_samples: of every prompt.
    """
    groups = [samples[i : i + num_samples] for i in range(0, len(samples), num_samples)]
    values = [[(s.rewards or {}).get(judge, math.nan) for s in group] for group in groups]
    known = [[value for value in of_prompt if not math.isnan(value)] for of_prompt in values]
    columns: dict[str, list[float]] = {
        ACCURACY: [float(np.mean(of_prompt)) if of_prompt else math.nan for of_prompt in known],
        FORMAT_RATE: [_fraction(is_formatted(judge, s.completion) for s in group) for group in groups]
        if is_task_reward(judge)
        else [math.nan] * len(groups),
        TRUNCATED_FRACTION: [_fraction(s.finish_reason == "length" for s in group) for group in groups],
        MEAN_LENGTH: [float(np.mean([len(s.completion_ids) for s in group])) for group in groups],
        ERROR_COUNT: [sum(ERRORS_FIELD in s.extra for s in group) for group in groups],
        DIFFICULTY: [prompt_difficulty(group[0].prompt) for group in groups],
        NON_BINARY_COUNT: [sum(value not in (0, 1) for value in of_prompt) for of_prompt in known],
    }
    for k in pass_at_k_sizes(num_samples):
        columns[f"{PASS_AT_PREFIX}{k}"] = [_pass_at_k_or_nan(of_prompt, k) for of_prompt in known]
    if num_samples > 1 and is_task_reward(judge):
        columns[f"{MAJORITY_PREFIX}{num_samples}"] = [_majority_correct(group, judge) for group in groups]
    return columns


def _fraction(flags: Iterable[bool]) -> float:
    return float(np.mean([*flags]))


def _pass_at_k_or_nan(values: Sequence[float], k: int) -> float:
    """NaN where the judge gave fewer values than are to be drawn."""
    return pass_at_k(values.count(1), len(values), k) if k <= len(values) else math.nan


def _majority_correct(group: Sequence[Sample], judge: str) -> float:
    votes = [None if was_dropped_in_rollout(s) else extract_answer(judge, s.completion) for s in group]
    return majority_vote_accuracy(votes, reference_answer(judge, group[0].prompt))


def prompt_difficulty(prompt: Prompt | DatasetRow) -> float:
    """NaN where the data name none, or none that is a number."""
    found = prompt.extra.get(DIFFICULTY)
    return float(found) if isinstance(found, int | float) else math.nan


def estimate_metrics(table: PromptTable, *, num_samples: int) -> dict[str, MetricEstimate]:
    """The means over prompts, accuracy by difficulty where the data names one.

    Accuracy is over the samples that the judge gave a value. Format is None where no built-in task judges: only they
    know what an answer should look like. So is pass@k where the judge gives other values than 0 and 1.
    """
    graded = not table[NON_BINARY_COUNT].any()
    of_accuracy = functools.partial(clustered_share_interval, num_samples=num_samples) if graded else mean_interval
    figures: dict[str, MetricEstimate] = {}
    for name, column in table.items():
        if name == ERROR_COUNT:
            figures[name] = MetricEstimate(float(column.sum()), None)
        elif name in (ACCURACY, MEAN_LENGTH):
            figures[name] = estimate_mean(column, of_accuracy if name == ACCURACY else mean_interval)
        elif name.startswith(PASS_AT_PREFIX) and not graded:
            figures[name] = MetricEstimate(None, None)
        elif name not in (DIFFICULTY, NON_BINARY_COUNT):
            drawn = num_trials(name, num_samples)
            figures[name] = estimate_mean(column, functools.partial(clustered_share_interval, num_samples=drawn))
    for level in difficulty_levels(table):
        figures[accuracy_metric_name(level)] = estimate_mean(table[ACCURACY][table[DIFFICULTY] == level], of_accuracy)
    return figures


def num_trials(name: str, num_samples: int) -> int:
    """How often a figure was tried on each prompt: a vote takes all samples, and drawing k of n goes n // k times."""
    if name.startswith(MAJORITY_PREFIX):
        return 1
    return num_samples // int(name.removeprefix(PASS_AT_PREFIX)) if name.startswith(PASS_AT_PREFIX) else num_samples


def estimate_mean(column: np.ndarray, compute_interval: Callable[[np.ndarray], Interval | None]) -> MetricEstimate:
    """The mean of those that are known."""
    known = column[~np.isnan(column)]
    return MetricEstimate(float(known.mean()), compute_interval(known)) if len(known) else MetricEstimate(None, None)


def difficulty_levels(table: PromptTable) -> list[float]:
    """The difficulties that there are."""
    levels = table[DIFFICULTY]
    return np.unique(levels[~np.isnan(levels)]).tolist()


def check_best_metric(
    name: str, prompts: Sequence[Prompt] | Sequence[DatasetRow], *, judge: str, num_samples: int
) -> None:
    """Raises InputError where evaluations on these prompts do not measure what is to choose the best checkpoint."""
    columns = prompt_columns([], judge=judge, num_samples=num_samples)
    levels = {level for prompt in prompts if not math.isnan(level := prompt_difficulty(prompt))}
    measured = [*(column for column in columns if column not in (DIFFICULTY, NON_BINARY_COUNT))]
    measured += map(accuracy_metric_name, sorted(levels))
    if not is_task_reward(judge):
        measured.remove(FORMAT_RATE)
    if name not in measured:
        reason = f" where {judge} judges" if name == FORMAT_RATE else did_you_mean(nearest_names(name, measured))
        raise InputError(
            f"checkpoint.best_metric: evaluations do not measure {name!r}{reason} (they measure "
            f"{', '.join(measured)}; null keeps no best checkpoint)"
        )
