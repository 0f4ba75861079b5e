"""Tests of the routes that samplers record: those of the trainer's pass over the same tokens, and what they repair."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.distributed.stop_check import never_stop
from app.model.architecture import RouteShape
from app.model.decode_weights import DecodeWeights
from app.model.decoder import DecoderDefinition, Params
from app.model.experts import UNRECORDED
from app.model.segment_layout import single_segment_layout
from app.records.sample import Sample
from app.rollout.engine.continuous_batching import ContinuousBatchGenerator
from app.rollout.engine.engine import SlotEngine
from app.rollout.engine.shapes import make_slot_shapes
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import SamplingRules
from app.rollout.scheduling.protocol import RunSegment
from app.rollout.scheduling.segment_limits import SegmentLimits
from app.rollout.sequence import RolloutSequence, SuspendedSequence
from app.rollout.workers.worker import Admission
from app.score.scorer import Scorer
from settings.schema.rollout import SegmentSettings
from tests.tiny import MIXTURE, make_engine, make_mesh, packed_plan, random_params, random_prompts, spell

FLOAT32 = jnp.dtype("float32")
DEFINITION = DecoderDefinition.create(MIXTURE)
SHAPE = RouteShape(MIXTURE.num_layers, MIXTURE.experts_per_token)
PROMPTS = random_prompts(4, vocab_size=MIXTURE.vocab_size, longest=8)
GROUP_SIZE = 3
LENGTHS = [5, 12, 1, 9, 3, 12, 7, 7, 2, 10, 4, 6]
REQUEST = GenerationRequest(
    group_size=GROUP_SIZE,
    max_new_tokens=LENGTHS,
    rules=SamplingRules(1.0),
    seed=0,
    policy_version=3,
    route_shape=SHAPE,
)


@functools.cache
def params() -> Params:
    return random_params(DEFINITION)


@functools.cache
def weights_on(shape: tuple[int, int, int] = (1, 1, 1)) -> DecodeWeights:
    return make_engine(DEFINITION, make_mesh(shape)).to_decode_weights(params())


def new_slots(
    num_slots: int, *, mesh: tuple[int, int, int] = (1, 1, 1), exact: bool = False, **sizes: Any
) -> SlotEngine:
    shapes = make_slot_shapes(
        num_slots,
        max_prompt_length=8,
        max_new_tokens=12,
        prefill_length_min=4,
        segment_max=5,
        exact=exact,
    )._replace(records_routes=True, **sizes)
    return SlotEngine(DEFINITION, make_mesh(mesh), shapes, eos_ids=(), dtype=FLOAT32, exact=exact)


@functools.cache
def slots() -> SlotEngine:
    return new_slots(4)


def in_slots(engine: SlotEngine, shape: tuple[int, int, int] = (1, 1, 1), **changes: Any) -> list[Sample]:
    rule = SegmentSettings.model_validate({"min": 1})
    queue = ContinuousBatchGenerator(engine, decode_text=spell, segment_rule=rule)
    return queue.generate(weights_on(shape), PROMPTS, replace(REQUEST, **changes))


@functools.cache
def trainer() -> Any:
    def live(params: Params, ids: jax.Array, mask: jax.Array) -> jax.Array | None:
        layout = single_segment_layout(mask)
        return DEFINITION.bind(params).hidden_and_routes(ids, layout, dtype=FLOAT32, remat="none")[1]

    return jax.jit(live)


def assert_routes_are_those_of_the_trainer(samples: Sequence[Sample]) -> None:
    for sample in samples:
        ids = np.concatenate([sample.prompt.token_ids, sample.completion_ids])
        padded, mask = np.zeros((1, 24), np.int32), np.arange(24)[None] < len(ids)
        padded[0, : len(ids)] = ids
        expected = np.moveaxis(np.asarray(trainer()(params(), padded, mask))[:, 0, : len(ids)], 0, 1)
        routes = sample.routes
        assert routes is not None and routes.dtype == np.uint8 and routes.shape == (len(ids), *SHAPE)
        np.testing.assert_array_equal(routes[:-1], expected[:-1])
        # Nothing was drawn after the last token.
        assert np.all(routes[-1] == UNRECORDED)


@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        ((1, 1, 1), {}),
        ((1, 1, 1), {"exact": True}),
        # Rows give their blocks up, and are computed again.
        ((1, 1, 1), {"block_size": 4, "num_blocks": 9}),
        ((1, 1, 1), {"rows_together": 2}),
        ((2, 2, 2), {}),
    ],
    ids=["fast", "exact", "scarce", "groups", "mesh"],
)
def test_slots_record_the_trainers_routes(mesh, how):
    engine = new_slots(8 if mesh[0] > 1 else 4, mesh=mesh, **how)
    samples = in_slots(engine, mesh)
    assert [len(s.completion_ids) for s in samples] == LENGTHS
    assert_routes_are_those_of_the_trainer(samples)
    assert (engine.counters.preempted_rows > 0) == ("num_blocks" in how)


def test_evaluations_and_rows_that_end_at_a_stop_string_have_as_many_routes_as_they_should():
    assert all(sample.routes is None for sample in in_slots(slots(), route_shape=None))
    whole = in_slots(slots())
    cut = in_slots(slots(), stop=(f" {whole[1].completion_ids[3]} ",))
    lengths = [len(s.completion_ids) for s in cut]
    assert lengths[1] <= 5 < LENGTHS[1]
    for sample, before in zip(cut, whole, strict=True):
        assert sample.routes is not None and before.routes is not None
        size = len(sample.prompt.token_ids) + len(sample.completion_ids)
        assert len(sample.routes) == size
        np.testing.assert_array_equal(sample.routes[: size - 1], before.routes[: size - 1])


def row_of(prompt: int, length: int) -> RolloutSequence:
    return RolloutSequence(PROMPTS[prompt], 0, length, noise_step=3)


def sample_of(row: RolloutSequence) -> Sample:
    return row.to_sample(0, REQUEST, decode_text=spell)


def test_suspended_rows_keep_the_routes_of_their_prompts_with_and_without_a_cache():
    engine, rows = slots(), [row_of(i, 9) for i in range(4)]
    engine.open(weights_on(), REQUEST, suspends=True)
    engine.admit(rows)
    first, second = map(engine.suspend, rows[:2])  # before their first segment
    engine.admit([first, second])
    engine.start_segment(SegmentLimits(4))
    engine.finish_segment().collect()
    kept, lost = map(engine.suspend, rows[1:3])
    engine.load_weights(weights_on(), policy_version=4)
    engine.admit([kept, SuspendedSequence(lost.row, None)])
    while engine.active_rows:
        engine.start_segment(SegmentLimits(5))
        engine.finish_segment().collect()
    engine.close()
    assert_routes_are_those_of_the_trainer([sample_of(row) for row in rows])


@pytest.mark.slow
def test_routes_come_back_from_a_worker_in_another_process():
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
    from app.rollout.workers.ray_actor import ActorSpec
    from app.rollout.workers.ray_worker import RayCluster, RayWorker

    engine = new_slots(4)
    spec = ActorSpec(
        *(MIXTURE, engine.shapes, "fast", (), "float32"),
        exact=False,
        tp=1,
        platforms="cpu",
        matmul_precision="highest",
    )
    worker = RayWorker(name="far", kind="fast", engine=engine, spec=spec, cluster=RayCluster("local", []), resources={})
    worker.wait_until_ready(never_stop)
    worker.open(weights_on(), REQUEST, suspends=False)
    rows = [replace(row_of(i, 9), name=str(i)) for i in range(3)]
    waiting = deque(Admission(row, None) for row in rows)
    for _ in range(3):
        worker.start_segment(RunSegment("far", (), SegmentLimits(4)), waiting)
        worker.finish_segment()
    worker.shut_down()
    assert all(row.finish_reason == "length" for row in rows)
    assert_routes_are_those_of_the_trainer([sample_of(row) for row in rows])


def with_pairs_of_like_experts(noise: float) -> Params:
    """Returns weights with which rounding chooses between experts: pairs of them have almost the same router."""
    router = np.array(params()["blocks"]["experts"]["router"])
    router[:, 1::2] = router[:, ::2] + noise * np.random.default_rng(7).normal(size=router[:, 1::2].shape)
    experts = {**params()["blocks"]["experts"], "router": jnp.asarray(router, FLOAT32)}
    return {**params(), "blocks": {**params()["blocks"], "experts": experts}}


def test_replay_takes_a_difference_of_routes_away_to_within_rounding():
    engine = make_engine(DEFINITION, records_routes=True)
    samples = engine.generate(engine.to_decode_weights(with_pairs_of_like_experts(1e-6)), PROMPTS, REQUEST)
    plan = packed_plan(samples, quota=96, row_length=48, share_prompts=True)

    def largest_difference(*, replays: bool) -> float:
        scorer = Scorer(DEFINITION, make_mesh(), dtype=FLOAT32, logits_chunk=5, replays_routes=replays)
        # The trainer's router prefers the other expert of each pair.
        scored = scorer.per_token(with_pairs_of_like_experts(-1e-6), samples, plan, temperature=1.0)
        behavior = np.concatenate([sample.behavior_logprobs for sample in samples])
        return float(np.abs(np.concatenate(scored) - behavior).max())

    live, replayed = largest_difference(replays=False), largest_difference(replays=True)
    assert live > 0.1 and replayed <= 1e-4
