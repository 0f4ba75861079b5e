"""Which sample goes into which row of which micro-batch. numpy only: no JAX, no settings, no devices.

Every host plans for all hosts from the same all-gathered lengths, so counts and shapes agree by construction.
Samples stay on their host. Ties are broken by index: the same lengths always give the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int64

from app.batching.deal import EMPTY, deal_evenly, deal_in_order
from app.batching.ladder import rung
from app.batching.rows import Item, Shelf, fill_all

Segment = tuple[int, ...]
"""Samples that stand behind one copy of their prompt; one sample where nothing is shared."""
Row = tuple[Segment, ...]
Work = Callable[[np.ndarray], np.ndarray]
"""Lengths -> forward FLOPs of a lone sequence of each length. Whole numbers, so that sums are exact in any order."""

SMALLEST_COMPLETION = 4
"""The smallest rung of completions of fixed rows, in tokens."""
TAIL_SHARES = tuple(Fraction(n, 16) for n in (1, 2, 3, 4, 6, 8, 12, 16))
"""Shares of the quota that the last micro-batch may have: few, since each is a shape to compile."""


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


def row_length(max_tokens_per_device: int, longest: int) -> int:
    """Tokens of a full row: the quota halved while two samples of the longest possible length still fit.

    Rounded down to whole blocks of 128 where that still holds the longest sample.

    Raises:
        ValueError: the longest possible sample is over the quota.
    """
    if longest > max_tokens_per_device:
        raise ValueError(f"a sample may have {longest} tokens, over the quota of {max_tokens_per_device}")
    length = max_tokens_per_device
    while length // 2 >= 2 * longest:
        length //= 2
    rounded = length // 128 * 128
    return rounded if rounded >= max(longest, 128) else length


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

    Args:
        work: what a sequence costs; only used with `budget.balance`.

    Raises:
        ValueError: a sample is longer than a row; named with its length and the quota.
    """
    for host in hosts:
        _check_lengths(host, budget)
    variants = [[Shelf(_items(host, budget)) for host in hosts]]
    ladder = _ladder(budget)
    packed = [_pack(shelves, ladder, budget, devices_per_host) for shelves in variants][0]
    return tuple(
        _dealt(rows, packed.shapes, host, budget, work, devices_per_host)
        for rows, host in zip(packed.rows, hosts, strict=True)
    )


def _check_lengths(host: Lengths, budget: TokenBudget) -> None:
    too_long = np.flatnonzero(host.totals > budget.row_length)
    if len(too_long):
        i = int(too_long[0])
        raise ValueError(
            f"sample {i} has {host.totals[i]} tokens, over the row of {budget.row_length} tokens "
            f"that a quota of {budget.max_tokens_per_device} tokens per device gives"
        )


class _Shape(NamedTuple):
    """Rows on each device of a micro-batch."""

    rows_per_device: int
    num_tokens: int

    @property
    def tokens_per_device(self) -> int:
        return self.rows_per_device * self.num_tokens


def _ladder(budget: TokenBudget) -> list[_Shape]:
    """Shapes a micro-batch may have, smallest first; the last is the full one."""
    shapes = {_rung_shape(int(budget.max_tokens_per_device * share), budget.row_length) for share in TAIL_SHARES}
    return sorted(shapes, key=lambda shape: (shape.tokens_per_device, shape.rows_per_device))


def _rung_shape(num_tokens: int, row_length: int) -> _Shape:
    if num_tokens >= row_length:
        return _Shape(num_tokens // row_length, row_length)
    return _Shape(1, num_tokens // 128 * 128 or max(1, num_tokens))


def _items(host: Lengths, budget: TokenBudget) -> list[Item]:
    prompts, totals = host.prompts.tolist(), host.totals.tolist()
    return [Item(totals[i], (i,), prompts[i]) for i in range(len(totals))]


class _Packed(NamedTuple):
    shapes: list[_Shape]
    """Of each micro-batch."""
    rows: list[tuple[list[list[Item]], list[list[Item]]]]
    """Of each host: rows of the full micro-batches, and of the tail."""


def _pack(shelves: Sequence[Shelf], ladder: Sequence[_Shape], budget: TokenBudget, num_devices: int) -> _Packed:
    full = ladder[-1]
    per_micro_batch = num_devices * full.rows_per_device
    most = max(shelf.num_tokens for shelf in shelves)
    count = max(1, -(-most // (num_devices * full.tokens_per_device)))
    shelves = [shelf.copy() for shelf in shelves]
    rows: list[list[list[Item]]] = [[] for _ in shelves]

    def fill(num_micro_batches: int) -> None:
        for shelf, filled in zip(shelves, rows, strict=True):
            for _ in range(num_micro_batches * per_micro_batch):
                if shelf.items:
                    filled.append(shelf.fill(full.num_tokens))

    fill(count - 1)
    while True:
        for shape in ladder:
            tails = [
                fill_all(shelf, num_rows=num_devices * shape.rows_per_device, length=shape.num_tokens)
                for shelf in shelves
            ]
            if all(tail is not None for tail in tails):
                return _Packed([full] * (count - 1) + [shape], list(zip(rows, tails, strict=True)))
        fill(1)
        count += 1


def _dealt(
    rows: tuple[list[list[Item]], list[list[Item]]],
    shapes: Sequence[_Shape],
    host: Lengths,
    budget: TokenBudget,
    work: Work,
    num_devices: int,
) -> Plan:
    loads = [0.0] * num_devices
    micro_batches = []
    whole, prompt = work(host.totals), work(host.prompts)
    for part, part_shapes in zip(rows, (shapes[:-1], shapes[-1:]), strict=True):
        if not part_shapes:
            continue
        shape = part_shapes[0]
        counts = {
            "num_micro_batches": len(part_shapes),
            "num_devices": num_devices,
            "rows_per_device": shape.rows_per_device,
        }
        if budget.balance:
            works = [
                float(sum(prompt[item.members[0]] + sum(whole[i] - prompt[i] for i in item.members) for item in row))
                for row in part
            ]
            dealt, loads = deal_evenly(works, loads=loads, **counts)
        else:
            dealt = deal_in_order(len(part), **counts)
        for numbers in dealt:
            segments = tuple(tuple(item.members for item in part[n]) if n != EMPTY else () for n in numbers)
            micro_batches.append(MicroBatch(segments, RowShape(shape.num_tokens, shape.num_tokens)))
    return Plan(tuple(micro_batches))
