"""Which sample goes into which row of which micro-batch. numpy only: no JAX, no settings, no devices.

Every host plans for all hosts from the same all-gathered lengths, so counts and shapes agree by construction.
Samples stay on their host. Ties are broken by index: the same lengths always give the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Int64

from app.batching.bin_packing import PackingItem, PackingRow, RowPacker, merge_shared_prompts, split_group
from app.batching.length_buckets import bucket_length
from app.batching.load_balancing import EMPTY_SLOT, assign_rows_balanced, assign_rows_in_order
from app.batching.micro_batch_shapes import (
    BLOCK_TOKENS,
    MicroBatchShape,
    Packing,
    candidate_shapes,
    min_micro_batches,
    pack_evenly,
    pack_into_fewest,
)

PackedSegment = tuple[int, ...]
"""Samples that stand behind one copy of their prompt; one sample where nothing is shared."""
PackedRow = tuple[PackedSegment, ...]
SequenceCost = Callable[[np.ndarray], np.ndarray]
"""Lengths -> forward FLOPs of a lone sequence of each length. Whole numbers, so that sums are exact in any order."""

MAX_SAMPLES_FOR_SEARCH = 1024
"""With more, one way of packing them is tried: it fills rows well by itself, and others would cost time."""
MIN_ROW_LENGTH = 256
"""Tokens of a packed row where the quota allows: many short samples end in less padding."""
MAX_SHARED_ROW_LENGTH = 32_768
"""Tokens of a row that no single sample asks for: what finds the visible blocks of a row grows with its square."""
MIN_COMPLETION_BUCKET = 4
"""The smallest rung of completions of fixed rows, in tokens."""


@dataclass(frozen=True, slots=True)
class RowShape:
    """Static sizes of a packed row, in tokens."""

    num_tokens: int
    num_completion_tokens: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One host's rows of a micro-batch, its devices one after another; an empty row is padding."""

    rows: tuple[PackedRow, ...]
    shape: RowShape


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """One host's micro-batches, in the order in which they are computed."""

    micro_batches: tuple[MicroBatch, ...]

    @property
    def num_micro_batches(self) -> int:
        return len(self.micro_batches)


@dataclass(frozen=True, slots=True, eq=False)
class SequenceLengths:
    """How long one host's samples are, in tokens, and which of them have the same prompt."""

    prompts: Int64[np.ndarray, "N"]
    completions: Int64[np.ndarray, "N"]
    prompt_indices: Int64[np.ndarray, "N"]
    """Equal where prompts are equal."""

    @property
    def totals(self) -> Int64[np.ndarray, "N"]:
        return self.prompts + self.completions


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """How samples share micro-batches of at most `max_tokens_per_device` tokens on each device."""

    max_tokens_per_device: int
    row_length: int
    """See `row_length`."""
    share_prompts: bool
    packing: Literal["best_fit", "karmarkar_karp"]
    balance: bool
    """Deal rows so that devices have even work; else in packing order."""
    min_num_micro_batches: int = 1
    num_micro_batches_divisible_by: int = 1


def choose_row_length(max_tokens_per_device: int, max_sample_tokens: int, *, max_group_tokens: int = 0) -> int:
    """Tokens of a full row: the quota, halved while two of the longest samples and one of the longest groups still fit.

    Longer rows cost next to nothing, since attention passes over what a token does not see, and end in less padding;
    shorter ones are dealt more evenly. Rounded down to whole blocks of 128 where that still holds the longest sample.

    Args:
        longest_group: tokens of a shared prompt with all its completions, at most; 0 where none are known.

    Raises:
        ValueError: the longest possible sample is over the quota.
    """
    if max_sample_tokens > max_tokens_per_device:
        raise ValueError(f"a sample may have {max_sample_tokens} tokens, over the quota of {max_tokens_per_device}")
    length = max_tokens_per_device
    while length // 2 >= max(2 * max_sample_tokens, min(max_group_tokens, MAX_SHARED_ROW_LENGTH), MIN_ROW_LENGTH):
        length //= 2
    rounded = length // BLOCK_TOKENS * BLOCK_TOKENS
    return rounded if rounded >= max(max_sample_tokens, BLOCK_TOKENS) else length


