"""What the plans of all hosts amount to: how full, how even, what padding costs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from app.batching.plan import Lengths, Plan, Work


def plan_figures(
    plans: Sequence[Plan],
    lengths: Sequence[Lengths],
    work: Work,
    *,
    devices_per_host: int,
    max_tokens_per_device: int | None,
) -> dict[str, float]:
    """Sums over all hosts, tokens unless the name says otherwise."""
    rows, devices = [], []
    work_of_device, length_of_device = [], []
    for plan, host in zip(plans, lengths, strict=True):
        whole, prompt = work(host.totals), work(host.prompts)
        for micro_batch in plan.micro_batches:
            devices.append(len(micro_batch.rows) // devices_per_host * micro_batch.shape.num_tokens)
            for row in micro_batch.rows:
                held = sum(int(host.prompts[s[0]]) + int(host.completions[list(s)].sum()) for s in row)
                rows.append((held, micro_batch.shape.num_tokens, len(row) > 0))
        for device in range(devices_per_host):
            segments = [
                segment
                for micro_batch in plan.micro_batches
                for row in _of_device(micro_batch.rows, device, devices_per_host)
                for segment in row
            ]
            members = [i for segment in segments for i in segment]
            length_of_device.append(int(host.totals[members].sum()))
            work_of_device.append(
                float(prompt[[s[0] for s in segments]].sum() + (whole[members] - prompt[members]).sum())
            )
    held, computed, used = np.asarray(rows).T
    over = (held > computed).sum()
    if max_tokens_per_device is not None:
        over += sum(tokens > max_tokens_per_device for tokens in devices) * devices_per_host
    before = np.concatenate([host.totals for host in lengths])
    edges = np.linspace(0, len(before), len(length_of_device) + 1).astype(int)
    blocks = [int(before[a:b].sum()) for a, b in pairwise(edges)]
    mean_work = float(np.mean(work_of_device))
    return {
        "real_tokens": int(held.sum()),
        "computed_tokens": int(computed.sum()),
        "fill": float(held.sum() / computed.sum()),
        "num_micro_batches": plans[0].num_micro_batches,
        "num_rows": len(used),
        "num_dummy_rows": int(len(used) - used.sum()),
        "dummy_fraction": float(1 - used.mean()),
        "over_quota": int(over),
        "flops_imbalance": max(work_of_device) / mean_work if mean_work else 1.0,
        "seqlen_min": min(blocks),
        "seqlen_max": max(blocks),
        "seqlen_mean": float(np.mean(blocks)),
        "seqlen_minmax_diff": max(blocks) - min(blocks),
        "seqlen_balanced_min": min(length_of_device),
        "seqlen_balanced_max": max(length_of_device),
    }


def _of_device(rows: Sequence, device: int, num_devices: int) -> Sequence:
    per_device = len(rows) // num_devices
    return rows[device * per_device : (device + 1) * per_device]
