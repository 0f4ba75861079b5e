from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.batching.bin_packing import (
    PackingItem,
    RowPacker,
    best_subset,
    merge_shared_prompts,
    pack_all,
    split_group,
)

SIZES = st.lists(st.integers(0, 30), max_size=9)


def make_shelf(sizes: list[int], *, candidates: int = 64, splits: bool = False) -> RowPacker:
    items = [PackingItem(size, (i,), 0) for i, size in enumerate(sizes)]
    return RowPacker(items, sizes, num_candidates=candidates, split_groups=splits)


@given(SIZES, st.integers(0, 100))
def test_the_best_subset_leaves_as_little_room_as_any(sizes, room):
    subset = best_subset(sizes, room)
    assert len(set(subset)) == len(subset)
    sums = [sum(c) for n in range(len(sizes) + 1) for c in itertools.combinations(sizes, n)]
    assert sum(sizes[i] for i in subset) == max(s for s in sums if s <= room)


def test_of_several_best_subsets_the_one_with_the_last_numbers_is_taken():
    assert best_subset([1, 2, 3, 4, 5], 5) == [4]
    assert best_subset([5, 2, 3], 5) == [2, 1]


@pytest.mark.parametrize("candidates", [0, 2, 64])
@pytest.mark.parametrize("splits", [False, True])
@given(sizes=SIZES, length=st.integers(30, 100))
def test_a_row_is_never_over_its_length_and_nothing_more_fits(candidates, splits, sizes, length):
    shelf = make_shelf(sizes, candidates=candidates, splits=splits)
    row = shelf.pack_row(length)
    held = sum(item.num_tokens for item in row)
    assert held <= length
    assert all(held + item.num_tokens > length for item in shelf.items)
    assert sorted(row + shelf.items) == sorted(make_shelf(sizes).items)
    assert shelf.num_tokens == sum(sizes) - held


def test_an_exact_search_fills_what_the_largest_first_leaves_free():
    sizes = [40, 40, 30, 30]
    assert sum(item.num_tokens for item in make_shelf(sizes, candidates=0).pack_row(100)) == 80
    assert sum(item.num_tokens for item in make_shelf(sizes).pack_row(100)) == 100


def test_the_rest_of_a_split_group_stays_on_the_shelf_with_its_prompt():
    shelf = RowPacker(
        [PackingItem(60, (0, 1, 2), 6), PackingItem(50, (3,), 1)],
        [10, 20, 24, 49],
        num_candidates=64,
        split_groups=True,
    )
    assert shelf.pack_row(92) == [PackingItem(60, (0, 1, 2), 6)]
    shelf = RowPacker(
        [PackingItem(60, (0, 1, 2), 6), PackingItem(70, (3,), 1)],
        [10, 20, 24, 69],
        num_candidates=64,
        split_groups=True,
    )
    assert shelf.pack_row(101) == [PackingItem(70, (3,), 1), PackingItem(30, (2,), 6)]
    assert shelf.items == [PackingItem(36, (0, 1), 6)]
    assert shelf.num_tokens == 36


def test_no_group_is_split_for_less_than_its_prompt():
    shelf = RowPacker(
        [PackingItem(60, (0, 1, 2), 30), PackingItem(70, (3,), 1)],
        [10, 10, 10, 69],
        num_candidates=64,
        split_groups=True,
    )
    assert shelf.pack_row(119) == [PackingItem(70, (3,), 1)]


@given(st.integers(0, 20), st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(20, 90))
def test_parts_of_a_group_are_short_enough_and_hold_it_whole(prompt, completions, longest):
    item = PackingItem(prompt + sum(completions), tuple(range(len(completions))), prompt)
    cut = list(split_group(item, completions, longest))
    assert sorted(i for part in cut for i in part.sample_indices) == list(item.sample_indices)
    for part in cut:
        assert part.num_tokens == prompt + sum(completions[i] for i in part.sample_indices)
        assert part.num_tokens <= longest or len(part.sample_indices) == 1
    assert len(cut) == 1 or item.num_tokens > longest


@given(SIZES, st.integers(1, 6), st.integers(1, 100))
def test_all_rows_hold_everything_or_there_are_none(sizes, num_rows, length):
    shelf = make_shelf(sizes)
    rows = pack_all(shelf, num_rows=num_rows, length=length)
    assert rows is not None or sum(sizes) > length
    if rows is not None:
        assert len(rows) <= num_rows
        assert sorted(item for row in rows for item in row) == shelf.items
        assert all(sum(item.num_tokens for item in row) <= length for row in rows)
    assert shelf.items == sorted(make_shelf(sizes).items)


def test_parts_of_a_group_that_meet_in_a_row_share_one_prompt():
    row = [PackingItem(30, (0, 3), 10), PackingItem(20, (1,), 5), PackingItem(25, (2,), 10)]
    assert merge_shared_prompts(row, [7, 8, 7, 7]) == [PackingItem(45, (0, 3, 2), 10), PackingItem(20, (1,), 5)]
    assert merge_shared_prompts(row, [7, 8, 9, 7]) == row
