"""Tests of the critic's loss and of PPO's losses against numpy versions of TRL's PPOTrainer."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.batching.forward_passes import critic_values
from app.model.decoder import DecoderDefinition, ValueDecoder
from app.records.sample import Sample
from app.score.scorer import ValueScorer, append_dummy_token
from app.update.kl import k1
from app.update.loss_aggregation import StepTotals
from app.update.policy_loss import clipped_surrogate
from app.update.value_loss import (
    ValueBatch,
    ValueBatchPacker,
    clipped_squared_error,
    make_value_objective,
    squared_error,
)
from tests.tiny import (
    ODD,
    assert_trees_close,
    make_mesh,
    one_a_row,
    packed_plan,
    random_params,
    random_samples,
)

FLOAT32 = jnp.dtype("float32")
DEFINITION = DecoderDefinition.create(replace(ODD, num_layers=1), ValueDecoder)
PARAMS = random_params(DEFINITION)
CLIPPED = functools.partial(clipped_squared_error, clip_range=0.2)


def valued_samples() -> list[Sample]:
    rng = np.random.default_rng(3)

    def numbers(sample: Sample) -> np.ndarray:
        return rng.normal(size=len(sample.completion_ids)).astype(np.float32)

    samples = random_samples(4, 2, vocab_size=ODD.vocab_size, with_holes=True)
    return [replace(s, values=numbers(s), returns=numbers(s)) for s in samples]


SAMPLES = valued_samples()
PACKED = packed_plan(SAMPLES, quota=64, row_length=32, share_prompts=True)
ALONE = one_a_row(len(SAMPLES), rows_per_micro_batch=3, num_tokens=16, num_targets=12)


def test_hand_numbers_of_the_clip():
    values, old, returns = (jnp.asarray(x) for x in ([1.0, 0.1, -1.0, 0.3], [0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0]))
    error, clipped = clipped_squared_error(values, old, returns, clip_range=0.2)
    # Further off than the clip allows: away from the return the larger error counts, towards it the clipped one.
    np.testing.assert_allclose(error, [1.0, 0.81, 4.0, 0.64], rtol=1e-6)
    np.testing.assert_array_equal(clipped, [False, False, False, True])
    np.testing.assert_allclose(squared_error(values, old, returns)[0], [1.0, 0.81, 4.0, 0.49], rtol=1e-6)


def masked_mean(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return (x * mask).sum() / mask.sum()


def test_losses_and_penalty_equal_those_of_trl_on_identical_numbers():
    """Source: trl/trainer/ppo_trainer.py, body of the micro-batch loop, and its rewards per token."""
    rng = np.random.default_rng(0)
    mask = rng.random((5, 7)) < 0.8
    new, old, reference, values, old_values, returns, advantages = rng.normal(size=(7, 5, 7))
    f32 = functools.partial(jnp.asarray, dtype=jnp.float32)
    near = np.clip(values, old_values - 0.2, old_values + 0.2)
    larger = np.maximum((values - returns) ** 2, (near - returns) ** 2)
    ratio = np.exp(new - old)
    policy = np.maximum(-advantages * ratio, -advantages * np.clip(ratio, 0.8, 1.2))
    penalty = -0.05 * (old - reference)

    weights = (mask / mask.sum()).astype(np.float32)
    ours = clipped_surrogate(f32(new - old), f32(new), f32(advantages), clip_low=0.2, clip_high=0.2)
    error = clipped_squared_error(f32(values), f32(old_values), f32(returns), clip_range=0.2)[0]
    assert float(jnp.sum(weights * ours.loss)) == pytest.approx(masked_mean(policy, mask), abs=1e-5)
    assert 0.5 * float(jnp.sum(weights * error)) == pytest.approx(0.5 * masked_mean(larger, mask), abs=1e-5)
    np.testing.assert_allclose(-0.05 * k1(f32(old), f32(reference)), penalty, atol=1e-5)


def loss_and_gradient(plan, samples=SAMPLES):
    objective = make_value_objective(DEFINITION, CLIPPED, dtype=FLOAT32, remat="none")
    totals, sums, gradients = StepTotals.from_samples(samples), [], []
    for micro_batch in plan.micro_batches:
        batch = ValueBatchPacker()(samples, micro_batch, totals)
        (_, parts), gradient = jax.value_and_grad(objective, has_aux=True)(PARAMS, batch, jnp.float32(1))
        sums.append(parts.sums)
        gradients.append(gradient)

    def added(*trees):
        return jax.tree.map(lambda *leaves: sum(leaves), *trees)

    return added(*sums), added(*gradients)


def test_loss_and_gradient_do_not_depend_on_packing_or_micro_batches():
    alone, packed = loss_and_gradient(ALONE), loss_and_gradient(PACKED)
    assert_trees_close(packed, alone)
    assert float(alone[0]["value/clip_fraction"]) > 0


def test_what_stands_at_masked_tokens_changes_nothing():
    def spoiled(s: Sample) -> Sample:
        assert s.returns is not None
        return replace(s, returns=np.where(s.mask, s.returns, np.float32(1e6)))

    assert_trees_close(loss_and_gradient(PACKED, [spoiled(s) for s in SAMPLES]), loss_and_gradient(PACKED))


def test_the_loss_is_half_the_mean_over_the_tokens_of_the_step():
    valuer = ValueScorer(DEFINITION, make_mesh(), dtype=FLOAT32)
    values = valuer.per_token(PARAMS, SAMPLES, ALONE)
    errors = [
        clipped_squared_error(jnp.asarray(v), jnp.asarray(s.values), jnp.asarray(s.returns), clip_range=0.2)[0][s.mask]
        for v, s in zip(values, SAMPLES, strict=True)
    ]
    assert float(loss_and_gradient(PACKED)[0]["value/loss"]) == pytest.approx(
        0.5 * np.concatenate(errors).mean(), rel=1e-5
    )


def test_a_value_is_read_from_the_state_before_its_token_and_the_last_one_from_behind_the_sample():
    """The value depends on every earlier token and on no later one; the additional value also depends on the last
    token."""
    valuer = ValueScorer(DEFINITION, make_mesh(), dtype=FLOAT32)
    wide = one_a_row(len(SAMPLES), rows_per_micro_batch=3, num_tokens=18, num_targets=12)

    def values_of(samples: list[Sample]) -> list[np.ndarray]:
        return valuer.per_token(PARAMS, [append_dummy_token(s) for s in samples], wide, runner=valuer.run_scanned)

    short, long = valuer.per_token(PARAMS, SAMPLES, ALONE), values_of(SAMPLES)
    for s, own, more in zip(SAMPLES, short, long, strict=True):
        assert len(more) == len(s.completion_ids) + 1 == len(own) + 1
        np.testing.assert_allclose(more[:-1], own, atol=1e-5)
    for at in (-1, -2):
        changed = values_of([with_another_token(s, at) for s in SAMPLES])
        for s, own, other in zip(SAMPLES, long, changed, strict=True):
            if len(s.completion_ids) >= -at:
                np.testing.assert_allclose(other[:at], own[:at], atol=1e-5)
                assert abs(other[at] - own[at]) > 1e-3


def with_another_token(sample: Sample, at: int) -> Sample:
    """Returns the samples with another token at `at`, which counts from the end."""
    ids = sample.completion_ids.copy()
    ids[at:][:1] = (ids[at:][:1] + 5) % ODD.vocab_size
    return replace(sample, completion_ids=ids)


def test_a_fresh_head_says_zero_everywhere_and_learns():
    objective = make_value_objective(DEFINITION, CLIPPED, dtype=FLOAT32, remat="none")
    fresh = {**PARAMS, "value": jnp.zeros_like(PARAMS["value"])}
    batch: ValueBatch = ValueBatchPacker()(SAMPLES, ALONE.micro_batches[0], StepTotals.from_samples(SAMPLES))
    values = critic_values(DEFINITION.bind(fresh), batch.tokens, dtype=FLOAT32, remat="none")
    np.testing.assert_array_equal(values, 0)
    gradient = jax.grad(lambda params: objective(params, batch, jnp.float32(1))[0])(fresh)
    assert float(jnp.abs(gradient["value"]).max()) > 0
