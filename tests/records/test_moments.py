import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.records.moments import EMPTY_MOMENTS, Moments, compute_moments, merge_moments, whiten

NUMBERS = st.lists(st.floats(-1e6, 1e6, width=32), max_size=40)


def all_of(values) -> Moments:
    return compute_moments(np.asarray(values, np.float32), np.ones(len(values), bool))


def test_moments_equal_hand_computed_values():
    # Masked values are not read.
    values, mask = np.array([[1.0, np.nan, 2.0], [np.inf, 3.0, 9.0]]), np.array([[1, 0, 1], [0, 1, 0]], bool)
    found = compute_moments(values, mask)
    assert found == Moments(3.0, 2.0, 2.0)
    assert found.variance == 1.0 and found.population_std == pytest.approx((2 / 3) ** 0.5)
    # A large mean does not cost precision.
    assert all_of(np.float32(1e6) + np.arange(4, dtype=np.float32)).sum_squared_deviations == 5.0
    np.testing.assert_allclose(whiten(values, mask, found), [[-1, 0, 0], [0, 1, 0]], atol=1e-7)


def test_whitened_values_equal_those_of_trl_and_verl():
    rng = np.random.default_rng(0)
    values, mask = rng.normal(3, 5, (4, 50)), rng.random((4, 50)) < 0.7
    # masked_whiten uses the masked mean, Bessel's correction and rsqrt.
    mean = (values * mask).sum() / mask.sum()
    variance = ((values - mean) ** 2 * mask).sum() / mask.sum() * mask.sum() / (mask.sum() - 1)
    ours = whiten(values, mask, compute_moments(values, mask))
    np.testing.assert_allclose(ours, np.where(mask, (values - mean) / np.sqrt(variance + 1e-8), 0), atol=1e-6)
    # These are verl's numbers for a sample with tool tokens.
    values = np.array([0, 0, -2.205239, -3.280981, -4.4222, 0, 0, -5.64, -8, 0, 0])
    mask = values != 0
    expected = [1.117573, 0.637538, 0.128286, -0.41514, -1.468257]
    np.testing.assert_allclose(whiten(values, mask, compute_moments(values, mask))[mask], expected, atol=1e-5)


@given(NUMBERS, NUMBERS, NUMBERS)
def test_merged_moments_equal_the_moments_of_the_union(first, second, third):
    whole, parts = all_of([*first, *second, *third]), merge_moments(all_of(part) for part in (first, second, third))
    assert parts.count == whole.count
    np.testing.assert_allclose(tuple(parts), tuple(whole), rtol=1e-9, atol=1e-6)


def test_moments_are_defined_for_zero_and_one_numbers():
    values = np.array([5.0, 7.0], np.float32)
    nobody, one = np.zeros(2, bool), np.array([True, False])
    assert compute_moments(values, nobody) == all_of([]) == merge_moments([]) == EMPTY_MOMENTS == (0.0, 0.0, 0.0)
    assert EMPTY_MOMENTS.variance == EMPTY_MOMENTS.population_std == 0.0
    for mask in (nobody, one):
        np.testing.assert_array_equal(whiten(values, mask, compute_moments(values, mask)), [0.0, 0.0])


@given(st.floats(-1e4, 1e4, width=32), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_whitening_equal_numbers_gives_exactly_zero(value, counts):
    over = merge_moments(all_of([value] * count) for count in counts)
    assert over.sum_squared_deviations == 0
    same = np.full(3, value, np.float32)
    np.testing.assert_array_equal(whiten(same, np.ones(3, bool), over), 0)
