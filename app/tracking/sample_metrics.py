"""Computes metrics over the samples and episodes of a step on all hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from app.advantage.advantage_metrics import moments_over_hosts
from app.advantage.group import zero_variance_fraction
from app.distributed.collectives import gather_json_over_hosts, gather_table, sum_over_hosts
from app.records.moments import compute_moments
from app.records.sample import EPISODE_ENDS, Sample
from app.reward.aggregate import RewardedSamples
from app.update.kl import k1, k3

TOOL_COUNTS = ("tool_calls", "tool_errors")
"""Metrics of a turn that are summed over the turns of a sample."""
MAX_NAMES = 32
"""Maximum number of an environment's scores, and of its other metrics, that are recorded."""


def sample_metrics(
    samples: Sequence[Sample], functions: Sequence[str], is_compared: Callable[[Sample], bool]
) -> dict[str, float]:
    """Returns statistics of rewards and lengths over the samples of all hosts that have a reward.

    Standard deviations are of the population (ddof = 0). A metric without values is NaN.

    Args:
        functions: names of the reward functions; a function may have no value for some samples.
        is_compared: whether a sample with a reward takes part in the statistics of its group.
    """
    kept = [s for s in samples if s.reward is not None]
    columns: dict[str, Sequence[float]] = {
        "reward": [s.reward or 0.0 for s in kept],
        "group": [s.group_id for s in kept],
        "compared": [is_compared(s) for s in kept],
        "length": [len(s.completion_ids) for s in kept],
        "truncated": [s.finish_reason == "length" for s in kept],
    }
    values = {f"reward/{name}/mean": [(s.rewards or {}).get(name, np.nan) for s in kept] for name in functions}
    table = gather_table({**columns, **values})
    rewards, lengths, compared = table["reward"], table["length"], table["compared"].astype(bool)
    metrics = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "reward/zero_variance_fraction": zero_variance_fraction(rewards[compared], table["group"][compared]),
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/truncated_fraction": table["truncated"].mean(),
    }
    for name in values:
        known = table[name][~np.isnan(table[name])]
        metrics[name] = known.mean() if len(known) else np.nan
    return {name: float(value) for name, value in metrics.items()}


def reward_counts(scored: RewardedSamples) -> dict[str, float]:
    """Returns, over all hosts, the counts of errors, abstentions and dropped samples, and means of plug-in metrics."""
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
    totals = sum_over_hosts(list(counts.values()))
    # The names of plug-in metrics depend on the samples, so hosts must gather them first.
    names = sorted({name for host in gather_json_over_hosts([*extras]) for name in host})
    sums = sum_over_hosts(np.asarray([extras.get(name, (0.0, 0)) for name in names]).reshape(-1, 2))
    return {
        **{name: int(total) for name, total in zip(counts, totals, strict=True)},
        **{name: float(total / count) for name, (total, count) in zip(names, sums, strict=True)},
    }


def mismatch_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Returns the perplexities of sampler and trainer and their KL; empty if no sample has `policy_logprobs`.

    Perplexities are exp(-mean of a sample's logprobs), averaged over samples; `log_ppl_diff` is the mean of
    log(training perplexity / rollout perplexity). The KL is an average over tokens: `kl` is E[d] and `k3_kl` is
    E[exp(-d) + d - 1], with d = behavior_logprobs - policy_logprobs. All hosts must call it together.

    Source: `compute_offpolicy_metrics` of verl (`trainer/ppo/rollout_corr_helper.py`), for the names and definitions.
    """
    kept = [s for s in samples if s.policy_logprobs is not None and s.mask.any()]
    pairs = [(s.behavior_logprobs[s.mask], s.policy_logprobs[s.mask]) for s in kept if s.policy_logprobs is not None]
    rollout, training = -np.asarray([[x.mean(dtype=np.float64) for x in pair] for pair in pairs]).reshape(-1, 2).T
    behavior, policy = np.concatenate([np.zeros((2, 0)), *pairs], axis=1)
    values = {
        "mismatch/training_ppl": np.exp(training),
        "mismatch/rollout_ppl": np.exp(rollout),
        "mismatch/log_ppl_diff": training - rollout,
        "mismatch/kl": k1(behavior, policy),
        "mismatch/k3_kl": k3(behavior, policy),
    }
    moments = moments_over_hosts([compute_moments(x, np.ones(len(x), bool)) for x in values.values()])
    return {name: one.mean for name, one in zip(values, moments, strict=True) if one.count}


def episode_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Returns metrics over all episodes, including dropped samples; empty if no host has an episode.

    A score is averaged over the episodes that have it, any other metric of the environment over the turns that have it.
    All hosts must call it together.
    """
    local = [
        {
            "end": sample.episode.end,
            "tokens": len(sample.completion_ids),
            "seconds": sample.elapsed_s,
            "written": sum(turn.end - turn.start for turn in sample.episode.turns),
            "scores": dict(sample.episode.scores),
            "turns": [{**turn.metrics, "seconds": turn.seconds} for turn in sample.episode.turns],
        }
        for sample in samples
        if sample.episode is not None
    ]
    episodes = [episode for host in gather_json_over_hosts(local) for episode in host]
    if not episodes:
        return {}
    num_turns = [len(episode["turns"]) for episode in episodes]
    tokens, written = (np.array([episode[name] for episode in episodes]) for name in ("tokens", "written"))
    turns = [turn for episode in episodes for turn in episode["turns"]]
    metrics = {
        "episode/turns_mean": np.mean(num_turns),
        "episode/turns_p90": np.percentile(num_turns, 90),
        **{f"episode/end/{end}": np.mean([one["end"] == end for one in episodes]) for end in EPISODE_ENDS},
        "episode/written_tokens_mean": written.mean(),
        "episode/observed_tokens_mean": (tokens - written).mean(),
        **{f"episode/{name}_mean": sum(turn.pop(name, 0.0) for turn in turns) / len(episodes) for name in TOOL_COUNTS},
    }
    if seconds := [turn.pop("seconds") for turn in turns]:
        metrics |= {f"time/env_turn_p{p}_s": np.percentile(seconds, p) for p in (50, 99)}
        if elapsed_s := sum(episode["seconds"] for episode in episodes):
            metrics["perf/rollout/acting_share"] = sum(seconds) / elapsed_s
    metrics |= _means(turns, "env/") | _means([episode["scores"] for episode in episodes], "env/score/")
    return {name: float(value) for name, value in metrics.items()}


def _means(rows: Iterable[Mapping[str, float]], prefix: str) -> dict[str, float]:
    """Returns the mean of each value over the rows that have it, for at most the first `MAX_NAMES` names."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if "/" not in name:  # would be part of a path
                values.setdefault(name, []).append(value)
    return {f"{prefix}{name}": float(np.mean(values[name])) for name in sorted(values)[:MAX_NAMES]}
