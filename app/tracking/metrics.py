"""A step's samples -> the numbers of `metrics.jsonl`, over all hosts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from app.advantage.group import zero_variance_fraction
from app.distributed.collectives import (
    sum_over_hosts,
)
from app.distributed.tables import gather_names, gather_table
from app.records.sample import Sample
from app.reward.aggregate import RewardedSamples


def sample_metrics(samples: Sequence[Sample], functions: Sequence[str]) -> dict[str, float]:
    """Rewards and lengths of the samples that have a reward.

    Population statistics (ddof = 0) over samples. NaN where no sample has a value.

    Args:
        functions: names of the reward functions; one may have no value for some of the samples.
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
    """This host's part of `reward_counts`: the counts, and of plug-ins' further numbers their sums and counts."""
    counts = {
        "reward/error_count": scored.num_errors,
        "reward/abstained_count": scored.num_abstained,
        "reward/dropped_count": sum(s.reward is None for s in scored.samples),
        **{f"reward/{name}/error_count": tally.num_errors for name, tally in scored.function_counts.items()},
    }
    extras = {
        f"reward/{name}/{key}/mean": x
        for name, tally in scored.function_counts.items()
        for key, x in tally.extras.items()
    }
    return counts, extras


def reward_counts(scored: RewardedSamples) -> dict[str, float]:
    """What failed, what abstained, what was left out, and the further numbers of plug-ins; over all hosts."""
    counts, extras = local_reward_counts(scored)
    totals = sum_over_hosts(np.asarray(list(counts.values())))
    # Which further numbers there are depends on the samples, so hosts must first agree on their names.
    names = gather_names(extras)
    sums = sum_over_hosts(np.asarray([extras.get(name, (0.0, 0)) for name in names]).reshape(-1, 2))
    return {
        **{name: int(total) for name, total in zip(counts, totals, strict=True)},
        **{name: float(total / count) for name, (total, count) in zip(names, sums, strict=True)},
    }


def mean_ignoring_nan(values: np.ndarray) -> float:
    """The mean of those that are not NaN; NaN where none is."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")
