"""Packs segments into rows so that the rows are as full as possible."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import NamedTuple

MAX_GROUPS_TO_SPLIT = 8
"""Maximum number of groups tried when looking for a group to split."""


class PackingItem(NamedTuple):
    """Samples that share one copy of their prompt and become one segment. Sorts by size, then by sample index."""

    num_tokens: int
    """Number of tokens in the prompt and all completions."""
    sample_indices: tuple[int, ...]
    num_prompt_tokens: int
    """Number of tokens in the prompt."""


PackingRow = list[PackingItem]


class RowPacker:
    """Packs items into rows, and removes each item once it is in a row.

    Args:
        completion_lengths: number of completion tokens of each sample.
        num_candidates: number of items searched for the set that fills the rest of a row best; 0 = always take the
            largest item that fits.
        split_groups: whether to fill a row with some of a group's samples if no whole item fits.
    """

    def __init__(
        self,
        items: Sequence[PackingItem],
        completion_lengths: Sequence[int],
        *,
        num_candidates: int,
        split_groups: bool,
    ):
        self.items = sorted(items)
        self.completion_lengths = completion_lengths
        self.num_candidates = num_candidates
        self.split_groups = split_groups
        self.num_tokens = sum(item.num_tokens for item in items)

    def copy(self) -> RowPacker:
        return RowPacker(
            self.items, self.completion_lengths, num_candidates=self.num_candidates, split_groups=self.split_groups
        )

    def pack_row(self, length: int) -> PackingRow:
        """Removes and returns one row's items: large items first, then a subset that leaves few tokens free."""
        row: PackingRow = []
        left = length
        while num_fitting := bisect_left(self.items, (left + 1,)):
            largest = self.items[num_fitting - 1].num_tokens
            # An exact search pays off only for the last few items of a row.
            if self.num_candidates == 0 or largest == left or largest * 3 < left:
                taken = [num_fitting - 1]
            else:
                # Search an evenly spaced selection of the items.
                count = min(num_fitting, self.num_candidates)
                candidates = [i * (num_fitting - 1) // max(count - 1, 1) for i in range(count)]
                best = best_subset([self.items[i].num_tokens for i in candidates], left)
                taken = [candidates[i] for i in best]
            for i in taken:
                row.append(self.items.pop(i))
                left -= row[-1].num_tokens
        self.num_tokens -= length - left
        if self.split_groups and (part := self._split_group(left)):
            row.append(part)
        return row

    def _split_group(self, capacity: int) -> PackingItem | None:
        """Removes and returns the part of a group that best fills `capacity`; None if none is worth a second prompt."""
        best: tuple[int, int, list[int]] = (0, -1, [])
        for i in range(len(self.items) - 1, max(-1, len(self.items) - 1 - MAX_GROUPS_TO_SPLIT), -1):
            _, members, prompt = self.items[i]
            if len(members) > 1 and capacity - prompt >= prompt:
                lengths = [self.completion_lengths[j] for j in members]
                taken = best_subset(lengths, capacity - prompt)
                gain = sum(lengths[k] for k in taken)
                if gain >= prompt and gain > best[0]:
                    best = (gain, i, taken)
        gain, i, taken = best
        if not taken:
            return None
        size, members, prompt = self.items.pop(i)
        rest = tuple(j for k, j in enumerate(members) if k not in taken)
        self.num_tokens -= gain
        insort(self.items, PackingItem(size - gain, rest, prompt))
        return PackingItem(prompt + gain, tuple(members[k] for k in sorted(taken)), prompt)


def best_subset(sizes: Sequence[int], capacity: int) -> list[int]:
    """Returns the indices, in descending order, of a subset of `sizes` with the largest sum up to `capacity`.

    Ties prefer later sizes. Bit s of `sums` is 1 if some subset of the sizes so far has the sum s.
    """
    reachable = (2 << capacity) - 1
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


def split_group(item: PackingItem, completion_lengths: Sequence[int], max_tokens: int) -> Iterator[PackingItem]:
    """Yields parts of a group with at most `max_tokens` tokens, or one longer sample; each part repeats the prompt."""
    size, members, prompt = item
    while size > max_tokens and len(members) > 1:
        lengths = [completion_lengths[i] for i in members]
        taken = best_subset(lengths, max(max_tokens - prompt, 0)) or [lengths.index(max(lengths))]
        gain = sum(lengths[k] for k in taken)
        yield PackingItem(prompt + gain, tuple(members[k] for k in sorted(taken)), prompt)
        members = tuple(i for k, i in enumerate(members) if k not in taken)
        size -= gain
    if members:
        yield PackingItem(size, members, prompt)


def merge_shared_prompts(row: PackingRow, prompt_keys: Sequence[int]) -> PackingRow:
    """Returns the row with one copy of each prompt: merges the parts of a group that share the row."""
    keys = [prompt_keys[item.sample_indices[0]] for item in row]
    if len(set(keys)) == len(row):
        return row
    by_prompt: dict[int, PackingItem] = {}
    for key, item in zip(keys, row, strict=True):
        size, members, prompt = by_prompt.get(key, (item.num_prompt_tokens, (), item.num_prompt_tokens))
        by_prompt[key] = PackingItem(size + item.num_tokens - prompt, members + item.sample_indices, prompt)
    return list(by_prompt.values())


def pack_all(packer: RowPacker, *, num_rows: int, length: int) -> list[PackingRow] | None:
    """Packs all items into at most `num_rows` rows; returns None if they do not fit. Does not change the packer."""
    packer = packer.copy()
    rows = []
    while packer.items:
        if packer.num_tokens > (num_rows - len(rows)) * length:
            return None
        rows.append(packer.pack_row(length))
    return rows
