"""Metrics of a step's samples, over all hosts."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from app.advantage.group import zero_variance_fraction
from app.distributed.collectives import gather_bytes_over_hosts, sum_over_hosts
from app.distributed.tables import gather_table
from app.records.sample import Sample
from app.reward.aggregate import RewardedSamples


def sample_metrics(samples: Sequence[Sample], functions: Sequence[str]) -> dict[str, float]:
    """Returns statistics of rewards and lengths over the samples that have a reward.

    Standard deviations are of the population (ddof = 0). A metric without values is NaN.

    Args:
        functions: names of the reward functions; some samples may have no value for a function.
    """
    kept = [s for s in samples if s.reward is not None]
    columns: dict[str, Sequence[float]] = {
        "reward": [s.reward or 0.0 for s in kept],
        "group": [s.group_id for s in kept],
        "length": [len(s.completion_ids) for s in kept],
        "truncated": [s.finish_reason == "length" for s in kept],
    }
    values = {f"reward/{name}/mean": [(s.rewards or {}).get(name, np.nan) for s in kept] for name in functions}
    table = gather_table({**columns, **values})
    rewards, lengths = table["reward"], table["length"]
    metrics = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "reward/zero_variance_fraction": zero_variance_fraction(rewards, table["group"]),
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/truncated_fraction": table["truncated"].mean(),
        **{name: mean_ignoring_nan(table[name]) for name in values},
    }
    return {name: float(value) for name, value in metrics.items()}


def local_reward_counts(scored: RewardedSamples) -> tuple[dict[str, int], dict[str, tuple[float, int]]]:
    """Returns this host's part of `reward_counts`: counts, and sum and count of each additional plug-in metric."""
    counts = {
        "reward/error_count": scored.num_errors,
        "reward/abstained_count": scored.num_abstained,
        "reward/dropped_count": sum(s.reward is None for s in scored.samples),
        **{f"reward/{name}/error_count": function.num_errors for name, function in scored.function_counts.items()},
    }
    extras = {
        f"reward/{name}/{key}/mean": x
        for name, function in scored.function_counts.items()
        for key, x in function.extras.items()
    }
    return counts, extras


def reward_counts(scored: RewardedSamples) -> dict[str, float]:
    """Returns counts of errors, abstentions and dropped samples, and means of plug-in metrics, over all hosts."""
    counts, extras = local_reward_counts(scored)
    totals = sum_over_hosts(np.asarray(list(counts.values())))
    # The names of plug-in metrics depend on the samples, so hosts must gather them first.
    gathered = gather_bytes_over_hosts(json.dumps([*extras]).encode())
    names = sorted({name for host in gathered for name in json.loads(host)})
    sums = sum_over_hosts(np.asarray([extras.get(name, (0.0, 0)) for name in names]).reshape(-1, 2))
    return {
        **{name: int(total) for name, total in zip(counts, totals, strict=True)},
        **{name: float(total / count) for name, (total, count) in zip(names, sums, strict=True)},
    }


def mean_ignoring_nan(values: np.ndarray) -> float:
    """Returns the mean of the values that are not NaN; NaN if there are none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")
