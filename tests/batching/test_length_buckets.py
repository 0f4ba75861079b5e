from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.batching.micro_batch_shapes import bucket_length


def test_rungs_by_hand():
    assert [bucket_length(n) for n in (0, 1, 16, 17, 24, 25, 32, 33, 48, 49, 64)] == [
        16, 16, 16, 24, 24, 32, 32, 48, 48, 64, 64,
    ]  # fmt: skip
    assert [bucket_length(n, min_bucket=1) for n in range(1, 10)] == [1, 2, 3, 4, 6, 6, 8, 8, 12]


@given(st.integers(1, 200_000), st.sampled_from([1, 4, 16, 128]))
def test_a_rung_holds_the_length_and_at_most_a_third_is_padding(length, smallest):
    size = bucket_length(length, min_bucket=smallest)
    assert size >= max(length, smallest)
    assert length <= smallest or 3 * (size - length) <= size


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.integers(1, 100))
def test_longer_never_needs_less(first, second, smallest):
    first, second = sorted((first, second))
    assert bucket_length(first, min_bucket=smallest) <= bucket_length(second, min_bucket=smallest)


@pytest.mark.parametrize("smallest", [1, 16, 100])
def test_few_shapes_serve_every_length(smallest):
    assert len({bucket_length(n, min_bucket=smallest) for n in range(1, 4097)}) <= 26
