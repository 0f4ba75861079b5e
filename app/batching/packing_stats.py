"""Statistics of plans: fill, balance and padding."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

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
    micro_batches = plan.micro_batches
    rows = [row for micro_batch in micro_batches for row in micro_batch.rows]
    segments = [segment for row in rows for segment in row]
    owners = np.asarray([segment[0] for segment in segments], np.int64)
    members = np.asarray([i for segment in segments for i in segment], np.int64)
    counts = [len(micro_batch.rows) for micro_batch in micro_batches]
    row_of_segment = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    row_of_member = np.repeat(row_of_segment, [len(segment) for segment in segments])

    def row_sums(prompt_values: np.ndarray, completion_values: np.ndarray) -> np.ndarray:
        completion_sums = np.bincount(row_of_member, completion_values[members], len(rows))
        return np.bincount(row_of_segment, prompt_values[owners], len(rows)) + completion_sums

    prompt_costs = sequence_cost(lengths.prompts)
    row_costs = row_sums(prompt_costs, sequence_cost(lengths.totals) - prompt_costs)
    device = np.concatenate([np.arange(count) * num_devices // count for count in counts])
    costs = np.bincount(device, row_costs, num_devices)
    balanced = np.bincount(device[row_of_member], lengths.totals[members], num_devices)
    edges = np.arange(num_devices + 1) * len(lengths.totals) // num_devices
    blocks = np.asarray([lengths.totals[first:last].sum() for first, last in pairwise(edges)])
    num_real = int(row_sums(lengths.prompts, lengths.completions).sum())
    num_computed = sum(len(one.rows) * one.shape.num_tokens for one in micro_batches)
    num_dummy = sum(not row for row in rows)
    return {
        "real_tokens": num_real,
        "computed_tokens": num_computed,
        "fill": num_real / num_computed,
        "num_micro_batches": len(micro_batches),
        "num_rows": len(rows),
        "num_dummy_rows": num_dummy,
        "dummy_fraction": num_dummy / len(rows),
        "flops_imbalance": float(costs.max() / costs.mean()) if costs.any() else 1.0,
        "seqlen_min": int(blocks.min()),
        "seqlen_max": int(blocks.max()),
        "seqlen_mean": float(blocks.mean()),
        "seqlen_minmax_diff": int(blocks.max() - blocks.min()),
        "seqlen_balanced_min": int(balanced.min()),
        "seqlen_balanced_max": int(balanced.max()),
    }
