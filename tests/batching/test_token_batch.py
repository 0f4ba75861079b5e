import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.batching.micro_batch_plan import MicroBatch, MicroBatchPlan, RowShape
from app.batching.token_batch import pack_per_token, pack_tokens, unpack_per_token
from app.records.sample import Sample
from tests.tiny import make_sample, random_samples

TWO = [
    make_sample([20, 21, 22], prompt_ids=[10, 11], loss_mask=np.array([True, False, True])),
    make_sample([40], prompt_ids=[30, 31, 32]),
]
THREE_OF_TWO_PROMPTS = [*TWO, make_sample([50, 51], prompt_ids=[10, 11])]


def alone(*rows: tuple[int, ...], shape: RowShape) -> MicroBatch:
    return MicroBatch(tuple(tuple((i,) for i in row) for row in rows), shape)


def test_packed_completions_after_a_shared_prompt_equal_a_hand_written_row():
    micro_batch = MicroBatch((((1,), (2, 0)), ()), RowShape(num_tokens=13, num_completion_tokens=7))
    batch = pack_tokens(THREE_OF_TWO_PROMPTS, micro_batch)
    np.testing.assert_array_equal(batch.token_ids[0], [30, 31, 32, 40, 10, 11, 50, 51, 20, 21, 22, 0, 0])
    np.testing.assert_array_equal(batch.layout.positions[0], [0, 1, 2, 3, 0, 1, 2, 3, 2, 3, 4, 0, 0])
    np.testing.assert_array_equal(batch.layout.segment_ids[0], [1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 0, 0])
    np.testing.assert_array_equal(batch.layout.branch_ids[0], [0, 0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 0, 0])
    np.testing.assert_array_equal(batch.logits_indices[0], [2, 5, 6, 5, 8, 9, -1])
    np.testing.assert_array_equal(batch.targets[0], [40, 50, 51, 20, 21, 22, 0])
    np.testing.assert_array_equal(batch.loss_mask[0], [True, True, True, True, False, True, False])


def test_empty_rows_of_a_batch_contain_only_padding():
    shape = RowShape(num_tokens=6, num_completion_tokens=3)
    for samples, rows, empty in ((TWO, ((0,), (), (1,), ()), [1, 3]), ([], ((), ()), [0, 1])):
        batch = pack_tokens(samples, alone(*rows, shape=shape))
        assert (batch.token_ids.shape, batch.targets.shape) == ((len(rows), 6), (len(rows), 3))
        assert not batch.layout.segment_ids[empty].any()
        assert not batch.loss_mask[empty].any()
        assert (batch.logits_indices[empty] == -1).all()


def test_a_completion_without_tokens_has_no_target():
    samples = [make_sample([], prompt_ids=[1, 2]), make_sample([7], prompt_ids=[1, 2])]
    shape = RowShape(num_tokens=6, num_completion_tokens=3)
    for rows in ((((0, 1),),), (((0,), (1,)),), (((1, 0),),)):
        batch = pack_tokens(samples, MicroBatch(rows, shape))
        assert batch.targets.tolist() == [[7, 0, 0]]
        index = batch.logits_indices[0, 0]
        assert batch.logits_indices[0, 1:].tolist() == [-1, -1]
        assert batch.token_ids[0, index : index + 2].tolist() == [2, 7]


@pytest.mark.parametrize("shape", [RowShape(8, 6), RowShape(9, 3)])
def test_a_row_too_short_for_its_samples_is_refused(shape):
    with pytest.raises(ValueError, match=r"have . (completion )?tokens, but the row has space for "):
        pack_tokens(TWO, alone((0, 1), (), shape=shape))


@st.composite
def packings(draw) -> tuple[list[Sample], MicroBatchPlan]:
    """Strategy that draws packings: rows of any number of segments, samples of a prompt together, in any order."""
    samples = random_samples(
        draw(st.integers(1, 3)), draw(st.integers(1, 4)), vocab_size=97, with_holes=True, seed=draw(st.integers(0, 999))
    )
    segments: dict[tuple[int, int], list[int]] = {}
    for i in draw(st.permutations(range(len(samples)))):
        part = draw(st.integers(0, 2)) if draw(st.booleans()) else -i
        segments.setdefault((samples[i].group_id, part), []).append(i)
    rows: list[list[tuple[int, ...]]] = [[] for _ in range(6)]
    for segment in segments.values():
        rows[draw(st.integers(0, 5))].append(tuple(segment))
    shape = RowShape(
        max(sum(len(samples[s[0]].prompt.token_ids) + completion_tokens(samples, s) for s in r) for r in rows),
        max(sum(completion_tokens(samples, s) for s in r) for r in rows) + draw(st.integers(0, 5)),
    )
    per_micro_batch = draw(st.sampled_from([1, 2, 3, 6]))
    return samples, MicroBatchPlan(
        tuple(
            MicroBatch(tuple(map(tuple, rows[first : first + per_micro_batch])), shape)
            for first in range(0, 6, per_micro_batch)
        )
    )


def completion_tokens(samples: list[Sample], segment: tuple[int, ...]) -> int:
    return sum(len(samples[i].completion_ids) for i in segment)


@given(packings())
def test_unpacking_restores_the_packed_values_of_each_sample(packing):
    samples, plan = packing
    packed = [pack_per_token(samples, m, lambda s: s.behavior_logprobs) for m in plan.micro_batches]
    for sample, values in zip(samples, unpack_per_token(packed, samples, plan), strict=True):
        np.testing.assert_array_equal(values, sample.behavior_logprobs)


@given(packings())
def test_packed_samples_keep_the_tokens_and_positions_of_an_unpacked_row(packing):
    samples, plan = packing
    seen = []
    for micro_batch in plan.micro_batches:
        batch = pack_tokens(samples, micro_batch)
        for r, row in enumerate(micro_batch.rows):
            for number, segment in enumerate(row, start=1):
                for branch, i in enumerate(segment, start=1):
                    own = (batch.layout.segment_ids[r] == number) & np.isin(
                        batch.layout.branch_ids[r], [0, branch if len(segment) > 1 else 0]
                    )
                    expected = np.concatenate([samples[i].prompt.token_ids, samples[i].completion_ids])
                    np.testing.assert_array_equal(batch.token_ids[r][own], expected)
                    np.testing.assert_array_equal(batch.layout.positions[r][own], np.arange(len(expected)))
                    seen.append(i)
    assert sorted(seen) == list(range(len(samples)))


@given(packings())
def test_every_target_is_predicted_by_the_token_before_it(packing):
    samples, plan = packing
    for micro_batch in plan.micro_batches:
        batch = pack_tokens(samples, micro_batch)
        for r, row in enumerate(micro_batch.rows):
            members = [i for segment in row for i in segment]
            prompts = [samples[segment[0]].prompt.token_ids for segment in row for _ in segment]
            before = [np.append(p[-1:], samples[i].completion_ids)[:-1] for p, i in zip(prompts, members, strict=True)]
            expected = np.concatenate([np.zeros(0, np.int32), *before])
            index = batch.logits_indices[r]
            np.testing.assert_array_equal(batch.token_ids[r][index[index >= 0]], expected)
            assert (index[len(expected) :] == -1).all()
            mask = np.concatenate([np.zeros(0, bool), *(samples[i].mask for i in members)])
            np.testing.assert_array_equal(batch.loss_mask[r], np.pad(mask, (0, len(index) - len(mask))))
