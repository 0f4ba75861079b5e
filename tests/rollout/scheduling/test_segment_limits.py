import numpy as np
import pytest

from app.rollout.scheduling.segment_limits import (
    balanced_length,
    budget_length,
    next_smaller_batch,
    refill_threshold,
    segment_limits,
)
from settings.schema.rollout import SegmentSettings


@pytest.mark.parametrize(("active", "expected"), [(1, 4096), (4, 2048), (16, 512), (1000, 64)])
def test_the_budget_is_shared_by_the_active_rows_within_bounds(active: int, expected: int) -> None:
    assert budget_length(active, capacity=8192, minimum=64, maximum=4096) == expected


@pytest.mark.parametrize(("mean", "overhead"), [(512.0, 0.5), (512.0, 8.0), (50.0, 0.1)])
def test_the_balanced_length_loses_least(mean: float, overhead: float) -> None:
    lengths = np.arange(1, 2000)
    loss = overhead / lengths + lengths / mean / 2
    found = balanced_length(mean, overhead_steps=overhead, minimum=1, maximum=4096)
    assert abs(found - lengths[loss.argmin()]) <= 1


def test_the_balanced_length_keeps_its_bounds() -> None:
    assert balanced_length(512, overhead_steps=0.5, minimum=64, maximum=4096) == 64
    assert balanced_length(1e9, overhead_steps=100, minimum=64, maximum=4096) == 4096


def test_dear_edges_wait_for_more_finished_rows() -> None:
    cheap, dear = (refill_threshold(64, 512, overhead_steps=cost) for cost in (0.01, 10.0))
    assert (cheap, dear) == (1, 13)


def test_the_next_rung_is_below_the_active_rows() -> None:
    assert [next_smaller_batch(active, (2, 4)) for active in (1, 2, 3, 4, 5, 8)] == [0, 0, 2, 2, 4, 4]


@pytest.mark.parametrize(("some_wait", "expected"), [(True, (32, 1, 0)), (False, (250, 0, 2))])
def test_a_segment_leaves_for_those_who_wait_or_for_a_smaller_program(some_wait, expected) -> None:
    state = {"num_active": 4, "has_waiting": some_wait, "mean_length": 1024, "batch_sizes": (2,), "capacity": 1000}
    assert segment_limits(SegmentSettings(min=10, max=4096), **state) == expected
