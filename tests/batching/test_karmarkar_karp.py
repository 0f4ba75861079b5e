from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.batching.karmarkar_karp import karmarkar_karp

WEIGHTS = st.lists(st.integers(1, 50), min_size=1, max_size=7)


def largest_sum(weights: list[int], parts: list[list[int]]) -> int:
    return max(sum(weights[i] for i in part) for part in parts)


def least_largest_sum(weights: list[int], num_parts: int, *, size: int | None = None) -> int:
    """Returns the smallest possible largest sum, by brute force over all partitions, or those into equal sizes."""
    least = sum(weights)
    for owners in itertools.product(range(num_parts), repeat=len(weights)):
        parts = [[i for i, owner in enumerate(owners) if owner == part] for part in range(num_parts)]
        if size is None or all(len(part) == size for part in parts):
            least = min(least, largest_sum(weights, parts))
    return least


def flops_of_verl(lengths: list[int]) -> list[int]:
    return [24576 * length + length**2 for length in lengths]


@given(WEIGHTS, st.integers(1, 3))
def test_parts_are_within_the_known_bound_of_the_best(weights, num_parts):
    # Michiels, Korst, Aarts and van Leeuwen (2003): the largest sum is at most 4/3 - 1/(3 k) of the least possible.
    parts = karmarkar_karp(weights, num_parts)
    assert sorted(i for part in parts for i in part) == list(range(len(weights)))
    assert len(parts) == num_parts
    best = least_largest_sum(weights, num_parts)
    assert best <= largest_sum(weights, parts) <= (4 - 1 / num_parts) / 3 * best + 1e-9


@given(st.lists(st.integers(1, 50), min_size=1, max_size=4))
def test_two_parts_of_up_to_four_weights_are_the_best(weights):
    assert largest_sum(weights, karmarkar_karp(weights, 2)) == least_largest_sum(weights, 2)


@given(st.lists(st.integers(1, 50), min_size=6, max_size=6), st.sampled_from([2, 3]))
def test_parts_of_equal_sizes_are_close_to_the_best(weights, num_parts):
    parts = karmarkar_karp(weights, num_parts, equal_sizes=True)
    assert sorted(i for part in parts for i in part) == list(range(6))
    assert {len(part) for part in parts} == {6 // num_parts}
    best = least_largest_sum(weights, num_parts, size=6 // num_parts)
    assert best <= largest_sum(weights, parts) < 2 * best


@pytest.mark.parametrize(
    ("weights", "num_parts", "expected"),
    [
        ([8, 7, 6, 5, 4, 3, 2, 1], 3, [[0, 5, 6], [1, 4, 7], [2, 3]]),
        ([4, 5, 6, 7, 8], 2, [[0, 1, 3], [2, 4]]),
        (flops_of_verl([100, 200, 300]), 2, [[2], [0, 1]]),
        (flops_of_verl([8, 7, 6, 5, 4]), 3, [[0], [1, 4], [2, 3]]),
        (flops_of_verl([8, 7, 6, 5, 4]), 2, [[1, 3, 4], [0, 2]]),
        (flops_of_verl([5, 3, 7, 2, 6]), 3, [[2], [3, 4], [0, 1]]),
        (flops_of_verl([512, 384, 256, 128, 64, 32, 16, 8]), 3, [[1, 5, 6, 7], [0], [2, 3, 4]]),
        (flops_of_verl([512, 384, 256, 128, 64, 32, 16, 8]), 4, [[2], [0], [1], [3, 4, 5, 6, 7]]),
        (flops_of_verl([4096, 1024, 1024, 1024, 1024]), 2, [[0], [1, 2, 3, 4]]),
    ],
)
def test_parts_are_those_of_verl(weights, num_parts, expected):
    # github.com/verl-project/verl, verl/utils/seqlen_balancing.py; the order of parts is not compared.
    assert sorted(karmarkar_karp(weights, num_parts)) == sorted(expected)


@pytest.mark.parametrize(
    ("weights", "num_parts", "expected"),
    [
        ([8, 7, 6, 5, 4, 3, 2, 1], 2, [[1, 2, 4, 7], [0, 3, 5, 6]]),
        ([8, 7, 6, 5, 4, 3, 2, 1], 4, [[3, 4], [2, 5], [1, 6], [0, 7]]),
        (flops_of_verl([1, 2, 3, 4, 5, 7, 9, 10]), 2, [[1, 2, 5, 6], [0, 3, 4, 7]]),
    ],
)
def test_parts_of_equal_sizes_are_those_of_verl_and_slime(weights, num_parts, expected):
    assert sorted(karmarkar_karp(weights, num_parts, equal_sizes=True)) == sorted(expected)


def test_parts_without_weights_are_empty():
    assert karmarkar_karp([], 2) == [[], []]
    assert karmarkar_karp([5], 3) == [[0], [], []]
    assert karmarkar_karp([], 2, equal_sizes=True) == [[], []]


def test_parts_of_equal_sizes_that_do_not_divide_are_an_error():
    with pytest.raises(ValueError, match="5 weights cannot be split into 2 parts of equal sizes"):
        karmarkar_karp([1, 2, 3, 4, 5], 2, equal_sizes=True)
