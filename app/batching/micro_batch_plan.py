"""Plans micro-batches: assigns samples to rows. Uses only numpy: no JAX, settings or devices.

A plan is for all devices of all hosts. Every host makes it from the same all-gathered lengths, with samples numbered
host by host. Ties go to the smaller index, so the same lengths always give the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from app.batching.bin_packing import PackingItem, PackingRow, RowPacker, merge_shared_prompts, split_group
from app.batching.load_balancing import EMPTY_SLOT, assign_rows_balanced, assign_rows_in_order
from app.batching.micro_batch_shapes import (
    BLOCK_TOKENS,
    Packing,
    bucket_length,
    candidate_shapes,
    pack_into_fewest,
    packing_cost,
)

PackedSegment = tuple[int, ...]
"""Indices of the samples that share one copy of their prompt; a single index if nothing is shared."""
PackedRow = tuple[PackedSegment, ...]
SequenceCost = Callable[[np.ndarray], np.ndarray]
"""Returns the forward FLOPs of a sequence of each length, as integers, so that sums are exact in any order."""

MAX_SAMPLES_FOR_SEARCH = 1024
"""Maximum number of samples for which several ways of packing are tried; for more, one way already fills rows well."""
MIN_ROW_LENGTH = 256
"""Minimum length of a packed row, if the token budget allows it: long rows of many short samples have less padding."""
MAX_SHARED_ROW_LENGTH = 32_768
"""Maximum length of a row that is extended to fit a whole group: finding visible blocks has quadratic cost."""
MIN_COMPLETION_BUCKET = 4
"""Smallest length bucket of the completions in fixed rows, in tokens."""


@dataclass(frozen=True, slots=True)
class RowShape:
    """Static sizes of a packed row, in tokens."""

    num_tokens: int
    num_completion_tokens: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of a micro-batch, device by device; an empty row is padding."""

    rows: tuple[PackedRow, ...]
    shape: RowShape


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """Micro-batches of all devices or of one host's devices, in the order of computation."""

    micro_batches: tuple[MicroBatch, ...]

    @property
    def num_micro_batches(self) -> int:
        return len(self.micro_batches)

    def part(self, index: int, num_parts: int) -> MicroBatchPlan:
        """Returns the rows of one of `num_parts` equal, contiguous blocks of devices."""
        parts = []
        for one in self.micro_batches:
            count = len(one.rows) // num_parts
            parts.append(MicroBatch(one.rows[index * count : (index + 1) * count], one.shape))
        return MicroBatchPlan(tuple(parts))


