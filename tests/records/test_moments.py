from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.records.moments import Moments, compute_moments, merge_moments, whiten

NOTHING = Moments(0.0, 0.0, 0.0)
NUMBERS = st.lists(st.floats(-1e6, 1e6, width=32), max_size=40)


def all_of(values) -> Moments:
    return compute_moments(np.asarray(values, np.float32), np.ones(len(values), bool))


def trl_masked_whiten(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Computes `masked_whiten` of TRL's PPO and of verl in numpy: masked mean, Bessel's correction, rsqrt."""
    mean = (values * mask).sum() / mask.sum()
    variance = ((values - mean) ** 2 * mask).sum() / mask.sum()
    variance = variance * mask.sum() / (mask.sum() - 1)
    return (values - mean) / np.sqrt(variance + 1e-8)


def test_numbers_by_hand():
    values, mask = np.array([[1.0, 9.0, 2.0], [9.0, 3.0, 9.0]]), np.array([[1, 0, 1], [0, 1, 0]], bool)
    found = compute_moments(values, mask)
    assert found == Moments(3.0, 2.0, 2.0)
    assert found.variance == 1.0 and found.population_std == pytest.approx((2 / 3) ** 0.5)
    np.testing.assert_allclose(whiten(values, mask, found), [[-1, 0, 0], [0, 1, 0]], atol=1e-7)


def test_whitening_is_that_of_trl_and_verl():
    rng = np.random.default_rng(0)
    values, mask = rng.normal(3, 5, (4, 50)), rng.random((4, 50)) < 0.7
    ours = whiten(values, mask, compute_moments(values, mask))
    np.testing.assert_allclose(ours[mask], trl_masked_whiten(values, mask)[mask], atol=1e-6)
    assert not ours[~mask].any()


def test_verls_numbers_of_a_sample_with_tool_tokens():
    values = np.array([0, 0, -2.205239, -3.280981, -4.4222, 0, 0, -5.64, -8, 0, 0])
    mask = values != 0
    expected = [1.117573, 0.637538, 0.128286, -0.41514, -1.468257]
    np.testing.assert_allclose(whiten(values, mask, compute_moments(values, mask))[mask], expected, atol=1e-5)


@given(NUMBERS, NUMBERS, NUMBERS)
def test_parts_that_hosts_hold_are_worth_the_whole(first, second, third):
    whole, parts = all_of([*first, *second, *third]), merge_moments(all_of(part) for part in (first, second, third))
    assert parts.count == whole.count
    np.testing.assert_allclose(tuple(parts), tuple(whole), rtol=1e-9, atol=1e-6)


def test_a_host_without_tokens_changes_nothing():
    some = all_of([1.0, 2.0, 4.0])
    assert merge_moments([NOTHING, some, NOTHING]) == some
    assert merge_moments([NOTHING, NOTHING]) == merge_moments([]) == NOTHING


def test_none_and_one_are_defined():
    values = np.array([5.0, 7.0], np.float32)
    nobody = np.zeros(2, bool)
    assert compute_moments(values, nobody) == NOTHING and NOTHING.variance == NOTHING.population_std == 0.0
    np.testing.assert_array_equal(whiten(values, nobody, NOTHING), [0.0, 0.0])
    one = np.array([True, False])
    np.testing.assert_array_equal(whiten(values, one, compute_moments(values, one)), [0.0, 0.0])
    assert all_of([]) == NOTHING


@given(st.floats(-1e4, 1e4, width=32), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_equal_numbers_whiten_to_exactly_zero_wherever_they_are_held(value, counts):
    over = merge_moments(all_of([value] * count) for count in counts)
    assert over.sum_squared_deviations == 0
    same = np.full(3, value, np.float32)
    np.testing.assert_array_equal(whiten(same, np.ones(3, bool), over), 0)


def test_a_large_mean_takes_nothing_from_the_variance():
    values = np.float32(1e6) + np.arange(4, dtype=np.float32)
    assert all_of(values).sum_squared_deviations == 5.0


def test_what_stands_under_a_false_mask_is_not_read():
    values, mask = np.array([np.nan, 1.0, np.inf, 3.0]), np.array([False, True, False, True])
    over = compute_moments(values, mask)
    assert over == Moments(2.0, 2.0, 2.0)
    white = whiten(values, mask, over)
    assert white[0] == white[2] == 0 and np.isfinite(white).all()
