from __future__ import annotations

import pytest

from app.batching.micro_batches import common_row_shape, plan_micro_batches
from app.batching.pack import RowShape
from tests.tiny import make_mesh, make_sample


def test_the_row_shape_holds_the_longest_sample_and_the_longest_completion():
    samples = [make_sample([0] * 3, prompt_ids=[1] * 20), make_sample([0] * 9, prompt_ids=[1])]
    assert common_row_shape(samples) == RowShape(num_tokens=24, num_completion_tokens=12)


def test_a_host_without_samples_has_the_smallest_shape():
    assert common_row_shape([]) == RowShape(num_tokens=16, num_completion_tokens=4)


@pytest.mark.parametrize(
    ("num_samples", "mesh_shape", "rows_per_device", "rows", "count"),
    [
        (5, (1, 1, 1), 2, 2, 3),
        (5, (1, 1, 1), 8, 5, 1),
        (12, (1, 4, 2), 1, 4, 3),
        (12, (2, 2, 2), 2, 8, 2),
        (12, (1, 8, 1), 8, 16, 1),
        (3, (1, 8, 1), 1, 8, 1),
    ],
)
def test_micro_batches_fill_whole_devices_and_are_no_larger_than_needed(
    num_samples, mesh_shape, rows_per_device, rows, count
):
    plan = plan_micro_batches(num_samples, make_mesh(mesh_shape), rows_per_device=rows_per_device)
    assert (plan.rows_per_micro_batch, plan.num_micro_batches) == (rows, count)
    assert [i for row in plan.rows for i in row] == list(range(num_samples))
