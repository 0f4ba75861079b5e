"""Segments -> rows as full as possible, never over their length."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from app.batching.karmarkar_karp import karmarkar_karp

SPLITS_TRIED = 8
"""Groups that are looked at when one is to be split."""


class Item(NamedTuple):
    """A segment to be: samples behind one copy of their prompt. Sorts by size, then by sample."""

    size: int
    """Tokens of the prompt and of all completions."""
    members: tuple[int, ...]
    prompt: int
    """Tokens of the prompt."""


ItemRow = list[Item]


class Shelf:
    """The items of one host that have no row yet.

    Args:
        completions: tokens of every sample's completion.
        candidates: items among which the exact best completion of a row is sought; 0 takes the largest that fits.
        splits: whether a row that no item fits into any more may have some of a group's samples.
    """

    def __init__(self, items: Sequence[Item], completions: Sequence[int], *, candidates: int, splits: bool):
        self.items = sorted(items)
        self.completions = completions
        self.candidates = candidates
        self.splits = splits
        self.num_tokens = sum(item.size for item in items)

    def copy(self) -> Shelf:
        return Shelf(self.items, self.completions, candidates=self.candidates, splits=self.splits)

    def fill(self, length: int) -> ItemRow:
        """Takes items for one row off the shelf: large ones first, and last those that leave the fewest tokens free."""
        row: ItemRow = []
        left = length
        while num_fitting := bisect_left(self.items, (left + 1,)):
            largest = self.items[num_fitting - 1].size
            # An exact search pays for the last few items of a row only.
            if self.candidates == 0 or largest == left or largest * 3 < left:
                taken = [num_fitting - 1]
            else:
                taken = self._best_among(num_fitting, left)
            for i in taken:
                row.append(self.items.pop(i))
                left -= row[-1].size
        self.num_tokens -= length - left
        if self.splits and (part := self._split(left)):
            row.append(part)
        return row

    def _best_among(self, num_fitting: int, room: int) -> list[int]:
        """Items that fill the room best, last first; of very many, every so-manieth is looked at."""
        count = min(num_fitting, self.candidates)
        looked_at = [i * (num_fitting - 1) // max(count - 1, 1) for i in range(count)]
        return [looked_at[i] for i in best_subset([self.items[i].size for i in looked_at], room)]

    def _split(self, room: int) -> Item | None:
        """Some samples of a group that has no room, if they bring at least as many tokens as their prompt repeats."""
        best: tuple[int, int, list[int]] = (0, -1, [])
        for i in range(len(self.items) - 1, max(-1, len(self.items) - 1 - SPLITS_TRIED), -1):
            _, members, prompt = self.items[i]
            if len(members) > 1 and room - prompt >= prompt:
                lengths = [self.completions[j] for j in members]
                taken = best_subset(lengths, room - prompt)
                gain = sum(lengths[k] for k in taken)
                if gain >= prompt and gain > best[0]:
                    best = (gain, i, taken)
        gain, i, taken = best
        if not taken:
            return None
        size, members, prompt = self.items.pop(i)
        rest = tuple(j for k, j in enumerate(members) if k not in taken)
        self.num_tokens -= gain
        insort(self.items, Item(size - gain, rest, prompt))
        return Item(prompt + gain, tuple(members[k] for k in sorted(taken)), prompt)


def best_subset(sizes: Sequence[int], room: int) -> list[int]:
    """Indices, last first, of the numbers whose sum is the largest up to `room`; the last numbers where several are.

    Bit s of an integer tells whether some of the numbers so far have the sum s.
    """
    reachable = (2 << room) - 1
    sums = 1
    without = []
    for size in sizes:
        without.append(sums)
        sums |= sums << size & reachable
    left = sums.bit_length() - 1
    subset = []
    for i in range(len(sizes) - 1, -1, -1):
        if sizes[i] <= left and without[i] >> (left - sizes[i]) & 1:
            subset.append(i)
            left -= sizes[i]
    return subset


def parts(item: Item, completions: Sequence[int], largest: int) -> Iterator[Item]:
    """A group in parts of at most `largest` tokens, or of one sample, each with a copy of the prompt."""
    size, members, prompt = item
    while size > largest and len(members) > 1:
        lengths = [completions[i] for i in members]
        taken = best_subset(lengths, max(largest - prompt, 0)) or [lengths.index(max(lengths))]
        gain = sum(lengths[k] for k in taken)
        yield Item(prompt + gain, tuple(members[k] for k in sorted(taken)), prompt)
        members = tuple(i for k, i in enumerate(members) if k not in taken)
        size -= gain
    if members:
        yield Item(size, members, prompt)


def merged(row: ItemRow, prompt_numbers: Sequence[int]) -> ItemRow:
    """The row with one copy of every prompt: parts of a group may have met again."""
    numbers = [prompt_numbers[item.members[0]] for item in row]
    if len(set(numbers)) == len(row):
        return row
    by_prompt: dict[int, Item] = {}
    for number, item in zip(numbers, row, strict=True):
        size, members, prompt = by_prompt.get(number, (item.prompt, (), item.prompt))
        by_prompt[number] = Item(size + item.size - prompt, members + item.members, prompt)
    return list(by_prompt.values())


def fill_all(shelf: Shelf, *, num_rows: int, length: int) -> list[ItemRow] | None:
    """Everything on the shelf in at most `num_rows` rows, or None. The shelf stays as it is."""
    rest = shelf.copy()
    rows = []
    while rest.items:
        if rest.num_tokens > (num_rows - len(rows)) * length:
            return None
        rows.append(rest.fill(length))
    return rows


def spread_all(items: Sequence[Item], *, num_rows: int, length: int) -> list[ItemRow] | None:
    """The same in rows of even lengths, by Karmarkar-Karp; None where one would be over `length`."""
    if sum(item.size for item in items) > num_rows * length:
        return None
    parts = karmarkar_karp([item.size for item in items], num_rows)
    rows = [[items[i] for i in part] for part in parts if part]
    return rows if all(sum(item.size for item in row) <= length for row in rows) else None
