"""Computes the metrics of an evaluation and their intervals from graded samples, without a device.

Every metric is a mean over prompts. A table has one row per prompt: the samples of a prompt form one cluster, and
evaluations of the same prompts can be compared prompt by prompt.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

from app.records.sample import Prompt, Sample
from app.records.typed_values import to_text
from app.report.confidence_intervals import Interval, MetricEstimate, clustered_share_interval, mean_interval
from app.reward.aggregate import ERRORS_FIELD, was_dropped_in_rollout
from app.reward.builtin_tasks import is_task_reward, task_of
from app.reward.reward_functions import accuracy_function_name
from settings import Settings
from settings.errors import InputError, join_words
from settings.loading.fields import did_you_mean, nearest_names

PromptTable = Mapping[str, np.ndarray]
"""Maps the name of a column to one value per prompt; NaN for a prompt without a value."""

ACCURACY, FORMAT_RATE, TRUNCATED_FRACTION = "eval/accuracy", "eval/format_rate", "eval/truncated_fraction"
MEAN_LENGTH, ERROR_COUNT = "eval/mean_length", "eval/error_count"
PASS_AT_PREFIX, MAJORITY_PREFIX = "eval/pass@", "eval/maj@"
DIFFICULTY, NON_BINARY_COUNT = "difficulty", "values that are neither 0 nor 1"
"""Columns of a `PromptTable` that are not metrics."""


def pass_at_k_sizes(num_samples: int) -> list[int]:
    """Returns the values of k for pass@k: 2, 4, 8, ... and all samples. pass@1 is the accuracy."""
    return sorted({*(1 << i for i in range(1, num_samples.bit_length())), num_samples} - {1})


def pass_at_k(num_right: int, num_samples: int, k: int) -> float:
    """Computes pass@k = 1 - C(n - c, k) / C(n, k), with c of n samples correct.

    This is the probability that k samples, drawn without replacement, contain a correct one. It is an unbiased estimate
    for k new samples.

    Source: Chen et al. 2021, Evaluating large language models trained on code, equation 1.

    Raises:
        ValueError: there are fewer than k samples.
    """
    if k > num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, got {num_samples}")
    # Python's integers are exact, so that only the quotient is rounded.
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority_vote_accuracy(answers: Sequence[Hashable | None], reference: Hashable) -> float:
    """Returns the probability that the most frequent answer is correct, with ties broken at random.

    It is 1/t if the reference is one of t most frequent answers, else 0. Samples without an answer (None) do not vote;
    without any vote the result is 0.

    Source: Wang et al. 2022, Self-consistency improves chain of thought reasoning in language models.
    """
    counts = Counter(vote for vote in answers if vote is not None)
    most = max(counts.values(), default=0)
    winners = [vote for vote, count in counts.items() if count == most]
    return 1 / len(winners) if reference in winners else 0.0


def accuracy_metric_name(difficulty: float) -> str:
    """Returns the name of the accuracy on problems of one difficulty."""
    return f"{ACCURACY}/difficulty_{difficulty:g}"


def prompt_columns(samples: Sequence[Sample], *, judge: str, num_samples: int) -> dict[str, list[float]]:
    """Returns the columns of a `PromptTable`. Their names do not depend on the samples.

    Args:
        samples: the graded samples, `num_samples` consecutive ones per prompt.
        judge: the reward function whose values determine correctness.
    """
    groups = [samples[i : i + num_samples] for i in range(0, len(samples), num_samples)]
    values = [
        [value for s in group if not math.isnan(value := (s.rewards or {}).get(judge, math.nan))] for group in groups
    ]
    columns: dict[str, list[float]] = {
        ACCURACY: [_mean(group_values) for group_values in values],
        FORMAT_RATE: [_mean([task_of(judge).is_formatted(s.completion) for s in group]) for group in groups]
        if is_task_reward(judge)
        else [math.nan] * len(groups),
        TRUNCATED_FRACTION: [_mean([s.finish_reason == "length" for s in group]) for group in groups],
        MEAN_LENGTH: [_mean([len(s.completion_ids) for s in group]) for group in groups],
        ERROR_COUNT: [sum(ERRORS_FIELD in s.extra for s in group) for group in groups],
        DIFFICULTY: [prompt_difficulty(group[0].prompt) for group in groups],
        NON_BINARY_COUNT: [sum(value not in (0, 1) for value in group_values) for group_values in values],
    }
    for k in pass_at_k_sizes(num_samples):
        # NaN if the judge gave fewer than k values.
        columns[f"{PASS_AT_PREFIX}{k}"] = [
            pass_at_k(group.count(1), len(group), k) if k <= len(group) else math.nan for group in values
        ]
    if num_samples > 1 and is_task_reward(judge):
        columns[f"{MAJORITY_PREFIX}{num_samples}"] = [_majority_correct(group, judge) for group in groups]
    return columns


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def _majority_correct(group: Sequence[Sample], judge: str) -> float:
    reference = task_of(judge).parse_reference(to_text(group[0].prompt.answer))
    if reference is None:
        return math.nan
    votes = [None if was_dropped_in_rollout(s) else task_of(judge).answer(s.completion) for s in group]
    return majority_vote_accuracy(votes, reference)


def prompt_difficulty(prompt: Prompt) -> float:
    """Returns the difficulty of a prompt; NaN if it is missing or not a number."""
    difficulty = prompt.extra.get(DIFFICULTY)
    return float(difficulty) if isinstance(difficulty, int | float) else math.nan


def estimate_metrics(table: PromptTable, *, num_samples: int) -> dict[str, MetricEstimate]:
    """Returns each metric's mean over the prompts, and the accuracy at each difficulty if the data have difficulties.

    Accuracy covers the samples with a value from the judge. The format rate is None unless the judge is a built-in
    task: only tasks define a format. pass@k is None if the judge gives values other than 0 and 1.
    """
    is_binary = not table[NON_BINARY_COUNT].any()

    def share(column: np.ndarray, num_samples: int = num_samples) -> MetricEstimate:
        return estimate_mean(column, functools.partial(clustered_share_interval, num_samples=num_samples))

    def accuracy(column: np.ndarray) -> MetricEstimate:
        return share(column) if is_binary else estimate_mean(column, mean_interval)

    estimates: dict[str, MetricEstimate] = {}
    for name, column in table.items():
        if name in (DIFFICULTY, NON_BINARY_COUNT):
            continue
        if name == ERROR_COUNT:
            estimates[name] = MetricEstimate(float(column.sum()), None)
        elif name == ACCURACY:
            estimates[name] = accuracy(column)
        elif name == MEAN_LENGTH:
            estimates[name] = estimate_mean(column, mean_interval)
        elif name.startswith(PASS_AT_PREFIX) and not is_binary:
            estimates[name] = MetricEstimate(None, None)
        elif name.startswith(PASS_AT_PREFIX):
            # n // k trials when drawing k of n samples.
            estimates[name] = share(column, num_samples // int(name.removeprefix(PASS_AT_PREFIX)))
        else:
            # A vote of all samples is one trial.
            estimates[name] = share(column, 1 if name.startswith(MAJORITY_PREFIX) else num_samples)
    for level in difficulty_levels(table):
        estimates[accuracy_metric_name(level)] = accuracy(table[ACCURACY][table[DIFFICULTY] == level])
    return estimates


def estimate_mean(column: np.ndarray, compute_interval: Callable[[np.ndarray], Interval | None]) -> MetricEstimate:
    """Returns the mean of the values that are not NaN, and its interval."""
    known = column[~np.isnan(column)]
    return MetricEstimate(float(known.mean()), compute_interval(known)) if len(known) else MetricEstimate(None, None)


def difficulty_levels(table: PromptTable) -> list[float]:
    """Returns the distinct difficulties of the prompts, in ascending order."""
    levels = table[DIFFICULTY]
    return np.unique(levels[~np.isnan(levels)]).tolist()


def check_best_metric(settings: Settings, prompts: Sequence[Prompt]) -> None:
    """Raises InputError if evaluations on these prompts do not measure `checkpoint.best_metric`."""
    name, judge = settings.checkpoint.best_metric, accuracy_function_name(settings.reward)
    columns = prompt_columns([], judge=judge, num_samples=settings.eval.num_samples)
    levels = {level for prompt in prompts if not math.isnan(level := prompt_difficulty(prompt))}
    measured = [*(column for column in columns if column not in (DIFFICULTY, NON_BINARY_COUNT))]
    measured += map(accuracy_metric_name, sorted(levels))
    if not is_task_reward(judge):
        measured.remove(FORMAT_RATE)
    if name is not None and name not in measured:
        when = f" when {judge} grades" if name == FORMAT_RATE else ""
        suggestion = "" if when else did_you_mean(nearest_names(name, measured))
        raise InputError(
            f"checkpoint.best_metric: evaluations do not measure {name!r}{when}; choose {join_words(measured)}, or "
            f"null to keep no best checkpoint{suggestion}"
        )
