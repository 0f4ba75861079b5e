"""Tests how samples fill rows, how rows are divided among devices, and the length buckets."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.batching.bin_packing import PackingItem, RowPacker, best_subset, pack_all, split_group
from app.batching.load_balancing import EMPTY_SLOT, assign_rows_balanced, assign_rows_in_order, balanced_partition
from app.batching.micro_batch_shapes import bucket_length

SIZES = st.lists(st.integers(0, 30), max_size=9)


def packer_of(sizes: list[int], *, candidates: int = 64, splits: bool = False) -> RowPacker:
    items = [PackingItem(size, (i,), 0) for i, size in enumerate(sizes)]
    return RowPacker(items, sizes, num_candidates=candidates, split_groups=splits)


@given(SIZES, st.integers(0, 100))
def test_the_best_subset_has_the_largest_sum_that_fits(sizes, room):
    subset = best_subset(sizes, room)
    assert len(set(subset)) == len(subset)
    sums = [sum(c) for n in range(len(sizes) + 1) for c in itertools.combinations(sizes, n)]
    assert sum(sizes[i] for i in subset) == max(s for s in sums if s <= room)


@given(st.sampled_from([0, 2, 64]), st.booleans(), SIZES, st.integers(30, 100))
def test_rows_are_filled_until_no_further_sample_fits(candidates, splits, sizes, length):
    packer = packer_of(sizes, candidates=candidates, splits=splits)
    row = packer.pack_row(length)
    held = sum(item.num_tokens for item in row)
    assert held <= length
    assert all(held + item.num_tokens > length for item in packer.items)
    assert sorted(row + packer.items) == sorted(packer_of(sizes).items)
    assert packer.num_tokens == sum(sizes) - held


def test_a_group_is_split_only_if_that_saves_more_tokens_than_its_prompt_has():
    for prompt, completions, length, part, rest in (
        (6, [10, 20, 24], 101, [PackingItem(30, (2,), 6)], (0, 1)),
        (30, [10, 10, 10], 119, [], (0, 1, 2)),
    ):
        items = [PackingItem(prompt + sum(completions), (0, 1, 2), prompt), PackingItem(70, (3,), 1)]
        packer = RowPacker(items, [*completions, 69], num_candidates=64, split_groups=True)
        assert packer.pack_row(length) == [PackingItem(70, (3,), 1), *part]
        assert [item.sample_indices for item in packer.items] == [rest]
        assert packer.num_tokens == sum(item.num_tokens for item in packer.items)


@given(st.integers(0, 20), st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(20, 90))
def test_split_groups_fit_the_row_and_contain_every_sample_once(prompt, completions, longest):
    item = PackingItem(prompt + sum(completions), tuple(range(len(completions))), prompt)
    cut = list(split_group(item, completions, longest))
    assert sorted(i for part in cut for i in part.sample_indices) == list(item.sample_indices)
    for part in cut:
        assert part.num_tokens == prompt + sum(completions[i] for i in part.sample_indices)
        assert part.num_tokens <= longest or len(part.sample_indices) == 1
    assert len(cut) == 1 or item.num_tokens > longest


@given(SIZES, st.integers(1, 6), st.integers(1, 100))
def test_pack_all_packs_every_item_or_returns_none(sizes, num_rows, length):
    packer = packer_of(sizes)
    rows = pack_all(packer, num_rows=num_rows, length=length)
    assert rows is not None or sum(sizes) > length
    if rows is not None:
        assert len(rows) <= num_rows
        assert sorted(item for row in rows for item in row) == packer.items
        assert all(sum(item.num_tokens for item in row) <= length for row in rows)


@given(st.lists(st.integers(1, 50), min_size=6, max_size=6), st.sampled_from([2, 3]))
def test_balanced_partition_is_within_the_published_bound(weights, num_parts):
    # Kellerer and Woeginger (1993) bound triples by 4/3 - 1/(3 k) of the optimum; pairs are optimal.
    size = 6 // num_parts
    parts = balanced_partition(weights, num_parts)
    assert sorted(i for part in parts for i in part) == list(range(6))
    assert {len(part) for part in parts} == {size}
    orders = itertools.permutations(weights)
    best = min(max(sum(order[i : i + size]) for i in range(0, 6, size)) for order in orders)
    largest = max(sum(weights[i] for i in part) for part in parts)
    assert best <= largest <= best * (1 if size == 2 else 4 / 3 - 1 / 6) + 1e-9


def test_the_heaviest_row_goes_to_the_least_loaded_device():
    sizes = {"num_micro_batches": 2, "num_devices": 2, "rows_per_device": 1}
    assert assign_rows_balanced([10, 1, 9, 3], device_loads=[0, 5], **sizes) == ([[0, 2], [3, 1]], [13, 15])
    assert assign_rows_in_order(3, **sizes) == [[0, 1], [2, EMPTY_SLOT]]


@given(
    st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.booleans()
)
def test_every_row_is_assigned_once_and_micro_batch_sizes_differ_by_at_most_one(
    costs, spare, num_devices, rows_per_device, balanced
):
    slots = num_devices * rows_per_device
    num_micro_batches = -(-len(costs) // slots) + spare
    sizes = {"num_micro_batches": num_micro_batches, "num_devices": num_devices, "rows_per_device": rows_per_device}
    if balanced:
        assigned, loads = assign_rows_balanced(costs, device_loads=[0] * num_devices, **sizes)
        assert sum(loads) == sum(costs)
    else:
        assigned = assign_rows_in_order(len(costs), **sizes)
    assert all(len(numbers) == slots for numbers in assigned)
    assert sorted(n for numbers in assigned for n in numbers if n != EMPTY_SLOT) == list(range(len(costs)))
    counts = [sum(n != EMPTY_SLOT for n in numbers) for numbers in assigned]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("smallest", [1, 16, 100])
def test_length_buckets_pad_by_at_most_a_third(smallest):
    buckets = {n: bucket_length(n, min_bucket=smallest) for n in range(4097)}
    assert len(set(buckets.values())) <= 26
    assert all(length <= size for length, size in buckets.items())
    assert all(3 * (size - length) <= size for length, size in buckets.items() if length > smallest)
    assert [bucket_length(n) for n in (0, 16, 17, 24, 25, 32, 33, 48, 49)] == [16, 16, 24, 24, 32, 32, 48, 48, 64]
