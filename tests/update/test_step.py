from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from app.batching.micro_batch_plan import MicroBatchPlan
from app.model.decoder import DecoderDefinition
from app.update.kl import k3
from app.update.loss_aggregation import aggregations
from app.update.optimizer import TrainState, init_train_state, make_optimizer, train_state_shardings
from app.update.policy_loss import PolicyLoss, dual_clipped_surrogate, make_policy_objective
from app.update.ratios import ImportanceCorrection, geometric_log_weight, mask_weights
from app.update.step import UpdateStep
from settings.schema.algorithm import OptimizerSettings
from tests.tiny import (
    ODD,
    PLAIN_LOSS,
    assert_trees_close,
    make_mesh,
    one_a_row,
    pack_update,
    packed_plan,
    plan_of,
    random_params,
    random_samples,
)

DEFINITION = DecoderDefinition.create(replace(ODD, num_layers=1))
SAMPLES = random_samples(4, 2, vocab_size=ODD.vocab_size, with_holes=True)
SHARED_ROWS = plan_of(((5, 0, 3), (1, 7), (), (2, 6, 4)), rows_per_micro_batch=2, num_tokens=48, num_targets=30)

AGGREGATIONS = aggregations(max_new_tokens=9)
PLANNED = [
    packed_plan(SAMPLES, quota=quota, row_length=24, share_prompts=share) for quota, share in ((24, True), (72, True))
]
EVERYTHING = replace(
    PLAIN_LOSS,
    surrogate=functools.partial(dual_clipped_surrogate, clip_low=0.2, clip_high=0.3, dual_clip=1.5),
    kl_estimator=k3,
    beta=0.3,
    entropy_coef=0.2,
    correction=ImportanceCorrection(
        geometric_log_weight, functools.partial(mask_weights, min_weight=0.1, max_weight=4.0), veto=0.1
    ),
)


def objective_of(loss: PolicyLoss):
    return make_policy_objective(DEFINITION, loss, dtype=jnp.dtype("float32"), remat="none", logits_chunk=6)


def fixed(rows: int) -> MicroBatchPlan:
    return one_a_row(len(SAMPLES), rows_per_micro_batch=rows, num_tokens=16, num_targets=12)


def update_step(loss: PolicyLoss) -> tuple[UpdateStep, Callable[[], TrainState]]:
    """Returns a compiled update step and a function that makes initial states."""
    mesh, schedule = make_mesh(), optax.linear_schedule(0.5, 0.0, 5)
    optimizer = make_optimizer(OptimizerSettings(weight_decay=0.1), schedule)
    shardings = train_state_shardings(optimizer, DEFINITION.shapes, DEFINITION.shardings(mesh), mesh)

    def fresh() -> TrainState:
        return init_train_state(optimizer, random_params(DEFINITION), shardings)

    return UpdateStep(objective_of(loss), optimizer, schedule, shardings), fresh


@pytest.mark.parametrize(
    ("loss", "plans"),
    [(PLAIN_LOSS, [fixed(3), SHARED_ROWS]), (EVERYTHING, [fixed(1), fixed(2), fixed(4), *PLANNED])],
    ids=["plain", "everything"],
)
def test_micro_batches_padding_shared_rows_and_shared_prompts_change_neither_gradient_nor_metrics(loss, plans):
    # test_policy_loss.py has every combination of terms; here the decoder stands below them.
    step, fresh = update_step(loss)
    state = fresh()
    for weights in AGGREGATIONS.values():

        def summed(plan: MicroBatchPlan, weights=weights):
            return step.accumulate(state.params, pack_update(SAMPLES, plan, weights=weights), jnp.float32(1.3))

        gradient, parts = expected = summed(fixed(8))
        assert optax.tree.norm(gradient) > 1e-3
        assert float(parts.maxima["policy/ratio_max"]) > 1.5
        for plan in plans:
            assert_trees_close(summed(plan), expected)


def test_what_a_step_will_measure_is_known_before_it_is_taken():
    step, fresh = update_step(EVERYTHING)
    names = step.metric_names(fresh().params, GOOD[0], jnp.float32(1.3))
    _, metrics = step(fresh(), GOOD, jnp.float32(1.3))
    assert sorted(names) == sorted(metrics)
    assert 0 < float(metrics["policy/correction_ess"]) < 1


@pytest.fixture(scope="module")
def step():
    return update_step(PLAIN_LOSS)


def on_host(state: TrainState) -> TrainState:
    """Returns a copy on the host, which donation of the state does not invalidate."""
    return jax.tree.map(np.array, state)


GOOD = pack_update(SAMPLES, fixed(4))


def spoiled(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return np.where(mask, np.float32(np.nan), values)


BAD = [replace(batch, advantages=spoiled(batch.advantages, batch.tokens.loss_mask)) for batch in GOOD]


def test_a_good_step_moves_every_weight_and_is_counted(step):
    update, fresh = step
    before = on_host(fresh())
    state, metrics = update(fresh(), GOOD, jnp.float32(1.3))
    after = on_host(state)
    jax.tree.map(lambda a, b: np.array_equal(a, b) and pytest.fail(), after.params, before.params)
    assert (after.num_updates, after.nonfinite_in_a_row, after.nonfinite_total) == (1, 0, 0)
    assert float(metrics["policy/learning_rate"]) == pytest.approx(0.5)
    assert float(metrics["policy/grad_norm"]) > 0
    _, second = update(state, GOOD, jnp.float32(1.3))
    assert float(second["policy/learning_rate"]) == pytest.approx(0.4)


@pytest.mark.parametrize(("field", "value"), [("advantages", np.inf), ("behavior_logprobs", np.nan)])
def test_one_bad_number_changes_no_weight_and_no_moment(step, field, value):
    update, fresh = step
    state, _ = update(fresh(), GOOD, jnp.float32(1.3))
    before = on_host(state)
    # Sampler logprobs only feed a metric: a bad one must not cost the step.
    values = getattr(GOOD[0], field).copy()
    values[tuple(np.argwhere(GOOD[0].tokens.loss_mask)[0])] = value
    state, metrics = update(state, [replace(GOOD[0], **{field: values}), *GOOD[1:]], jnp.float32(1.3))
    after = on_host(state)
    if field == "behavior_logprobs":
        assert (after.num_updates, after.nonfinite_total) == (2, 0)
        return
    jax.tree.map(np.testing.assert_array_equal, (after.params, after.optimizer), (before.params, before.optimizer))
    assert (after.num_updates, after.nonfinite_in_a_row, after.nonfinite_total) == (1, 1, 1)
    assert int(metrics["policy/nonfinite_updates"]) == 1


def test_bad_steps_are_counted_until_a_good_one(step):
    update, fresh = step
    state, counts = fresh(), []
    for batch in (BAD, BAD, GOOD, BAD):
        state, metrics = update(state, batch, jnp.float32(1.3))
        counts.append((int(metrics["policy/nonfinite_in_a_row"]), int(metrics["policy/nonfinite_updates"])))
    assert counts == [(1, 1), (2, 2), (0, 2), (1, 3)]
    assert int(state.num_updates) == 1
