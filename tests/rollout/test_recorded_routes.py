"""Tests that samplers record the routes of the trainer's pass over the same tokens."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from app.records.sample import Sample
from app.rollout.engine.engine import SlotEngine
from app.rollout.sequence import SuspendedSequence
from tests.rollout import slots as dense
from tests.rollout.routes import ROUTED, assert_routes_are_those_of_the_trainer, row_of, sample_of, slots
from tests.tiny import MIXTURE


def generate(engine: SlotEngine, shape: tuple[int, int, int] = (1, 1, 1), **changes: Any) -> list[Sample]:
    return dense.batching(engine).generate(dense.weights_on(shape, MIXTURE), dense.PROMPTS, replace(ROUTED, **changes))


@pytest.mark.parametrize(
    ("mesh_shape", "how"),
    # With scarce blocks, rows are preempted and recomputed, and steps compute two rows at a time.
    [((1, 1, 1), {}), ((2, 1, 1), {"mesh_shape": (2, 1, 1), "num_blocks": 10, "rows_together": 2})],
    ids=["fast", "scarce on a mesh"],
)
def test_slots_record_the_same_expert_routes_as_the_trainer(
    mesh_shape: tuple[int, int, int], how: dict[str, Any]
) -> None:
    engine = slots(**how)
    engine.counters.take()
    samples = generate(engine, mesh_shape)
    assert [len(s.completion_ids) for s in samples] == dense.LENGTHS
    assert_routes_are_those_of_the_trainer(samples)
    assert (engine.counters.preempted_rows > 0) == ("num_blocks" in how)


def test_evaluations_record_no_routes_and_stopped_samples_only_routes_of_kept_tokens() -> None:
    assert all(sample.routes is None for sample in generate(slots(), route_shape=None))
    whole = generate(slots())
    number, longest = max(enumerate(whole), key=lambda one: len(one[1].completion_ids))
    cut = generate(slots(), stop=(f" {longest.completion_ids[3]} ",))
    assert len(cut[number].completion_ids) <= 5
    for sample, before in zip(cut, whole, strict=True):
        size = len(sample.prompt.token_ids) + len(sample.completion_ids)
        assert sample.routes is not None and before.routes is not None and len(sample.routes) == size
        np.testing.assert_array_equal(sample.routes[: size - 1], before.routes[: size - 1])


def test_suspended_rows_keep_the_routes_of_their_prompts_with_and_without_a_cache() -> None:
    engine, rows = slots(), [row_of(i) for i in range(4)]
    engine.open(dense.weights_on((1, 1, 1), MIXTURE), dense.REQUEST, suspends=True)
    engine.admit(rows)
    engine.admit([engine.suspend(row) for row in rows[:2]])  # before their first segment
    dense.run_segment(engine, 4)
    kept, lost = map(engine.suspend, rows[1:3])
    engine.load_weights(dense.weights_on((1, 1, 1), MIXTURE), policy_version=4)
    engine.admit([kept, SuspendedSequence(lost.row, None)])
    dense.finish_rows(engine)
    engine.close()
    assert_routes_are_those_of_the_trainer([sample_of(row) for row in rows])
