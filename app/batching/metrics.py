"""What the cuts of a pass over a step's samples amount to, under the names of `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from app.batching.micro_batcher import GlobalPlan

SEQLEN_STATS = ("min", "max", "mean", "minmax_diff", "balanced_min", "balanced_max")
"""verl's names of them."""


def policy_batching_metrics(global_plans: Sequence[GlobalPlan]) -> dict[str, float]:
    """`batching/*` and `global_seqlen/*` of one pass over a step's samples.

    Tokens of devices are those of an optimizer step, on average over the pass.
    """
    figures = [cut.packing_stats() for cut in global_plans]
    lengths = {name: sum(f[f"seqlen_{name}"] for f in figures) / len(global_plans) for name in SEQLEN_STATS}
    return {**_batching_metrics(figures), **{f"global_seqlen/{name}": length for name, length in lengths.items()}}


def critic_batching_metrics(global_plans: Sequence[GlobalPlan]) -> dict[str, float]:
    """`value/batching/*`, of a pass over the same samples."""
    return {
        f"value/{name}": value
        for name, value in _batching_metrics([cut.packing_stats() for cut in global_plans]).items()
    }


def _batching_metrics(stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    def total(name: str) -> float:
        return sum(f[name] for f in stats)

    return {
        "batching/fill": total("real_tokens") / total("computed_tokens"),
        "batching/num_micro_batches": total("num_micro_batches"),
        "batching/dummy_fraction": total("num_dummy_rows") / total("num_rows"),
        "batching/over_quota": total("over_quota"),
        "batching/flops_imbalance": max(f["flops_imbalance"] for f in stats),
    }


def scoring_batching_metrics(role: str, global_plans: Sequence[GlobalPlan]) -> Mapping[str, float]:
    """`score/<role>/*`: what one role's pass used."""
    figures = [cut.packing_stats() for cut in global_plans]
    rows = max(len(one.rows) // cut.devices_per_host for cut in global_plans for one in cut.local_plan.micro_batches)
    return {
        f"score/{role}/fill": sum(f["real_tokens"] for f in figures) / sum(f["computed_tokens"] for f in figures),
        f"score/{role}/num_micro_batches": sum(f["num_micro_batches"] for f in figures),
        f"score/{role}/rows_per_device": rows,
    }
