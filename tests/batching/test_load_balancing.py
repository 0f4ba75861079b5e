from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from app.batching.load_balancing import EMPTY_SLOT, assign_rows_balanced, assign_rows_in_order, balanced_partition


def test_rows_in_order_by_hand():
    sizes = {"num_micro_batches": 2, "num_devices": 2, "rows_per_device": 2}
    assert assign_rows_in_order(8, **sizes) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert assign_rows_in_order(5, **sizes) == [[0, 1, 2, EMPTY_SLOT], [3, 4, EMPTY_SLOT, EMPTY_SLOT]]
    assert assign_rows_in_order(0, **sizes) == [[EMPTY_SLOT] * 4] * 2


def test_even_rows_by_hand():
    # Sorted: 9 8 7 6 | 5 4 3 2; in each micro-batch pairs of even sums, the heavier to the device that has had less.
    dealt, loads = assign_rows_balanced(
        [2, 3, 4, 5, 6, 7, 8, 9], num_micro_batches=2, num_devices=2, rows_per_device=2, device_loads=[1, 0]
    )
    assert [[sorted(rows[:2]), sorted(rows[2:])] for rows in dealt] == [[[5, 6], [4, 7]], [[1, 2], [0, 3]]]
    assert loads == [23, 22]


@given(st.lists(st.integers(1, 50), min_size=6, max_size=6), st.sampled_from([2, 3]))
def test_parts_of_one_size_are_within_the_known_bound_of_the_best(weights, num_parts):
    # Kellerer and Woeginger (1993) for triples: at most 4/3 - 1/(3 k) of the least possible; pairs are the best ones.
    size = 6 // num_parts
    parts = balanced_partition(weights, num_parts)
    assert sorted(i for part in parts for i in part) == list(range(6))
    assert {len(part) for part in parts} == {size}
    orders = itertools.permutations(weights)
    best = min(max(sum(order[i : i + size]) for i in range(0, 6, size)) for order in orders)
    largest = max(sum(weights[i] for i in part) for part in parts)
    assert best <= largest <= best * (1 if size == 2 else 4 / 3 - 1 / 6) + 1e-9


def test_the_heaviest_row_goes_to_the_device_that_has_had_the_least():
    dealt, loads = assign_rows_balanced(
        [10, 1, 9, 3], num_micro_batches=2, num_devices=2, rows_per_device=1, device_loads=[0, 5]
    )
    assert dealt == [[0, 2], [3, 1]]
    assert loads == [13, 15]


@given(
    st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.booleans()
)
def test_every_row_is_dealt_once_and_counts_differ_by_one(works, spare, num_devices, rows_per_device, evenly):
    slots = num_devices * rows_per_device
    sizes = {
        "num_micro_batches": -(-len(works) // slots) + spare,
        "num_devices": num_devices,
        "rows_per_device": rows_per_device,
    }
    if evenly:
        dealt, loads = assign_rows_balanced(works, device_loads=[0] * num_devices, **sizes)
        assert sum(loads) == sum(works)
    else:
        dealt = assign_rows_in_order(len(works), **sizes)
    assert all(len(numbers) == slots for numbers in dealt)
    assert sorted(n for numbers in dealt for n in numbers if n != EMPTY_SLOT) == list(range(len(works)))
    counts = [sum(n != EMPTY_SLOT for n in numbers) for numbers in dealt]
    assert max(counts) - min(counts) <= 1
