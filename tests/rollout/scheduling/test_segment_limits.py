import numpy as np
import pytest

from app.rollout.scheduling.segment_limits import OVERHEAD_STEPS, SegmentLimits, segment_limits
from settings.schema.rollout import SegmentSettings


def limits(num_active: int, *, has_waiting: bool = False, mean: float = 512.0, least: int = 64) -> SegmentLimits:
    state = {"mean_length": mean, "batch_sizes": (2, 4), "capacity": 8192}
    return segment_limits(SegmentSettings(min=least, max=4096), num_active=num_active, has_waiting=has_waiting, **state)


@pytest.mark.parametrize(("active", "expected"), [(1, 4096), (4, 2048), (16, 512), (1000, 64)])
def test_the_budget_is_shared_by_the_active_rows_within_bounds(active: int, expected: int) -> None:
    assert limits(active).length == expected


@pytest.mark.parametrize("mean", [50.0, 512.0, 100_000.0])
def test_the_length_with_waiting_samples_loses_least(mean: float) -> None:
    lengths = np.arange(1, 2000)
    loss = OVERHEAD_STEPS / lengths + lengths / mean / 2
    assert abs(limits(64, has_waiting=True, mean=mean, least=1).length - lengths[loss.argmin()]) <= 1


def test_the_length_with_waiting_samples_keeps_its_bounds() -> None:
    assert [limits(8, has_waiting=True, mean=mean).length for mean in (512.0, 1e9)] == [64, 4096]


def test_many_short_rows_leave_together() -> None:
    assert [limits(64, has_waiting=True, mean=mean).leave_when_finished for mean in (1e6, 25.0)] == [1, 13]


def test_the_next_program_is_of_fewer_rows_than_are_active() -> None:
    assert [limits(active).leave_when_active for active in (1, 2, 3, 4, 5, 8)] == [0, 0, 2, 2, 4, 4]
