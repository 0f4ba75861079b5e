"""Metrics of the micro-batches in a pass over a step's samples, under their names in `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from app.batching.micro_batcher import GlobalPlan

SEQLEN_STATS = ("min", "max", "mean", "minmax_diff", "balanced_min", "balanced_max")
"""Statistics of sequence lengths, as verl names them."""


def policy_batching_metrics(global_plans: Sequence[GlobalPlan]) -> dict[str, float]:
    """Returns `batching/*` and `global_seqlen/*` of one pass over a step's samples.

    Tokens per device are counted per optimizer step and averaged over the pass.
    """
    stats = [plan.packing_stats() for plan in global_plans]
    lengths = {name: sum(s[f"seqlen_{name}"] for s in stats) / len(global_plans) for name in SEQLEN_STATS}
    return {**_batching_metrics(stats), **{f"global_seqlen/{name}": length for name, length in lengths.items()}}


def critic_batching_metrics(global_plans: Sequence[GlobalPlan]) -> dict[str, float]:
    """Returns `value/batching/*`, the metrics of the critic's pass over a step's samples."""
    metrics = _batching_metrics([plan.packing_stats() for plan in global_plans])
    return {f"value/{name}": value for name, value in metrics.items()}


def _batching_metrics(stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    def total(name: str) -> float:
        return sum(s[name] for s in stats)

    return {
        "batching/fill": total("real_tokens") / total("computed_tokens"),
        "batching/num_micro_batches": total("num_micro_batches"),
        "batching/dummy_fraction": total("num_dummy_rows") / total("num_rows"),
        "batching/flops_imbalance": max(s["flops_imbalance"] for s in stats),
    }


def scoring_batching_metrics(role: str, global_plans: Sequence[GlobalPlan], *, seconds: float) -> Mapping[str, float]:
    """Returns the metrics of one role's scoring pass over all samples of a step.

    Args:
        seconds: time that the pass took.
    """
    stats = [plan.packing_stats() for plan in global_plans]
    rows = max(len(one.rows) // plan.num_devices for plan in global_plans for one in plan.plan.micro_batches)
    return {
        f"perf/score_{role}_tokens_per_s": sum(s["real_tokens"] for s in stats) / seconds,
        f"score/{role}/fill": sum(s["real_tokens"] for s in stats) / sum(s["computed_tokens"] for s in stats),
        f"score/{role}/num_micro_batches": sum(s["num_micro_batches"] for s in stats),
        f"score/{role}/rows_per_device": rows,
    }
