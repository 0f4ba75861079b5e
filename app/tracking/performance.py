"""Metrics of a step's speed, memory and schedules, which depend on timing."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict

import jax
import numpy as np

from app.distributed.collectives import gather_bytes_over_hosts, max_over_hosts, sum_over_hosts
from app.mesh.devices import peak_memory_bytes
from app.records.sample import Sample
from app.rollout.counters import RolloutCounters
from app.rollout.scheduling.schedule_metrics import ScheduleMetrics
from app.tracking.flops import PEAK_FLOPS


def step_performance(samples: Sequence[Sample], *, flops: float, seconds: float) -> dict[str, float | int | None]:
    """Returns a step's speed and peak memory. `perf/mfu` is None if the peak FLOP/s of the devices is unknown."""
    num_tokens = int(sum_over_hosts(np.asarray(sum(len(s.completion_ids) for s in samples))))
    kind = jax.devices()[0].device_kind
    peak = next((most for start, most in PEAK_FLOPS.items() if kind.startswith(start)), None)
    return {
        "perf/tokens_per_s": num_tokens / seconds,
        "perf/mfu": None if peak is None else flops / (seconds * peak * jax.device_count()),
        "perf/peak_memory_bytes": peak_memory_bytes(),
    }


def rollout_performance(counters: RolloutCounters) -> dict[str, float]:
    """Returns the metrics of a step's rollouts, over all hosts."""
    counts = np.asarray(list(vars(counters).values()))
    total = RolloutCounters(*sum_over_hosts(counts).tolist())
    acted: dict[str, float] = {"perf/rollout/resumes": total.resumed_rows, "perf/rollout/rebuilds": total.rebuilt_rows}
    return (acted if any(acted.values()) else {}) | {
        "perf/rollout/segments": total.segments / jax.process_count(),
        "perf/rollout/prefill_tokens_saved": total.prompt_tokens - total.prefilled_tokens - total.recomputed_tokens,
        "perf/rollout/preemptions": total.preempted_rows,
        # With asynchronous rollouts, there may be steps in which no sample was finished.
        "perf/rollout/bubble": 1 - total.generated_tokens / total.row_steps if total.row_steps else 0.0,
    }


def schedule_performance(schedules: Sequence[ScheduleMetrics]) -> dict[str, float | None]:
    """Returns the schedule metrics of a step's rollouts, over all hosts; empty without schedules.

    Hosts wait for each other after every rollout, so the makespan is that of the slowest host. Fractions are averaged
    over time. The recall is None if no sample was longer than the others, the tail if rollouts are asynchronous.
    """
    if not schedules:
        return {}
    local = json.dumps([asdict(one) for one in schedules]).encode()
    hosts = [[ScheduleMetrics(**one) for one in json.loads(lines)] for lines in gather_bytes_over_hosts(local)]
    schedules = [one for host in hosts for one in host]
    makespan_s = sum(max(one.makespan_s for one in rollout) for rollout in zip(*hosts, strict=True))
    seconds = np.asarray([one.makespan_s for one in schedules])
    tail = float(np.average([one.tail_fraction for one in schedules], weights=seconds))
    recalls = [one.probe_recall for one in schedules if one.probe_recall is not None]
    return {
        "perf/rollout/makespan_s": makespan_s,
        "perf/rollout/bubble": float(np.average([one.bubble for one in schedules], weights=seconds)),
        "perf/rollout/tail_fraction": None if math.isnan(tail) else tail,
        "perf/rollout/probe_recall": float(np.mean(recalls)) if recalls else None,
        "perf/rollout/breaker_trips": sum(one.breaker_trips for one in schedules),
        "perf/rollout/stolen": sum(one.stolen for one in schedules),
        "perf/rollout/repacked_tokens": sum(one.repacked_tokens for one in schedules),
    }


def async_metrics(samples: Sequence[Sample], *, step: int, num_ready: int) -> dict[str, float]:
    """Returns the mean and maximum age, in steps, of the policies that sampled the step's tokens, and of the queue.

    Args:
        num_ready: number of rounds of this host that were complete when the step began.
    """
    lags = np.concatenate([(step - 1 - s.token_versions)[s.mask] for s in samples])
    total, count = sum_over_hosts(np.asarray([lags.sum(), len(lags)], np.int64)).tolist()
    oldest, fewest_ready = max_over_hosts(np.asarray([lags.max(initial=0), -num_ready], np.int64)).tolist()
    return {
        "perf/rollout/staleness_mean": total / count if count else 0.0,
        "perf/rollout/staleness_max": oldest,
        "perf/rollout/rounds_ready": -fewest_ready,
    }
