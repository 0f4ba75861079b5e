"""Tests that eight virtual devices compute the same on every mesh as one device."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from app.batching.micro_batch_plan import TokenBudget
from app.batching.micro_batcher import FixedRowBatcher, MicroBatcher, PackedRowBatcher
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
from tests.tiny import (
    BIASED,
    EVEN,
    EXPERTS,
    PLAIN_LOSS,
    SWITCHES,
    assert_trees_close,
    make_engine,
    make_mesh,
    random_params,
    random_prompts,
    random_samples,
)

# One layer: the mesh never splits them.
EVEN, BIASED = replace(EVEN, num_layers=1), replace(BIASED, num_layers=1)
SWITCHED = replace(EVEN, **SWITCHES, windows=(3,))
MIXTURE = replace(EVEN, **EXPERTS)
FLOAT32 = jnp.dtype("float32")
EVERYTHING = replace(
    PLAIN_LOSS,
    surrogate=functools.partial(dual_clipped_surrogate, clip_low=0.2, clip_high=0.3, dual_clip=2.0),
    kl_estimator=k3,
    beta=0.1,
    entropy_coef=0.1,
)


@dataclass(frozen=True)
class Outcome:
    """Results of rollout, scoring and one update."""

    samples: list[Sample]
    logprobs: list[np.ndarray]
    params: Params
    first_moments: Params
    """First moments, which are a tenth of the gradient: this is the first update, and no gradient is clipped."""
    metrics: dict[str, float]


FIXED = FixedRowBatcher(1, trim_tail=False)
PACKED = PackedRowBatcher(
    # Rows of one block of attention and a tail; prompts shared, and repeated where a group fills a row.
    TokenBudget(max_tokens_per_device=48, row_length=24, share_prompts=True, balance=True),
    forward_flops(EVEN),
)


@functools.cache
def outcome(architecture: Architecture, shape: tuple[int, int, int], cut: MicroBatcher = PACKED) -> Outcome:
    definition, mesh = DecoderDefinition.create(architecture), make_mesh(shape)
    shardings = definition.shardings(mesh)
    params = jax.device_put(random_params(definition), shardings)
    engine = make_engine(definition, mesh, eos_ids=(3, 5, 7, 11))
    samples = engine.generate(
        engine.to_decode_weights(params),
        random_prompts(3, vocab_size=50),
        GenerationRequest(group_size=3, max_new_tokens=8, rules=SamplingRules(1.0), seed=1, policy_version=2),
    )
    scorer = Scorer(definition, mesh, dtype=FLOAT32, logits_chunk=3)
    trained = random_samples(4, 3, vocab_size=50, with_holes=True)
    logprobs = scorer.per_token(params, trained, cut(trained, mesh).local_plan, temperature=0.9)
    schedule = optax.constant_schedule(0.1)
    # A large epsilon keeps the update proportional to the gradient: else Adam makes steps of rounding errors.
    optimizer = make_optimizer(OptimizerSettings(epsilon=1.0, weight_decay=0.1, max_grad_norm=1e6), schedule)
    state_layout = train_state_shardings(optimizer, definition.shapes, shardings, mesh)
    objective = make_policy_objective(definition, EVERYTHING, dtype=FLOAT32, remat="block", logits_chunk=3)
    updater = Updater(
        UpdateStep(objective, optimizer, schedule, state_layout),
        mesh,
        micro_batcher=cut,
        pack=PolicyBatchPacker(aggregations(max_new_tokens=9)["constant-length"], roles=["policy", "reference"]),
    )
    state, metrics = updater.update(init_train_state(optimizer, params, state_layout), [[trained]], temperature=0.9)
    params, moments = jax.tree.map(np.asarray, (state.params, optax.tree.get(state.optimizer, "mu")))
    return Outcome(samples, logprobs, params, moments, metrics)


@pytest.mark.parametrize(
    ("architecture", "shape"),
    [(BIASED, (2, 2, 2)), (SWITCHED, (2, 2, 2)), (MIXTURE, (2, 2, 2))],
    ids=["dims-that-do-not-divide", "every-switch", "experts"],
)
def test_eight_devices_sample_score_and_learn_as_one_does(architecture, shape):
    one, eight = outcome(architecture, (1, 1, 1)), outcome(architecture, shape)
    assert {s.finish_reason for s in one.samples} == {"stop", "length"}
    for ours, expected in zip(eight.samples, one.samples, strict=True):
        np.testing.assert_array_equal(ours.completion_ids, expected.completion_ids)
        np.testing.assert_allclose(ours.behavior_logprobs, expected.behavior_logprobs, atol=1e-5)
        assert (ours.uid, ours.finish_reason) == (expected.uid, expected.finish_reason)
    for ours, expected in zip(eight.logprobs, one.logprobs, strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-5)
    assert_trees_close(eight.first_moments, one.first_moments)
    assert_trees_close(eight.params, one.params)
    assert_metrics_equal(eight, one)


def assert_metrics_equal(ours: Outcome, expected: Outcome) -> None:
    """Asserts equal metrics, except those of batching, which depend on the number of devices."""

    def of_the_samples(metrics: dict[str, float]) -> dict[str, float]:
        return {k: v for k, v in metrics.items() if not k.startswith(("batching/", "global_seqlen/"))}

    assert of_the_samples(ours.metrics) == pytest.approx(of_the_samples(expected.metrics), rel=1e-5)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 4, 1)])
def test_packed_rows_learn_as_one_sample_a_row_does(shape):
    ours, expected = outcome(EVEN, shape), outcome(EVEN, (1, 1, 1), FIXED)
    for a, b in zip(ours.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert_trees_close(ours.first_moments, expected.first_moments)
    assert_metrics_equal(ours, expected)
