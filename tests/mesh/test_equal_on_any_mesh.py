"""Tests that eight virtual devices compute the same on every mesh as one device."""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from app.batching.micro_batch_plan import TokenBudget
from app.batching.micro_batcher import PackedRowBatcher
from app.model.architecture import Architecture, forward_flops
from app.model.decoder import DecoderDefinition, Params
from app.records.sample import Sample
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import SamplingRules
from app.score.scorer import Scorer
from app.update.kl import k3
from app.update.loss_aggregation import aggregations
from app.update.optimizer import init_train_state, make_optimizer, train_state_shardings
from app.update.policy_loss import dual_clipped_surrogate, make_policy_objective
from app.update.step import UpdateStep
from app.update.updater import PolicyBatchPacker, Updater
from settings.schema.algorithm import OptimizerSettings
from tests import tiny

# One layer is enough, because the mesh never splits layers.
ONE_LAYER = replace(tiny.BIASED, num_layers=1)
SWITCHED_EXPERTS = replace(
    tiny.EVEN, num_layers=1, windows=(3,), **tiny.SWITCHES | tiny.EXPERTS | {"family": "gemma3_text"}
)
FLOAT32 = jnp.dtype("float32")
EVERYTHING = replace(
    tiny.PLAIN_LOSS,
    surrogate=functools.partial(dual_clipped_surrogate, clip_low=0.2, clip_high=0.3, dual_clip=2.0),
    kl_estimator=k3,
    beta=0.1,
    entropy_coef=0.1,
)
PACKED = PackedRowBatcher(
    # A row is one attention block and a part of another; a prompt is repeated if its group fills more than a row.
    TokenBudget(max_tokens_per_device=48, row_length=24, share_prompts=True, balance=True),
    forward_flops(tiny.EVEN),
)


@functools.cache
def weights(architecture: Architecture, shape: tuple[int, int, int]) -> tuple[DecoderDefinition, Mesh, Params]:
    definition, mesh = DecoderDefinition.create(architecture), tiny.make_mesh(shape)
    return definition, mesh, jax.device_put(tiny.random_params(definition), definition.shardings(mesh))


def generated(architecture: Architecture, shape: tuple[int, int, int]) -> list[Sample]:
    definition, mesh, params = weights(architecture, shape)
    engine = tiny.TinyEngine(definition, mesh, eos_ids=(3, 5, 7, 11))
    request = GenerationRequest(group_size=3, max_new_tokens=8, rules=SamplingRules(1.0), seed=1, policy_version=2)
    return engine.generate(engine.to_decode_weights(params), tiny.random_prompts(3, vocab_size=50), request)


@dataclass(frozen=True)
class Learned:
    """Logprobs of samples, and results of the first update on them."""

    logprobs: list[np.ndarray]
    params: Params
    first_moments: Params
    """First moments, which are a tenth of the gradient: no gradient is clipped."""
    metrics: dict[str, float]


def with_routes(sample: Sample, architecture: Architecture) -> Sample:
    """Returns the sample with recorded experts that its routers may not have chosen, if it has experts."""
    if architecture.route_shape is None:
        return sample
    rng = np.random.default_rng(sample.sample_index)
    size = len(sample.prompt.token_ids) + len(sample.completion_ids), *architecture.route_shape
    return replace(sample, routes=rng.integers(0, architecture.num_experts or 0, size).astype(np.uint8))


@functools.cache
def learned(architecture: Architecture, shape: tuple[int, int, int]) -> Learned:
    definition, mesh, params = weights(architecture, shape)
    shardings, routes = definition.shardings(mesh), architecture.route_shape
    scorer = Scorer(definition, mesh, dtype=FLOAT32, logits_chunk=3, replays_routes=routes is not None)
    trained = [with_routes(s, architecture) for s in tiny.random_samples(4, 3, vocab_size=50, with_holes=True)]
    logprobs = scorer.per_token(params, trained, PACKED(trained, mesh).local_plan, temperature=0.9)
    schedule = optax.constant_schedule(0.1)
    # A large epsilon keeps the update proportional to the gradient: otherwise Adam would amplify rounding errors.
    optimizer = make_optimizer(OptimizerSettings(epsilon=1.0, weight_decay=0.1, max_grad_norm=1e6), schedule)
    state_layout = train_state_shardings(optimizer, definition.shapes, shardings, mesh)
    objective = make_policy_objective(definition, EVERYTHING, dtype=FLOAT32, remat="block", logits_chunk=3)
    updater = Updater(
        UpdateStep(objective, optimizer, schedule, state_layout),
        mesh,
        micro_batcher=PACKED,
        pack=PolicyBatchPacker(
            aggregations(max_new_tokens=9)["constant-length"], roles=["policy", "reference"], route_shape=routes
        ),
    )
    fresh = jax.device_put(tiny.random_params(definition), shardings)
    state, metrics = updater.update(init_train_state(optimizer, fresh, state_layout), [[trained]], temperature=0.9)
    params, moments = jax.tree.map(np.asarray, (state.params, optax.tree.get(state.optimizer, "mu")))
    return Learned(logprobs, params, moments, metrics)


def assert_learned_alike(ours: Learned, expected: Learned) -> None:
    for a, b in zip(ours.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    tiny.assert_trees_close(ours.first_moments, expected.first_moments)
    tiny.assert_trees_close(ours.params, expected.params)

    def of_the_samples(metrics: dict[str, float]) -> dict[str, float]:
        """Returns the metrics except those of batching, which depend on the number of devices."""
        return {k: v for k, v in metrics.items() if not k.startswith(("batching/", "global_seqlen/"))}

    assert of_the_samples(ours.metrics) == pytest.approx(of_the_samples(expected.metrics), rel=1e-5)


@pytest.mark.parametrize(
    "architecture", [ONE_LAYER, SWITCHED_EXPERTS], ids=["dims-that-do-not-divide", "every-switch-and-experts"]
)
def test_eight_devices_sample_score_and_train_like_one_device(architecture):
    one, eight = generated(architecture, (1, 1, 1)), generated(architecture, (2, 2, 2))
    assert {s.finish_reason for s in one} == {"stop", "length"}
    for ours, expected in zip(eight, one, strict=True):
        np.testing.assert_array_equal(ours.completion_ids, expected.completion_ids)
        np.testing.assert_allclose(ours.behavior_logprobs, expected.behavior_logprobs, atol=1e-5)
        assert (ours.uid, ours.finish_reason) == (expected.uid, expected.finish_reason)
    assert_learned_alike(learned(architecture, (2, 2, 2)), learned(architecture, (1, 1, 1)))