def plan_fixed_rows(
    lengths_by_host: Sequence[SequenceLengths], *, rows_per_device: int | None, devices_per_host: int, trim_tail: bool
) -> tuple[MicroBatchPlan, ...]:
    """One sample a row, in order, `rows_per_device` rows on each device of a micro-batch.

    As many micro-batches on every host as the fullest needs, at least one; never more rows than there are samples for.
    All rows have the rungs that hold the longest sample and the longest completion of any host.

    Args:
        rows_per_device: None puts everything into one micro-batch.
        trim_tail: the last micro-batch has no more rows than its samples need: a second shape, less padding.
    """
    most = max(len(host.prompts) for host in lengths_by_host)
    enough = max(1, -(-most // devices_per_host))
    rows = min(rows_per_device or enough, enough) * devices_per_host
    count = max(1, -(-most // rows))
    tail = rows
    if trim_tail:
        tail = max(1, -(-(most - (count - 1) * rows) // devices_per_host)) * devices_per_host
    shape = bucketed_row_shape(
        max((int(host.totals.max(initial=1)) for host in lengths_by_host), default=1),
        max((int(host.completions.max(initial=1)) for host in lengths_by_host), default=1),
    )
    return tuple(_plan_in_order(len(host.prompts), [rows] * (count - 1) + [tail], shape) for host in lengths_by_host)


def bucketed_row_shape(num_tokens: int, num_completion_tokens: int) -> RowShape:
    """The rungs that hold a sample of so many tokens, so many of them its completion's."""
    return RowShape(bucket_length(num_tokens), bucket_length(num_completion_tokens, min_bucket=MIN_COMPLETION_BUCKET))


def _plan_in_order(num_samples: int, rows_per_micro_batch: Sequence[int], shape: RowShape) -> MicroBatchPlan:
    micro_batches, first = [], 0
    for rows in rows_per_micro_batch:
        samples = range(first, min(first + rows, num_samples))
        padding: tuple[PackedRow, ...] = ((),) * (rows - len(samples))
        micro_batches.append(MicroBatch(tuple(((i,),) for i in samples) + padding, shape))
        first += rows
    return MicroBatchPlan(tuple(micro_batches))


def plan_token_budget(
    lengths_by_host: Sequence[SequenceLengths],
    budget: TokenBudget,
    sequence_cost: SequenceCost,
    *,
    devices_per_host: int,
) -> tuple[MicroBatchPlan, ...]:
    """Micro-batches of packed rows, one plan per host: as many as the fullest host needs at best, at least one.

    All have the full shape but the last, the tail, which has the smallest of a few shapes that holds what is left.
    Where more are asked for than are needed, all have the smallest of these shapes that holds rows of even lengths.

    Args:
        work: what a sequence costs; only used with `budget.balance`.

    Raises:
        ValueError: a sample is longer than a row; named with its length and the quota.
    """
    for host in lengths_by_host:
        _check_lengths(host, budget)
    shapes = candidate_shapes(budget.max_tokens_per_device, budget.row_length)
    fit = _best_fit_packing if budget.packing == "best_fit" else _karmarkar_karp_packing
    fits = [fit(shelves, shapes, budget, devices_per_host) for shelves in _packer_variants(lengths_by_host, budget)]
    cheapest = min(fits, key=lambda fit: fit.cost)
    return tuple(
        _assign_rows(cheapest, number, host, budget, sequence_cost, devices_per_host)
        for number, host in enumerate(lengths_by_host)
    )


def _check_lengths(lengths: SequenceLengths, budget: TokenBudget) -> None:
    too_long = np.flatnonzero(lengths.totals > budget.row_length)
    if len(too_long):
        i, quota = int(too_long[0]), budget.max_tokens_per_device
        rows = "" if budget.row_length == quota else f", which gives rows of {budget.row_length}"
        raise ValueError(
            f"sample {i} has {lengths.totals[i]} tokens, too many for a quota of {quota} tokens per device{rows}"
        )


def _packer_variants(lengths_by_host: Sequence[SequenceLengths], budget: TokenBudget) -> Iterator[list[RowPacker]]:
    """Ways to go about it, none of which is always the best: the caller keeps the cheapest."""
    for longest, candidates, splits in _packing_options(sum(len(host.prompts) for host in lengths_by_host), budget):
        yield [
            RowPacker(
                _prompt_group_items(host, longest) if budget.share_prompts else _single_sample_items(host),
                host.completions.tolist(),
                num_candidates=candidates,
                split_groups=splits,
            )
            for host in lengths_by_host
        ]


def _packing_options(num_samples: int, budget: TokenBudget) -> list[tuple[int, int, bool]]:
    """Tokens that an item may have, and how a `Shelf` fills rows."""
    if budget.packing == "karmarkar_karp":
        # Rows cannot be evened out by items that are nearly as long.
        longest = [budget.row_length, budget.row_length // 4] if budget.share_prompts else [budget.row_length]
        return [(tokens, 0, False) for tokens in longest]
    if num_samples > MAX_SAMPLES_FOR_SEARCH:
        return [(budget.row_length, 16, budget.share_prompts)]
    splits = [False, True] if budget.share_prompts else [False]
    return [(budget.row_length, candidates, split) for split in splits for candidates in (64, 0)]


def _single_sample_items(lengths: SequenceLengths) -> list[PackingItem]:
    sizes, prompts = lengths.totals.tolist(), lengths.prompts.tolist()
    return [PackingItem(size, (i,), prompts[i]) for i, size in enumerate(sizes)]


def _prompt_group_items(lengths: SequenceLengths, max_tokens: int) -> list[PackingItem]:
    """Samples by prompt, in parts of at most `longest` tokens."""
    groups: dict[int, list[int]] = {}
    for i, number in enumerate(lengths.prompt_indices.tolist()):
        groups.setdefault(number, []).append(i)
    prompts, completions = lengths.prompts.tolist(), lengths.completions.tolist()
    items = []
    for members in groups.values():
        prompt = prompts[members[0]]
        group = PackingItem(prompt + sum(completions[i] for i in members), tuple(members), prompt)
        items += split_group(group, completions, max_tokens)
    return items


def _best_fit_packing(
    packers: Sequence[RowPacker], shapes: Sequence[MicroBatchShape], budget: TokenBudget, num_devices: int
) -> Packing:
    fit = pack_into_fewest(packers, shapes, num_devices, even_tail=budget.balance)
    count = _allowed_num_micro_batches(fit.num_micro_batches, budget)
    if count == fit.num_micro_batches:
        return fit
    return pack_evenly(packers, shapes, num_devices, count=count) or fit.to_full_shape(shapes[-1], count)


def _karmarkar_karp_packing(
    packers: Sequence[RowPacker], shapes: Sequence[MicroBatchShape], budget: TokenBudget, num_devices: int
) -> Packing:
    count = _allowed_num_micro_batches(min_micro_batches(packers, shapes[-1], num_devices), budget)
    while (fit := pack_evenly(packers, shapes, num_devices, count=count)) is None:
        count = _allowed_num_micro_batches(count + max(1, count // 64), budget)
    return fit


def _allowed_num_micro_batches(count: int, budget: TokenBudget) -> int:
    """The smallest number of micro-batches from `count` on that the budget allows."""
    multiple = budget.num_micro_batches_divisible_by
    return -(-max(count, budget.min_num_micro_batches, 1) // multiple) * multiple


def _assign_rows(
    packing: Packing,
    host_index: int,
    lengths: SequenceLengths,
    budget: TokenBudget,
    sequence_cost: SequenceCost,
    num_devices: int,
) -> MicroBatchPlan:
    """One host's rows in micro-batches, and on devices. Never changes which samples share a row."""
    micro_batches: list[MicroBatch] = []
    loads: list[float] = [0] * num_devices
    prompt_numbers = lengths.prompt_indices.tolist()
    for (rows_per_device, num_tokens), num_micro_batches, rows_of_host in packing.shape_groups:
        rows = rows_of_host[host_index]
        if budget.share_prompts:
            rows = [merge_shared_prompts(row, prompt_numbers) for row in rows]
        sizes = {
            "num_micro_batches": num_micro_batches,
            "num_devices": num_devices,
            "rows_per_device": rows_per_device,
        }
        if budget.balance:
            dealt, loads = assign_rows_balanced(_row_costs(rows, lengths, sequence_cost), device_loads=loads, **sizes)
        else:
            dealt = assign_rows_in_order(len(rows), **sizes)
        segments = [tuple(item.sample_indices for item in row) for row in rows]
        shape = RowShape(num_tokens, num_tokens)
        for numbers in dealt:
            micro_batches.append(MicroBatch(tuple(() if n == EMPTY_SLOT else segments[n] for n in numbers), shape))
    return MicroBatchPlan(tuple(micro_batches))


def _row_costs(rows: Sequence[PackingRow], lengths: SequenceLengths, sequence_cost: SequenceCost) -> list[float]:
    """Of each row: a prompt costs what it costs alone, once; each completion what it adds to that."""
    prompts = sequence_cost(lengths.prompts)
    added = (sequence_cost(lengths.totals) - prompts).tolist()
    prompts = prompts.tolist()
    return [
        sum([prompts[item.sample_indices[0]] + sum([added[i] for i in item.sample_indices]) for item in row])
        for row in rows
    ]
