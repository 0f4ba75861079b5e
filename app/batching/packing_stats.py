"""Statistics of plans: fill, balance and padding."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64

from app.batching.micro_batch_plan import MicroBatchPlan, SequenceCost, SequenceLengths


def packing_stats(
    plan: MicroBatchPlan,
    lengths: SequenceLengths,
    sequence_cost: SequenceCost,
    *,
    num_devices: int,
) -> dict[str, float]:
    """Returns statistics of a plan for all devices, in tokens unless noted otherwise.

    Returns:
        real_tokens, computed_tokens, fill: positions with a token, all positions, and their ratio.
        num_micro_batches; num_rows, num_dummy_rows, dummy_fraction: rows, rows without a sample, and their fraction.
        flops_imbalance: largest cost of a device, divided by the mean over devices.
        seqlen_min, max, mean, minmax_diff: tokens per device if samples were split in order; balanced_min,
            balanced_max: tokens per device in the plan. Prompts count once per sample.
    """
    rows = _row_stats(plan, lengths, sequence_cost, num_devices=num_devices)
    works = np.bincount(rows.device, rows.cost, num_devices)
    balanced = np.bincount(rows.device, rows.sample_tokens, num_devices)
    edges = np.arange(num_devices + 1) * len(lengths.totals) // num_devices
    blocks = np.asarray([lengths.totals[first:last].sum() for first, last in pairwise(edges)])
    return {
        "real_tokens": int(rows.num_real_tokens.sum()),
        "computed_tokens": int(rows.length.sum()),
        "fill": float(rows.num_real_tokens.sum() / rows.length.sum()),
        "num_micro_batches": plan.num_micro_batches,
        "num_rows": len(rows.empty),
        "num_dummy_rows": int(rows.empty.sum()),
        "dummy_fraction": float(rows.empty.mean()),
        "flops_imbalance": float(works.max() / works.mean()) if works.any() else 1.0,
        "seqlen_min": int(blocks.min()),
        "seqlen_max": int(blocks.max()),
        "seqlen_mean": float(blocks.mean()),
        "seqlen_minmax_diff": int(blocks.max() - blocks.min()),
        "seqlen_balanced_min": int(balanced.min()),
        "seqlen_balanced_max": int(balanced.max()),
    }


class _RowStats(NamedTuple):
    """Statistics of each row of all micro-batches."""

    num_real_tokens: Float64[np.ndarray, "rows"]
    length: Int64[np.ndarray, "rows"]
    empty: Bool[np.ndarray, "rows"]
    device: Int64[np.ndarray, "rows"]
    sample_tokens: Float64[np.ndarray, "rows"]
    cost: Float64[np.ndarray, "rows"]


def _row_stats(
    plan: MicroBatchPlan, lengths: SequenceLengths, sequence_cost: SequenceCost, *, num_devices: int
) -> _RowStats:
    rows = [row for micro_batch in plan.micro_batches for row in micro_batch.rows]
    segments = [segment for row in rows for segment in row]
    owners = np.asarray([segment[0] for segment in segments], np.int64)
    members = np.asarray([i for segment in segments for i in segment], np.int64)
    counts = [len(micro_batch.rows) for micro_batch in plan.micro_batches]
    row_of_segment = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    row_of_member = np.repeat(row_of_segment, [len(segment) for segment in segments])

    def sums(prompt_values: np.ndarray, completion_values: np.ndarray) -> np.ndarray:
        completion_sums = np.bincount(row_of_member, completion_values[members], len(rows))
        return np.bincount(row_of_segment, prompt_values[owners], len(rows)) + completion_sums

    prompt_work = sequence_cost(lengths.prompts)
    return _RowStats(
        num_real_tokens=sums(lengths.prompts, lengths.completions),
        length=np.repeat([micro_batch.shape.num_tokens for micro_batch in plan.micro_batches], counts),
        empty=np.asarray([not row for row in rows]),
        device=np.concatenate([np.arange(count) * num_devices // count for count in counts]),
        sample_tokens=np.bincount(row_of_member, lengths.totals[members], len(rows)),
        cost=sums(prompt_work, sequence_cost(lengths.totals) - prompt_work),
    )
