"""Judged samples of held-out prompts -> the figures of an evaluation, with how far to trust them. Needs no device.

Every figure is a mean over prompts. A table holds a row for each prompt, so that what a prompt's samples have in common
counts once, and two evaluations of the same prompts can be compared prompt by prompt.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from app.prompts.dataset import Row
from app.records.sample import Prompt, Sample
from app.report.confidence_intervals import Interval, Measured, mean_interval, share_interval
from app.reward.aggregate import ERRORS_FIELD, is_unusable
from app.reward.pass_at_k import majority_share, pass_at_k
from app.reward.tasks import is_formatted, is_task_reward, right_vote, vote
from settings.errors import InputError
from settings.loading.fields import did_you_mean, nearest_of

Table = Mapping[str, np.ndarray]
"""Column -> a value for each prompt, NaN where there is none."""

ACCURACY, FORMAT_RATE, TRUNCATED = "eval/accuracy", "eval/format_rate", "eval/truncated_fraction"
MEAN_LENGTH, ERROR_COUNT = "eval/mean_length", "eval/error_count"
PASS_AT, MAJORITY_OF = "eval/pass@", "eval/maj@"
DIFFICULTY, OTHER_VALUES = "difficulty", "values that are neither 0 nor 1"
"""Columns that are no figures."""


def drawn_counts(num_samples: int) -> list[int]:
    """Of how many samples pass@k is told: 2, 4, 8, ... and all. pass@1 is the accuracy."""
    return sorted({*(1 << i for i in range(1, num_samples.bit_length())), num_samples} - {1})


def accuracy_at(difficulty: float) -> str:
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
        FORMAT_RATE: [_share(is_formatted(judge, s.completion) for s in group) for group in groups]
        if is_task_reward(judge)
        else [math.nan] * len(groups),
        TRUNCATED: [_share(s.finish_reason == "length" for s in group) for group in groups],
        MEAN_LENGTH: [float(np.mean([len(s.completion_ids) for s in group])) for group in groups],
        ERROR_COUNT: [sum(ERRORS_FIELD in s.extra for s in group) for group in groups],
        DIFFICULTY: [difficulty_of(group[0].prompt) for group in groups],
        OTHER_VALUES: [sum(value not in (0, 1) for value in of_prompt) for of_prompt in known],
    }
    for k in drawn_counts(num_samples):
        columns[f"{PASS_AT}{k}"] = [_passes(of_prompt, k) for of_prompt in known]
    if num_samples > 1 and is_task_reward(judge):
        columns[f"{MAJORITY_OF}{num_samples}"] = [_majority(group, judge) for group in groups]
    return columns


def _share(flags: Iterable[bool]) -> float:
    return float(np.mean([*flags]))


def _passes(values: Sequence[float], k: int) -> float:
    """NaN where the judge gave fewer values than are to be drawn."""
    return pass_at_k(values.count(1), len(values), k) if k <= len(values) else math.nan


def _majority(group: Sequence[Sample], judge: str) -> float:
    votes = [None if is_unusable(s) else vote(judge, s.completion) for s in group]
    return majority_share(votes, right_vote(judge, group[0].prompt))


def difficulty_of(prompt: Prompt | Row) -> float:
    """NaN where the data name none, or none that is a number."""
    found = prompt.extra.get(DIFFICULTY)
    return float(found) if isinstance(found, int | float) else math.nan


def figures_of(table: Table, *, num_samples: int) -> dict[str, Measured]:
    """The means over prompts, accuracy by difficulty where the data names one.

    Accuracy is over the samples that the judge gave a value. Format is None where no built-in task judges: only they
    know what an answer should look like. So is pass@k where the judge gives other values than 0 and 1.
    """
    graded = not table[OTHER_VALUES].any()
    of_accuracy = functools.partial(share_interval, num_samples=num_samples) if graded else mean_interval
    figures: dict[str, Measured] = {}
    for name, column in table.items():
        if name == ERROR_COUNT:
            figures[name] = Measured(float(column.sum()), None)
        elif name in (ACCURACY, MEAN_LENGTH):
            figures[name] = mean_figure(column, of_accuracy if name == ACCURACY else mean_interval)
        elif name.startswith(PASS_AT) and not graded:
            figures[name] = Measured(None, None)
        elif name not in (DIFFICULTY, OTHER_VALUES):
            drawn = trials_of(name, num_samples)
            figures[name] = mean_figure(column, functools.partial(share_interval, num_samples=drawn))
    for level in levels_of(table):
        figures[accuracy_at(level)] = mean_figure(table[ACCURACY][table[DIFFICULTY] == level], of_accuracy)
    return figures


def trials_of(name: str, num_samples: int) -> int:
    """How often a figure was tried on each prompt: a vote takes all samples, and drawing k of n goes n // k times."""
    if name.startswith(MAJORITY_OF):
        return 1
    return num_samples // int(name.removeprefix(PASS_AT)) if name.startswith(PASS_AT) else num_samples


def mean_figure(column: np.ndarray, interval_of: Callable[[np.ndarray], Interval | None]) -> Measured:
    """The mean of those that are known."""
    known = column[~np.isnan(column)]
    return Measured(float(known.mean()), interval_of(known)) if len(known) else Measured(None, None)


def levels_of(table: Table) -> list[float]:
    """The difficulties that there are."""
    levels = table[DIFFICULTY]
    return np.unique(levels[~np.isnan(levels)]).tolist()


def check_best_metric(name: str, prompts: Sequence[Prompt] | Sequence[Row], *, judge: str, num_samples: int) -> None:
    """Raises InputError where evaluations on these prompts do not measure what is to choose the best checkpoint."""
    columns = prompt_columns([], judge=judge, num_samples=num_samples)
    levels = {level for prompt in prompts if not math.isnan(level := difficulty_of(prompt))}
    measured = [*(column for column in columns if column not in (DIFFICULTY, OTHER_VALUES))]
    measured += map(accuracy_at, sorted(levels))
    if not is_task_reward(judge):
        measured.remove(FORMAT_RATE)
    if name not in measured:
        reason = f" where {judge} judges" if name == FORMAT_RATE else did_you_mean(nearest_of(name, measured))
        raise InputError(
            f"checkpoint.best_metric: evaluations do not measure {name!r}{reason} (they measure "
            f"{', '.join(measured)}; null keeps no best checkpoint)"
        )