@dataclass(frozen=True, slots=True, eq=False)
class SequenceLengths:
    """Lengths of samples in tokens, and the key of each sample's prompt."""

    prompts: Int64[np.ndarray, "N"]
    completions: Int64[np.ndarray, "N"]
    prompt_keys: Int64[np.ndarray, "N"]
    """Equal for samples with equal prompts, on all hosts."""

    @property
    def totals(self) -> Int64[np.ndarray, "N"]:
        return self.prompts + self.completions


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Rules for micro-batches of at most `max_tokens_per_device` tokens on each device."""

    max_tokens_per_device: int
    row_length: int
    """Tokens per row; see `choose_row_length`."""
    share_prompts: bool
    balance: bool
    """Whether rows are assigned to devices with balanced cost; otherwise in packing order."""


def choose_row_length(max_tokens_per_device: int, max_sample_tokens: int, *, max_group_tokens: int = 0) -> int:
    """Returns the length of a full row: the token budget, halved while the half fits two of the longest samples.

    The half must also fit the largest group, up to `MAX_SHARED_ROW_LENGTH`, and `MIN_ROW_LENGTH` tokens. Longer rows
    cost little (attention skips invisible blocks) and have less padding; shorter rows balance better. If the longest
    sample still fits, the length is rounded down to a multiple of 128.

    Args:
        max_group_tokens: largest possible number of tokens in a prompt and all its completions; 0 if unknown.

    Raises:
        ValueError: the longest possible sample exceeds the token budget.
    """
    if max_sample_tokens > max_tokens_per_device:
        raise ValueError(
            f"a sample may have {max_sample_tokens} tokens, more than max_tokens_per_device = "
            f"{max_tokens_per_device}; raise it to {max_sample_tokens} or more"
        )
    length = max_tokens_per_device
    while length // 2 >= max(2 * max_sample_tokens, min(max_group_tokens, MAX_SHARED_ROW_LENGTH), MIN_ROW_LENGTH):
        length //= 2
    rounded = length // BLOCK_TOKENS * BLOCK_TOKENS
    return rounded if rounded >= max(max_sample_tokens, BLOCK_TOKENS) else length


def plan_fixed_rows(
    lengths: SequenceLengths, *, rows_per_device: int | None, num_devices: int, trim_tail: bool
) -> MicroBatchPlan:
    """Plans one sample per row, in order, with `rows_per_device` rows on each device of a micro-batch.

    There is at least one micro-batch. All rows have the bucketed lengths of the longest sample and the longest
    completion.

    Args:
        rows_per_device: number of rows; None = all samples in one micro-batch.
        trim_tail: whether the last micro-batch has only the rows it needs: less padding, but a second shape.
    """
    num_samples = len(lengths.prompts)
    max_rows = max(1, -(-num_samples // num_devices))
    rows = min(rows_per_device or max_rows, max_rows) * num_devices
    count = max(1, -(-num_samples // rows))
    tail = rows
    if trim_tail:
        tail = max(1, -(-(num_samples - (count - 1) * rows) // num_devices)) * num_devices
    shape = bucketed_row_shape(int(lengths.totals.max(initial=1)), int(lengths.completions.max(initial=1)))
    micro_batches = []
    for first in range(0, count * rows, rows):
        samples = range(first, min(first + rows, num_samples))
        padding = ((),) * ((tail if len(micro_batches) == count - 1 else rows) - len(samples))
        micro_batches.append(MicroBatch(tuple(((i,),) for i in samples) + padding, shape))
    return MicroBatchPlan(tuple(micro_batches))


def bucketed_row_shape(num_tokens: int, num_completion_tokens: int) -> RowShape:
    """Returns the row shape for these numbers of tokens, each rounded up to a length bucket."""
    return RowShape(bucket_length(num_tokens), bucket_length(num_completion_tokens, min_bucket=MIN_COMPLETION_BUCKET))


def plan_token_budget(
    lengths: SequenceLengths, budget: TokenBudget, sequence_cost: SequenceCost, *, num_devices: int
) -> MicroBatchPlan:
    """Plans micro-batches of packed rows.

    All micro-batches have the full shape, except the last one: it has the smallest shape that fits its samples.

    Args:
        sequence_cost: returns the cost of sequences of given lengths; used only if `budget.balance`.

    Raises:
        ValueError: a sample is longer than a row.
    """
    too_long = np.flatnonzero(lengths.totals > budget.row_length)
    if len(too_long):
        i, quota = int(too_long[0]), budget.max_tokens_per_device
        rows = "" if budget.row_length == quota else f", which gives rows of {budget.row_length} tokens"
        raise ValueError(
            f"sample {i} has {lengths.totals[i]} tokens, too many for max_tokens_per_device = {quota}{rows}; raise it"
        )
    shapes = candidate_shapes(budget.max_tokens_per_device, budget.row_length)
    packings = [
        pack_into_fewest(packer, shapes, num_devices, even_tail=budget.balance)
        for packer in _packer_variants(lengths, budget)
    ]
    cheapest = min(packings, key=packing_cost)
    return _assign_rows(cheapest, lengths, budget, sequence_cost, num_devices)


def _packer_variants(lengths: SequenceLengths, budget: TokenBudget) -> Iterator[RowPacker]:
    """Yields packers with different options, since none is always best; the caller keeps the cheapest result."""
    options = [(16, budget.share_prompts)]
    if len(lengths.prompts) <= MAX_SAMPLES_FOR_SEARCH:
        splits = [False, True] if budget.share_prompts else [False]
        options = [(candidates, split) for split in splits for candidates in (64, 0)]
    if budget.share_prompts:
        items = _prompt_group_items(lengths, budget.row_length)
    else:
        items = [
            PackingItem(size, (i,), prompt)
            for i, (size, prompt) in enumerate(zip(lengths.totals.tolist(), lengths.prompts.tolist(), strict=True))
        ]
    for num_candidates, split_groups in options:
        yield RowPacker(items, lengths.completions.tolist(), num_candidates=num_candidates, split_groups=split_groups)


def _prompt_group_items(lengths: SequenceLengths, max_tokens: int) -> list[PackingItem]:
    """Returns the samples grouped by prompt, with groups split into parts of at most `max_tokens` tokens."""
    groups: dict[int, list[int]] = {}
    for i, key in enumerate(lengths.prompt_keys.tolist()):
        groups.setdefault(key, []).append(i)
    prompts, completions = lengths.prompts.tolist(), lengths.completions.tolist()
    items = []
    for members in groups.values():
        prompt = prompts[members[0]]
        group = PackingItem(prompt + sum(completions[i] for i in members), tuple(members), prompt)
        items += split_group(group, completions, max_tokens)
    return items


def _assign_rows(
    packing: Packing, lengths: SequenceLengths, budget: TokenBudget, sequence_cost: SequenceCost, num_devices: int
) -> MicroBatchPlan:
    """Assigns packed rows to micro-batches and devices, after merging copies of a prompt within a row."""
    micro_batches: list[MicroBatch] = []
    loads: list[float] = [0] * num_devices
    prompt_keys = lengths.prompt_keys.tolist()
    for (rows_per_device, num_tokens), num_micro_batches, rows in packing:
        if budget.share_prompts:
            rows = [merge_shared_prompts(row, prompt_keys) for row in rows]
        sizes = {"num_micro_batches": num_micro_batches, "num_devices": num_devices, "rows_per_device": rows_per_device}
        if budget.balance:
            costs = _row_costs(rows, lengths, sequence_cost)
            assigned, loads = assign_rows_balanced(costs, device_loads=loads, **sizes)
        else:
            assigned = assign_rows_in_order(len(rows), **sizes)
        segments = [tuple(item.sample_indices for item in row) for row in rows]
        shape = RowShape(num_tokens, num_tokens)
        for numbers in assigned:
            micro_batches.append(MicroBatch(tuple(() if n == EMPTY_SLOT else segments[n] for n in numbers), shape))
    return MicroBatchPlan(tuple(micro_batches))


def _row_costs(rows: Sequence[PackingRow], lengths: SequenceLengths, sequence_cost: SequenceCost) -> list[float]:
    """Returns the cost of each row: the cost of each prompt once, plus the additional cost of each completion."""
    prompts = sequence_cost(lengths.prompts)
    added = (sequence_cost(lengths.totals) - prompts).tolist()
    prompts = prompts.tolist()
    return [
        sum([prompts[item.sample_indices[0]] + sum([added[i] for i in item.sample_indices]) for item in row])
        for row in rows
    ]
