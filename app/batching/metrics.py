"""What the cuts of a pass over a step's samples amount to, under the names of `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from app.batching.micro_batcher import Cut

SEQUENCE_LENGTHS = ("min", "max", "mean", "minmax_diff", "balanced_min", "balanced_max")
"""verl's names of them."""


def update_metrics(cuts: Sequence[Cut]) -> dict[str, float]:
    """`batching/*` and `global_seqlen/*` of one pass over a step's samples.

    Tokens of devices are those of an optimizer step, on average over the pass.
    """
    figures = [cut.figures() for cut in cuts]
    lengths = {name: sum(f[f"seqlen_{name}"] for f in figures) / len(cuts) for name in SEQUENCE_LENGTHS}
    return {**_batching(figures), **{f"global_seqlen/{name}": length for name, length in lengths.items()}}


def critic_update_metrics(cuts: Sequence[Cut]) -> dict[str, float]:
    """`value/batching/*`, of a pass over the same samples."""
    return {f"value/{name}": value for name, value in _batching([cut.figures() for cut in cuts]).items()}


def _batching(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    def total(name: str) -> float:
        return sum(f[name] for f in figures)

    return {
        "batching/fill": total("real_tokens") / total("computed_tokens"),
        "batching/num_micro_batches": total("num_micro_batches"),
        "batching/dummy_fraction": total("num_dummy_rows") / total("num_rows"),
        "batching/over_quota": total("over_quota"),
        "batching/flops_imbalance": max(f["flops_imbalance"] for f in figures),
    }


def scoring_metrics(role: str, cuts: Sequence[Cut]) -> Mapping[str, float]:
    """`score/<role>/*`: what one role's pass used."""
    figures = [cut.figures() for cut in cuts]
    rows = max(len(one.rows) // cut.devices_per_host for cut in cuts for one in cut.own.micro_batches)
    return {
        f"score/{role}/fill": sum(f["real_tokens"] for f in figures) / sum(f["computed_tokens"] for f in figures),
        f"score/{role}/num_micro_batches": sum(f["num_micro_batches"] for f in figures),
        f"score/{role}/rows_per_device": rows,
    }
