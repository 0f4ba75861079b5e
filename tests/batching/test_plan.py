from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.batching.plan import Plan, fixed_micro_batches


def test_the_last_micro_batch_is_filled_up_with_empty_rows():
    plan = fixed_micro_batches(5, rows_per_micro_batch=2)
    assert plan == Plan(((0,), (1,), (2,), (3,), (4,), ()), 2)
    assert plan.num_micro_batches == 3


def test_a_host_with_fewer_samples_keeps_step_with_empty_micro_batches():
    plan = fixed_micro_batches(1, rows_per_micro_batch=2, num_micro_batches=3)
    assert plan == Plan(((0,), (), (), (), (), ()), 2)


@pytest.mark.parametrize("num_micro_batches", [None, 0, 1])
def test_no_samples_still_make_one_micro_batch(num_micro_batches):
    plan = fixed_micro_batches(0, rows_per_micro_batch=2, num_micro_batches=num_micro_batches)
    assert plan == Plan(((), ()), 2)


@given(st.integers(0, 50), st.integers(1, 9), st.none() | st.integers(1, 20))
def test_every_sample_has_exactly_one_row(num_samples, rows, num_micro_batches):
    plan = fixed_micro_batches(num_samples, rows_per_micro_batch=rows, num_micro_batches=num_micro_batches)
    assert [i for row in plan.rows for i in row] == list(range(num_samples))
    assert len(plan.rows) == plan.num_micro_batches * rows
    assert plan.num_micro_batches >= (num_micro_batches or 1)
