"""Tests of the routes that samplers record: those of the trainer's pass over the same tokens."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from app.model.architecture import RouteShape
from app.model.decoder import DecoderDefinition
from app.model.experts import UNRECORDED
from app.model.segment_layout import single_segment_layout
from app.records.sample import Sample
from app.rollout.engine.engine import SlotEngine
from app.rollout.sequence import RolloutSequence, SuspendedSequence
from tests.rollout import test_slot_engine as dense
from tests.tiny import MIXTURE, random_params, spell

DEFINITION = DecoderDefinition.create(MIXTURE)
SHAPE = RouteShape(MIXTURE.num_layers, MIXTURE.experts_per_token)
ROUTED = replace(dense.REQUEST, route_shape=SHAPE)


@functools.cache
def slots(**how: Any) -> SlotEngine:
    return dense.new_slots(4, exact=bool(how), definition=DEFINITION, records_routes=True, **dense.FEW_PROGRAMS, **how)


def generate(engine: SlotEngine, shape: tuple[int, int, int] = (1, 1, 1), **changes: Any) -> list[Sample]:
    return dense.batching(engine).generate(dense.weights_on(shape, MIXTURE), dense.PROMPTS, replace(ROUTED, **changes))


@functools.cache
def trainer() -> Any:
    params = random_params(DEFINITION)

    def live(ids: jax.Array, mask: jax.Array) -> jax.Array | None:
        return DEFINITION.bind(params).hidden_and_routes(
            ids, single_segment_layout(mask), dtype=dense.FLOAT32, remat="none"
        )[1]

    return jax.jit(live)


def assert_routes_are_those_of_the_trainer(samples: Sequence[Sample]) -> None:
    for sample in samples:
        ids = np.concatenate([sample.prompt.token_ids, sample.completion_ids])
        padded, mask = np.zeros((1, 32), np.int32), np.arange(32)[None] < len(ids)
        padded[0, : len(ids)] = ids
        expected = np.moveaxis(np.asarray(trainer()(padded, mask))[:, 0, : len(ids)], 0, 1)
        routes = sample.routes
        assert routes is not None and routes.dtype == np.uint8 and routes.shape == (len(ids), *SHAPE)
        np.testing.assert_array_equal(routes[:-1], expected[:-1])
        assert np.all(routes[-1] == UNRECORDED), "nothing was drawn after the last token"


@pytest.mark.parametrize(
    ("mesh_shape", "how"),
    # Scarce: rows give their blocks up and are computed again, and steps compute two rows at a time.
    [((1, 1, 1), {}), ((2, 1, 1), {"mesh_shape": (2, 1, 1), "num_blocks": 10, "rows_together": 2})],
    ids=["fast", "scarce on a mesh"],
)
def test_slots_record_the_routes_of_the_trainer(mesh_shape: tuple[int, int, int], how: dict[str, Any]) -> None:
    engine = slots(**how)
    engine.counters.take()
    samples = generate(engine, mesh_shape)
    assert [len(s.completion_ids) for s in samples] == dense.LENGTHS
    assert_routes_are_those_of_the_trainer(samples)
    assert (engine.counters.preempted_rows > 0) == ("num_blocks" in how)


def test_evaluations_have_no_routes_and_stopped_samples_those_of_their_tokens() -> None:
    assert all(sample.routes is None for sample in generate(slots(), route_shape=None))
    whole = generate(slots())
    number, longest = max(enumerate(whole), key=lambda one: len(one[1].completion_ids))
    cut = generate(slots(), stop=(f" {longest.completion_ids[3]} ",))
    assert len(cut[number].completion_ids) <= 5
    for sample, before in zip(cut, whole, strict=True):
        size = len(sample.prompt.token_ids) + len(sample.completion_ids)
        assert sample.routes is not None and before.routes is not None and len(sample.routes) == size
        np.testing.assert_array_equal(sample.routes[: size - 1], before.routes[: size - 1])


def row_of(prompt: int) -> RolloutSequence:
    return RolloutSequence(dense.PROMPTS[prompt], 0, 9, noise_step=3, name=str(prompt))


def sample_of(row: RolloutSequence) -> Sample:
    return row.to_sample(0, ROUTED, decode_text=spell, stop_text=spell)


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
