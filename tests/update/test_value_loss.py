"""Tests the loss and the values of the critic."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.batching.micro_batch_plan import MicroBatchPlan
from app.model.decoder import DecoderDefinition, ValueDecoder
from app.records.sample import Sample
from app.score.scorer import ValueScorer, append_dummy_token
from app.update.loss_aggregation import StepTotals
from app.update.value_loss import ValueBatchPacker, clipped_squared_error, make_value_objective, squared_error
from tests.tiny import ODD, assert_trees_close, make_mesh, one_a_row, packed_plan, random_params, random_samples

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


def test_clipped_value_errors_equal_hand_computed_values():
    """Source: trl/trainer/ppo_trainer.py, body of the micro-batch loop."""
    values, old, returns = (jnp.asarray(x) for x in ([1.0, 0.1, -1.0, 0.3], [0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0]))
    error, clipped = clipped_squared_error(values, old, returns, clip_range=0.2)
    # The values moved beyond the clip range: away from the return, the unclipped error is larger and is used; towards
    # the return, the clipped error is larger.
    np.testing.assert_allclose(error, [1.0, 0.81, 4.0, 0.64], rtol=1e-6)
    np.testing.assert_array_equal(clipped, [False, False, False, True])
    np.testing.assert_allclose(squared_error(values, old, returns)[0], [1.0, 0.81, 4.0, 0.49], rtol=1e-6)


@functools.cache
def objective_and_gradient():
    objective = make_value_objective(DEFINITION, CLIPPED, dtype=FLOAT32, remat="none")
    return jax.jit(jax.value_and_grad(objective, has_aux=True))


def loss_and_gradient(plan: MicroBatchPlan, samples: Sequence[Sample] = SAMPLES) -> tuple[Any, Any]:
    totals, parts = StepTotals.from_samples(samples), []
    for micro_batch in plan.micro_batches:
        batch = ValueBatchPacker()(samples, micro_batch, totals)
        (_, stats), gradient = objective_and_gradient()(PARAMS, batch, jnp.float32(1))
        parts.append((stats.sums, gradient))
    return jax.tree.map(lambda *leaves: sum(leaves), *parts)


def test_packing_changes_neither_loss_nor_gradient_of_the_critic():
    alone, packed = loss_and_gradient(ALONE), loss_and_gradient(PACKED)
    assert_trees_close(packed, alone)
    assert float(alone[0]["value/clip_fraction"]) > 0
    columns = (
        valuer().per_token(PARAMS, SAMPLES, ALONE),
        *zip(*((s.values, s.returns, s.mask) for s in SAMPLES), strict=True),
    )
    values, old, returns, mask = (jnp.asarray(np.concatenate(one)) for one in columns)
    # The loss is half the mean squared error over the tokens of the step.
    expected = 0.5 * np.asarray(CLIPPED(values, old, returns)[0])[mask].mean()
    assert float(packed[0]["value/loss"]) == pytest.approx(expected, rel=1e-5)


@functools.cache
def valuer() -> ValueScorer:
    return ValueScorer(DEFINITION, make_mesh(), dtype=FLOAT32)


def test_returns_at_masked_tokens_have_no_effect_on_the_value_loss():
    def spoiled(s: Sample) -> Sample:
        assert s.returns is not None
        return replace(s, returns=np.where(s.mask, s.returns, np.float32(1e6)))

    assert_trees_close(loss_and_gradient(PACKED, [spoiled(s) for s in SAMPLES]), loss_and_gradient(PACKED))


def test_a_value_belongs_to_the_state_before_its_token():
    """A value depends on all earlier tokens and on no later one; the additional value depends on the last token too."""
    wide = one_a_row(len(SAMPLES), rows_per_micro_batch=3, num_tokens=18, num_targets=12)

    def values_of(samples: list[Sample]) -> list[np.ndarray]:
        longer = [append_dummy_token(s) for s in samples]
        return valuer().per_token(PARAMS, longer, wide, runner=valuer().run_scanned)

    short, long = valuer().per_token(PARAMS, SAMPLES, ALONE), values_of(SAMPLES)
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
    """Returns the sample with another token at `at`, which counts from the end."""
    ids = sample.completion_ids.copy()
    ids[at:][:1] = (ids[at:][:1] + 5) % ODD.vocab_size
    return replace(sample, completion_ids=ids)
