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

from app.batching.bin_packing import Item, ItemRow, Shelf, merged, parts
from app.batching.length_buckets import rung
from app.batching.load_balancing import EMPTY, deal_evenly, deal_in_order
from app.batching.micro_batch_shapes import BLOCK, Fit, Shape, evenly, fewest, ladder, lower_bound

Segment = tuple[int, ...]
"""Samples that stand behind one copy of their prompt; one sample where nothing is shared."""
Row = tuple[Segment, ...]
Work = Callable[[np.ndarray], np.ndarray]
"""Lengths -> forward FLOPs of a lone sequence of each length. Whole numbers, so that sums are exact in any order."""

MANY_SAMPLES = 1024
"""With more, one way of packing them is tried: it fills rows well by itself, and others would cost time."""
SHORTEST_ROW = 256
"""Tokens of a packed row where the quota allows: many short samples end in less padding."""
LONGEST_SHARED_ROW = 32_768
"""Tokens of a row that no single sample asks for: what finds the visible blocks of a row grows with its square."""
SMALLEST_COMPLETION = 4
"""The smallest rung of completions of fixed rows, in tokens."""


@dataclass(frozen=True, slots=True)
class RowShape:
    """Static sizes of a packed row, in tokens."""

    num_tokens: int
    num_completion_tokens: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One host's rows of a micro-batch, its devices one after another; an empty row is padding."""

    rows: tuple[Row, ...]
    shape: RowShape


@dataclass(frozen=True, slots=True)
class Plan:
    """One host's micro-batches, in the order in which they are computed."""

    micro_batches: tuple[MicroBatch, ...]

    @property
    def num_micro_batches(self) -> int:
        return len(self.micro_batches)


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """How long one host's samples are, in tokens, and which of them have the same prompt."""

    prompts: Int64[np.ndarray, "N"]
    completions: Int64[np.ndarray, "N"]
    prompt_numbers: Int64[np.ndarray, "N"]
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


def row_length(max_tokens_per_device: int, longest: int, *, longest_group: int = 0) -> int:
    """Tokens of a full row: the quota, halved while two of the longest samples and one of the longest groups still fit.

    Longer rows cost next to nothing, since attention passes over what a token does not see, and end in less padding;
    shorter ones are dealt more evenly. Rounded down to whole blocks of 128 where that still holds the longest sample.

    Args:
        longest_group: tokens of a shared prompt with all its completions, at most; 0 where none are known.

    Raises:
        ValueError: the longest possible sample is over the quota.
    """
    if longest > max_tokens_per_device:
        raise ValueError(f"a sample may have {longest} tokens, over the quota of {max_tokens_per_device}")
    length = max_tokens_per_device
    while length // 2 >= max(2 * longest, min(longest_group, LONGEST_SHARED_ROW), SHORTEST_ROW):
        length //= 2
    rounded = length // BLOCK * BLOCK
    return rounded if rounded >= max(longest, BLOCK) else length


