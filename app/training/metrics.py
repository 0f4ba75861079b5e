"""A step's samples -> the numbers of `metrics.jsonl`, over all hosts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict

import jax
import numpy as np

from app.advantage.group import zero_variance_fraction
from app.distributed.collectives import (
    bytes_over_hosts,
    max_over_hosts,
    sum_over_hosts,
)
from app.distributed.tables import names_over_hosts, table_over_hosts
from app.mesh.device_memory import peak_memory_bytes
from app.records.sample import Sample
from app.reward.aggregate import Scored
from app.rollout.counters import Tally
from app.rollout.scheduling.metrics import Figures
from app.runtime.flops import PEAK_FLOPS, Tokens
from app.training.refill import Refilled


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
    table = table_over_hosts({**columns, **values})
    rewards, lengths = table["reward"], table["length"]
    metrics = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "reward/zero_variance_fraction": zero_variance_fraction(rewards, table["group"]),
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/truncated_fraction": table["truncated"].mean(),
        **{name: mean_where_known(table[name]) for name in values},
    }
    return {name: float(value) for name, value in metrics.items()}


def refill_metrics(refilled: Refilled, sampled: Sequence[Sample]) -> dict[str, float]:
    """What a filter made of a step's rollouts, over all hosts.

    Args:
        sampled: of all rounds, whatever became of them.
    """
    rewards = [s.reward for s in sampled if s.reward is not None]
    total, count = sum_over_hosts(np.asarray([sum(rewards), len(rewards)], np.float64)).tolist()
    return {
        "rollout/num_rounds": refilled.num_rounds,
        "rollout/surplus_group_count": refilled.num_surplus,
        "rollout/filler_group_count": refilled.num_fillers,
        "reward/filtered_group_fraction": refilled.num_filtered / refilled.num_sampled,
        "reward/sampled_mean": total / count if count else float("nan"),
    }


def host_counts(scored: Scored) -> tuple[dict[str, int], dict[str, tuple[float, int]]]:
    """This host's part of `reward_counts`: the counts, and of plug-ins' further numbers their sums and counts."""
    counts = {
        "reward/error_count": scored.num_errors,
        "reward/abstained_count": scored.num_abstained,
        "reward/dropped_count": sum(s.reward is None for s in scored.samples),
        **{f"reward/{name}/error_count": tally.num_errors for name, tally in scored.tallies.items()},
    }
    extras = {
        f"reward/{name}/{key}/mean": x for name, tally in scored.tallies.items() for key, x in tally.extras.items()
    }
    return counts, extras


def reward_counts(scored: Scored) -> dict[str, float]:
    """What failed, what abstained, what was left out, and the further numbers of plug-ins; over all hosts."""
    counts, extras = host_counts(scored)
    totals = sum_over_hosts(np.asarray(list(counts.values())))
    # Which further numbers there are depends on the samples, so hosts must first agree on their names.
    names = names_over_hosts(extras)
    sums = sum_over_hosts(np.asarray([extras.get(name, (0.0, 0)) for name in names]).reshape(-1, 2))
    return {
        **{name: int(total) for name, total in zip(counts, totals, strict=True)},
        **{name: float(total / count) for name, (total, count) in zip(names, sums, strict=True)},
    }


def mean_where_known(values: np.ndarray) -> float:
    """The mean of those that are not NaN; NaN where none is."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def step_performance(samples: Sequence[Sample], *, flops: float, seconds: float) -> dict[str, float | int | None]:
    """Speed over the whole step and peak memory, under `perf/`. `perf/mfu` is None where the peak is not known."""
    (tokens,) = Tokens.of(samples)
    kind = jax.devices()[0].device_kind
    peak = next((most for start, most in PEAK_FLOPS.items() if kind.startswith(start)), None)
    return {
        "perf/tokens_per_s": tokens.completion / seconds,
        "perf/mfu": None if peak is None else flops / (seconds * peak * jax.device_count()),
        "perf/peak_memory_bytes": peak_memory_bytes(),
    }


def rollout_performance(tally: Tally) -> dict[str, float]:
    """What the rollouts of a step did, over all hosts, under `perf/rollout/`."""
    counts = np.asarray(list(vars(tally).values()))
    total = Tally(*sum_over_hosts(counts).tolist())
    return {
        "perf/rollout/segments": total.segments / jax.process_count(),
        "perf/rollout/prefill_tokens_saved": total.prompt_tokens - total.prefilled_tokens - total.reread_tokens,
        # Where generation runs ahead, nothing may have ended since the step before.
        "perf/rollout/bubble": 1 - total.drawn_tokens / total.row_steps if total.row_steps else 0.0,
    }


def schedule_performance(found: Sequence[Figures]) -> dict[str, float | None]:
    """How good the schedules of a step's rollouts were on all hosts, under `perf/rollout/`. Nothing where none was.

    Shares are means over time; the recall is None where no sample was longer than others, the tail of a rollout that
    goes on. Hosts wait for each other behind every rollout, so that the makespan is that of the last.
    """
    if not found:
        return {}
    own = json.dumps([asdict(one) for one in found]).encode()
    hosts = [[Figures(**one) for one in json.loads(told)] for told in bytes_over_hosts(own)]
    found = [one for host in hosts for one in host]
    makespan_s = sum(max(one.makespan_s for one in rollout) for rollout in zip(*hosts, strict=True))
    seconds = np.asarray([one.makespan_s for one in found])
    tail = float(np.average([one.tail_fraction for one in found], weights=seconds))
    recalls = [one.probe_recall for one in found if one.probe_recall is not None]
    return {
        "perf/rollout/makespan_s": makespan_s,
        "perf/rollout/bubble": float(np.average([one.bubble for one in found], weights=seconds)),
        "perf/rollout/tail_fraction": None if math.isnan(tail) else tail,
        "perf/rollout/probe_recall": float(np.mean(recalls)) if recalls else None,
        "perf/rollout/breaker_trips": sum(one.breaker_trips for one in found),
        "perf/rollout/stolen": sum(one.stolen for one in found),
        "perf/rollout/repacked_tokens": sum(one.repacked_tokens for one in found),
    }


def staleness_metrics(samples: Sequence[Sample], *, step: int) -> dict[str, float]:
    """By how many steps the policies that drew the tokens a step learns from were older than the one that learns."""
    lags = np.concatenate([(step - 1 - s.token_versions)[s.mask] for s in samples])
    total, count = sum_over_hosts(np.asarray([lags.sum(), len(lags)], np.int64)).tolist()
    return {
        "perf/rollout/staleness_mean": total / count if count else 0.0,
        "perf/rollout/staleness_max": int(max_over_hosts(np.asarray(lags.max(initial=0)))),
    }


class CompilationCounter:
    """Counts XLA compilations of this process from the moment it is made until it is closed."""

    EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self) -> None:
        self._count = 0
        self.seconds = 0.0
        """What all of them took."""
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: object) -> None:
        if event == self.EVENT:
            self._count += 1
            self.seconds += duration_secs

    def take(self) -> int:
        """Compilations since the last call."""
        count, self._count = self._count, 0
        return count

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)
