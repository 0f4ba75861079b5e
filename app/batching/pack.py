"""Samples <-> rows of static shape. The only place in the program that pads.

A row holds any number of samples one after another; segment ids keep them apart. Whatever a sample
carries per completion token is laid out the same way, [M, R, C], beside the targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float32, Int32

from app.batching.plan import Plan
from app.flow import Sample

HostOrDevice = Any
"""numpy while it is packed, `jax.Array` once it is placed."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenBatch:
    """Micro-batches of packed rows: what a forward pass reads. numpy on the host, global arrays on devices."""

    token_ids: Int32[HostOrDevice, "M R T"]
    positions: Int32[HostOrDevice, "M R T"]
    """Within the sample, starting at 0."""
    segment_ids: Int32[HostOrDevice, "M R T"]
    """1, 2, ... per sample of a row; 0 is padding."""
    branch_ids: Int32[HostOrDevice, "M R T"]
    """0: no two samples share a prompt."""
    score_index: Int32[HostOrDevice, "M R C"]
    """Where in the row the hidden state stands that predicts each target: one token before it. -1 on padding."""
    targets: Int32[HostOrDevice, "M R C"]
    mask: Bool[HostOrDevice, "M R C"]
    """True on completion tokens that the policy wrote."""


@dataclass(frozen=True, slots=True)
class RowShape:
    """Static sizes of a packed row, in tokens."""

    num_tokens: int
    num_completion_tokens: int


def pack_tokens(samples: Sequence[Sample], plan: Plan, shape: RowShape) -> TokenBatch:
    """Lays prompts and completions out in rows. Padding has segment 0 and a False mask."""
    rows = len(plan.rows)
    token_ids, positions, segment_ids = (np.zeros((rows, shape.num_tokens), np.int32) for _ in range(3))
    targets = np.zeros((rows, shape.num_completion_tokens), np.int32)
    score_index = np.full_like(targets, -1)
    mask = np.zeros((rows, shape.num_completion_tokens), bool)
    for row, members in enumerate(plan.rows):
        start = first = 0
        for segment, i in enumerate(members, start=1):
            prompt, completion = samples[i].prompt.token_ids, samples[i].completion_ids
            end, last = start + len(prompt) + len(completion), first + len(completion)
            token_ids[row, start:end] = np.concatenate([prompt, completion])
            positions[row, start:end] = np.arange(end - start)
            segment_ids[row, start:end] = segment
            score_index[row, first:last] = np.arange(end - len(completion) - 1, end - 1)
            targets[row, first:last] = completion
            mask[row, first:last] = samples[i].mask
            start, first = end, last
    batch = TokenBatch(token_ids, positions, segment_ids, np.zeros_like(token_ids), score_index, targets, mask)
    return jax.tree.map(lambda x: by_micro_batch(x, plan), batch)


def pack_per_token(
    samples: Sequence[Sample], plan: Plan, shape: RowShape, value_of: Callable[[Sample], np.ndarray]
) -> Float32[np.ndarray, "M R C"]:
    """Lays a per-completion-token quantity out beside the targets; 0 on padding."""
    packed = np.zeros((len(plan.rows), shape.num_completion_tokens), np.float32)
    for row, members in enumerate(plan.rows):
        first = 0
        for i in members:
            values = value_of(samples[i])
            packed[row, first : first + len(values)] = values
            first += len(values)
    return by_micro_batch(packed, plan)


def unpack_per_token(
    packed: Float32[np.ndarray, "M R C"], samples: Sequence[Sample], plan: Plan
) -> list[Float32[np.ndarray, "C"]]:
    """The inverse of `pack_per_token`: one array per sample, in sample order, padding gone."""
    rows = packed.reshape(-1, packed.shape[-1])
    values: list[np.ndarray] = [np.zeros(0, np.float32)] * len(samples)
    for row, members in enumerate(plan.rows):
        first = 0
        for i in members:
            last = first + len(samples[i].completion_ids)
            values[i] = rows[row, first:last]
            first = last
    return values


def by_micro_batch(rows: np.ndarray, plan: Plan) -> np.ndarray:
    return rows.reshape(plan.num_micro_batches, plan.rows_per_micro_batch, *rows.shape[1:])