def plan_fixed(
    hosts: Sequence[Lengths], *, rows_per_device: int | None, devices_per_host: int, trim_tail: bool
) -> tuple[Plan, ...]:
    """One sample a row, in order, `rows_per_device` rows on each device of a micro-batch.

    As many micro-batches on every host as the fullest needs, at least one; never more rows than there are samples for.
    All rows have the rungs that hold the longest sample and the longest completion of any host.

    Args:
        rows_per_device: None puts everything into one micro-batch.
        trim_tail: the last micro-batch has no more rows than its samples need: a second shape, less padding.
    """
    most = max(len(host.prompts) for host in hosts)
    enough = max(1, -(-most // devices_per_host))
    rows = min(rows_per_device or enough, enough) * devices_per_host
    count = max(1, -(-most // rows))
    tail = rows
    if trim_tail:
        tail = max(1, -(-(most - (count - 1) * rows) // devices_per_host)) * devices_per_host
    shape = fixed_shape(
        max((int(host.totals.max(initial=1)) for host in hosts), default=1),
        max((int(host.completions.max(initial=1)) for host in hosts), default=1),
    )
    return tuple(_in_order(len(host.prompts), [rows] * (count - 1) + [tail], shape) for host in hosts)


def fixed_shape(num_tokens: int, num_completion_tokens: int) -> RowShape:
    """The rungs that hold a sample of so many tokens, so many of them its completion's."""
    return RowShape(rung(num_tokens), rung(num_completion_tokens, smallest=SMALLEST_COMPLETION))


def _in_order(num_samples: int, num_rows: Sequence[int], shape: RowShape) -> Plan:
    micro_batches, first = [], 0
    for rows in num_rows:
        samples = range(first, min(first + rows, num_samples))
        padding: tuple[Row, ...] = ((),) * (rows - len(samples))
        micro_batches.append(MicroBatch(tuple(((i,),) for i in samples) + padding, shape))
        first += rows
    return Plan(tuple(micro_batches))


def plan_token_budget(
    hosts: Sequence[Lengths], budget: TokenBudget, work: Work, *, devices_per_host: int
) -> tuple[Plan, ...]:
    """Micro-batches of packed rows, one plan per host: as many as the fullest host needs at best, at least one.

    All have the full shape but the last, the tail, which has the smallest of a few shapes that holds what is left.
    Where more are asked for than are needed, all have the smallest of these shapes that holds rows of even lengths.

    Args:
        work: what a sequence costs; only used with `budget.balance`.

    Raises:
        ValueError: a sample is longer than a row; named with its length and the quota.
    """
    for host in hosts:
        _check_lengths(host, budget)
    shapes = ladder(budget.max_tokens_per_device, budget.row_length)
    fit = _fewest if budget.packing == "best_fit" else _even
    fits = [fit(shelves, shapes, budget, devices_per_host) for shelves in _variants(hosts, budget)]
    cheapest = min(fits, key=lambda fit: fit.cost)
    return tuple(_dealt(cheapest, number, host, budget, work, devices_per_host) for number, host in enumerate(hosts))


def _check_lengths(host: Lengths, budget: TokenBudget) -> None:
    too_long = np.flatnonzero(host.totals > budget.row_length)
    if len(too_long):
        i, quota = int(too_long[0]), budget.max_tokens_per_device
        rows = "" if budget.row_length == quota else f", which gives rows of {budget.row_length}"
        raise ValueError(
            f"sample {i} has {host.totals[i]} tokens, too many for a quota of {quota} tokens per device{rows}"
        )


def _variants(hosts: Sequence[Lengths], budget: TokenBudget) -> Iterator[list[Shelf]]:
    """Ways to go about it, none of which is always the best: the caller keeps the cheapest."""
    for longest, candidates, splits in _ways(sum(len(host.prompts) for host in hosts), budget):
        yield [
            Shelf(
                _groups(host, longest) if budget.share_prompts else _alone(host),
                host.completions.tolist(),
                candidates=candidates,
                splits=splits,
            )
            for host in hosts
        ]


def _ways(num_samples: int, budget: TokenBudget) -> list[tuple[int, int, bool]]:
    """Tokens that an item may have, and how a `Shelf` fills rows."""
    if budget.packing == "karmarkar_karp":
        # Rows cannot be evened out by items that are nearly as long.
        longest = [budget.row_length, budget.row_length // 4] if budget.share_prompts else [budget.row_length]
        return [(tokens, 0, False) for tokens in longest]
    if num_samples > MANY_SAMPLES:
        return [(budget.row_length, 16, budget.share_prompts)]
    splits = [False, True] if budget.share_prompts else [False]
    return [(budget.row_length, candidates, split) for split in splits for candidates in (64, 0)]


def _alone(host: Lengths) -> list[Item]:
    sizes, prompts = host.totals.tolist(), host.prompts.tolist()
    return [Item(size, (i,), prompts[i]) for i, size in enumerate(sizes)]


def _groups(host: Lengths, longest: int) -> list[Item]:
    """Samples by prompt, in parts of at most `longest` tokens."""
    groups: dict[int, list[int]] = {}
    for i, number in enumerate(host.prompt_numbers.tolist()):
        groups.setdefault(number, []).append(i)
    prompts, completions = host.prompts.tolist(), host.completions.tolist()
    items = []
    for members in groups.values():
        prompt = prompts[members[0]]
        group = Item(prompt + sum(completions[i] for i in members), tuple(members), prompt)
        items += parts(group, completions, longest)
    return items


def _fewest(shelves: Sequence[Shelf], shapes: Sequence[Shape], budget: TokenBudget, num_devices: int) -> Fit:
    fit = fewest(shelves, shapes, num_devices, even_tail=budget.balance)
    count = _asked(fit.num_micro_batches, budget)
    if count == fit.num_micro_batches:
        return fit
    return evenly(shelves, shapes, num_devices, count=count) or fit.in_full_shape(shapes[-1], count)


def _even(shelves: Sequence[Shelf], shapes: Sequence[Shape], budget: TokenBudget, num_devices: int) -> Fit:
    count = _asked(lower_bound(shelves, shapes[-1], num_devices), budget)
    while (fit := evenly(shelves, shapes, num_devices, count=count)) is None:
        count = _asked(count + max(1, count // 64), budget)
    return fit


def _asked(count: int, budget: TokenBudget) -> int:
    """The smallest number of micro-batches from `count` on that the budget allows."""
    multiple = budget.num_micro_batches_divisible_by
    return -(-max(count, budget.min_num_micro_batches, 1) // multiple) * multiple


def _dealt(fit: Fit, number: int, host: Lengths, budget: TokenBudget, work: Work, num_devices: int) -> Plan:
    """One host's rows in micro-batches, and on devices. Never changes which samples share a row."""
    micro_batches: list[MicroBatch] = []
    loads: list[float] = [0] * num_devices
    prompt_numbers = host.prompt_numbers.tolist()
    for (rows_per_device, num_tokens), num_micro_batches, rows_of_host in fit.blocks:
        rows = rows_of_host[number]
        if budget.share_prompts:
            rows = [merged(row, prompt_numbers) for row in rows]
        sizes = {
            "num_micro_batches": num_micro_batches,
            "num_devices": num_devices,
            "rows_per_device": rows_per_device,
        }
        if budget.balance:
            dealt, loads = deal_evenly(_work_of(rows, host, work), loads=loads, **sizes)
        else:
            dealt = deal_in_order(len(rows), **sizes)
        segments = [tuple(item.members for item in row) for row in rows]
        shape = RowShape(num_tokens, num_tokens)
        for numbers in dealt:
            micro_batches.append(MicroBatch(tuple(() if n == EMPTY else segments[n] for n in numbers), shape))
    return Plan(tuple(micro_batches))


def _work_of(rows: Sequence[ItemRow], host: Lengths, work: Work) -> list[float]:
    """Of each row: a prompt costs what it costs alone, once; each completion what it adds to that."""
    prompts = work(host.prompts)
    added = (work(host.totals) - prompts).tolist()
    prompts = prompts.tolist()
    return [sum([prompts[item.members[0]] + sum([added[i] for i in item.members]) for item in row]) for row in rows]
