"""Makes slots of a tiny mixture of experts that record routes, and computes the trainer's routes."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from app.model.architecture import RouteShape
from app.model.decoder import DecoderDefinition
from app.model.experts import UNRECORDED
from app.model.segment_layout import single_segment_layout
from app.records.sample import Sample
from app.rollout.engine.engine import SlotEngine
from app.rollout.sequence import RolloutSequence
from tests.rollout import slots as dense
from tests.tiny import MIXTURE, random_params, spell

DEFINITION = DecoderDefinition.create(MIXTURE)
SHAPE = RouteShape(MIXTURE.num_layers, MIXTURE.experts_per_token)
ROUTED = replace(dense.REQUEST, route_shape=SHAPE)


@functools.cache
def slots(**how: Any) -> SlotEngine:
    return dense.new_slots(4, exact=bool(how), definition=DEFINITION, records_routes=True, **dense.FEW_PROGRAMS, **how)


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
        assert np.all(routes[-1] == UNRECORDED), "nothing was sampled after the last token"


def row_of(prompt: int) -> RolloutSequence:
    return RolloutSequence(dense.PROMPTS[prompt], 0, 9, noise_step=3, name=str(prompt))


def sample_of(row: RolloutSequence) -> Sample:
    return row.to_sample(0, ROUTED, decode_text=spell, stop_text=spell)
