from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.batching.load_balancing import EMPTY_SLOT, assign_rows_balanced, assign_rows_in_order


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
    assert [[sorted(rows[:2]), sorted(rows[2:])] for rows in dealt] == [[[4, 7], [5, 6]], [[0, 3], [1, 2]]]
    assert loads == [23, 22]


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
