from __future__ import annotations

import numpy as np
import pytest

from app.batching.micro_batcher import FixedRowBatcher, PackedRowBatcher, sequence_lengths
from app.batching.token_batch import pack_tokens, unpack_per_token
from tests.batching.plans import flops, make_budget, members
from tests.tiny import make_mesh, make_sample, random_samples


def test_lengths_tell_which_samples_have_the_same_prompt():
    samples = [
        make_sample([0] * 3, prompt_ids=[1, 2], group_id=0),
        make_sample([0], prompt_ids=[1, 3], group_id=1),
        make_sample([], prompt_ids=[1, 2], group_id=2),
    ]
    lengths = sequence_lengths(samples)
    assert lengths.prompts.tolist() == [2, 2, 2]
    assert lengths.completions.tolist() == [3, 1, 0]
    assert lengths.prompt_indices.tolist() == [0, 1, 0]
    assert lengths.totals.tolist() == [5, 3, 2]


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
def test_fixed_rows_fill_whole_devices_and_are_no_more_than_needed(
    num_samples, mesh_shape, rows_per_device, rows, count
):
    samples = [make_sample([0])] * num_samples
    cut = FixedRowBatcher(rows_per_device, trim_tail=False)(samples, make_mesh(mesh_shape))
    assert [len(m.rows) for m in cut.local_plan.micro_batches] == [rows] * count
    assert cut.plan == cut.local_plan
    assert cut.packing_stats()["num_micro_batches"] == count


@pytest.mark.parametrize("mesh_shape", [(1, 1, 1), (2, 2, 2)])
def test_packed_rows_are_whole_on_every_device(mesh_shape):
    samples = random_samples(8, 4, vocab_size=97)
    cut = PackedRowBatcher(make_budget(64, 16, share_prompts=True), flops)(samples, make_mesh(mesh_shape))
    devices = mesh_shape[0] * mesh_shape[1]
    assert all(len(m.rows) % devices == 0 for m in cut.local_plan.micro_batches)
    assert sorted(members([row for m in cut.local_plan.micro_batches for row in m.rows])) == list(range(32))
    found = cut.packing_stats()
    assert found["computed_tokens"] == sum(len(m.rows) * m.shape.num_tokens for m in cut.local_plan.micro_batches)
    packed = [pack_tokens(samples, m) for m in cut.local_plan.micro_batches]
    assert found["real_tokens"] == sum(int((p.segment_ids > 0).sum()) for p in packed)
    for sample, values in zip(
        samples, unpack_per_token([p.targets for p in packed], samples, cut.local_plan), strict=True
    ):
        np.testing.assert_array_equal(values, sample.completion_ids)


@pytest.mark.parametrize("rows", [FixedRowBatcher(2, trim_tail=True), PackedRowBatcher(make_budget(64), flops)])
def test_a_host_without_samples_has_a_micro_batch_of_padding(rows):
    cut = rows([], make_mesh((2, 1, 1)))
    assert len(cut.local_plan.micro_batches) == 1
    assert cut.packing_stats()["dummy_fraction"] == 1.0
