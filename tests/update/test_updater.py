"""Tests mini-batches and the updates over them."""

import functools
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from app.batching.micro_batch_plan import TokenBudget
from app.batching.micro_batcher import FixedRowBatcher, MicroBatcher, PackedRowBatcher
from app.mesh.program_cache import CompilationCounter
from app.model.architecture import forward_flops
from app.model.decoder import DecoderDefinition
from app.records.sample import Sample
from app.score.scorer import Scorer
from app.update.loss_aggregation import token_mean
from app.update.mini_batches import repeated_mini_batches, select_samples, shuffled_mini_batches, split_by_group
from app.update.optimizer import TrainState, init_train_state, make_optimizer, train_state_shardings
from app.update.policy_loss import PolicyBatch, make_policy_objective
from app.update.step import UpdateStep
from app.update.updater import PolicyBatchPacker, Updater, UpdateStepFn, summarize_updates
from settings.schema.algorithm import OptimizerSettings, ScoredRole
from tests.tiny import ODD, PLAIN_LOSS, make_mesh, make_sample, one_a_row, random_params, random_samples

DEFINITION = DecoderDefinition.create(replace(ODD, num_layers=1))
SAMPLES = random_samples(4, 2, vocab_size=ODD.vocab_size)
THREES = one_a_row(len(SAMPLES), rows_per_micro_batch=3, num_tokens=16, num_targets=12)
FOURS = FixedRowBatcher(4, trim_tail=False)
SIX_GROUPS = random_samples(6, 4, vocab_size=ODD.vocab_size, seed=5)
SCHEDULE = optax.constant_schedule(1e-2)
OPTIMIZER = make_optimizer(OptimizerSettings(), SCHEDULE)
FLOAT32 = jnp.dtype("float32")


def updated(
    step: UpdateStepFn,
    state: Any,
    samples: Sequence[Sample],
    *,
    roles: Collection[ScoredRole] = (),
    micro_batcher: MicroBatcher = FOURS,
    temperature: float = 1.3,
    **of_mini_batches: int,
) -> tuple[Any, dict[str, float]]:
    """Returns state and metrics after a step with the same mini-batches in every epoch."""
    updater = Updater(step, make_mesh(), pack=PolicyBatchPacker(token_mean, roles), micro_batcher=micro_batcher)
    indices = repeated_mini_batches(samples, 1, **({"num_mini_batches": 1, "epochs": 1} | of_mini_batches))
    return updater.update(state, select_samples(samples, indices), temperature=temperature)


@functools.cache
def shardings():
    mesh = make_mesh()
    return train_state_shardings(OPTIMIZER, DEFINITION.shapes, DEFINITION.shardings(mesh), mesh)


@functools.cache
def real_step() -> UpdateStep:
    objective = make_policy_objective(DEFINITION, PLAIN_LOSS, dtype=FLOAT32, remat="none", logits_chunk=6)
    return UpdateStep(objective, OPTIMIZER, SCHEDULE, shardings())


@functools.cache
def scorer() -> Scorer:
    return Scorer(DEFINITION, make_mesh(), dtype=FLOAT32, logits_chunk=6)


def fresh_state() -> TrainState:
    return init_train_state(OPTIMIZER, random_params(DEFINITION), shardings())


def recorded_step(updates: list[Sequence[PolicyBatch]]) -> UpdateStepFn:
    """Returns the real step, which also appends its batches to a list."""

    def step(state: Any, batches: Sequence[PolicyBatch], *rest: Any) -> tuple[Any, dict[str, Any]]:
        updates.append(batches)
        return real_step()(state, batches, *rest)

    return step


def test_every_epoch_updates_on_every_mini_batch_in_order():
    updates: list[Sequence[PolicyBatch]] = []
    state, _ = updated(recorded_step(updates), fresh_state(), SAMPLES, num_mini_batches=2, epochs=3)
    assert int(state.num_updates) == 6
    mini_batches = [SAMPLES[:2] + SAMPLES[4:6], SAMPLES[2:4] + SAMPLES[6:]]
    for update, samples in zip(updates, mini_batches * 3, strict=True):
        tokens = [np.asarray(one.tokens.targets)[np.asarray(one.tokens.loss_mask)] for one in update]
        np.testing.assert_array_equal(np.concatenate(tokens), np.concatenate([s.completion_ids for s in samples]))
        # The loss of each mini-batch is averaged over the tokens of that mini-batch.
        for name in ("loss_weights", "token_weights"):
            assert sum(float(np.sum(getattr(one, name))) for one in update) == pytest.approx(1.0)
    assert len({one.tokens.token_ids.shape for update in updates for one in update}) == 1


def test_metrics_are_summarized_over_the_updates_of_a_step():
    first = {"loss": 1.0, "policy/ratio_max": 3.0, "rollout/diff_max": 1.0, "policy/learning_rate": 0.2}
    second = {"loss": 2.0, "policy/ratio_max": 2.0, "rollout/diff_max": 9.0, "policy/learning_rate": 0.1}
    counters = {"policy/nonfinite_updates": 1.0, "policy/nonfinite_in_a_row": 1.0}
    later = {"policy/nonfinite_updates": 1.0, "policy/nonfinite_in_a_row": 0.0}
    assert summarize_updates([first | counters, second | later]) == {
        "loss": 1.5,
        "policy/ratio_max": 3.0,
        "rollout/diff_max": 1.0,
        "policy/learning_rate": 0.1,
        "policy/nonfinite_updates": 1.0,
        "policy/nonfinite_in_a_row": 0.0,
    }


def test_the_ratio_of_a_single_update_is_exactly_one():
    state, metrics = updated(real_step(), fresh_state(), SAMPLES)
    assert metrics["policy/ratio_max"] == 1.0
    assert int(state.num_updates) == 1


@pytest.fixture(scope="module")
def scored():
    """Returns samples with the logprobs of the initial weights, scored in other micro-batches than the update's."""
    logprobs = scorer().per_token(random_params(DEFINITION), SAMPLES, THREES, temperature=1.3)
    return [
        replace(s, policy_logprobs=x, behavior_logprobs=x, reference_logprobs=None)
        for s, x in zip(SAMPLES, logprobs, strict=True)
    ]


def test_the_ratio_to_scored_logprobs_is_one_in_every_mini_batch_at_learning_rate_zero():
    """The learning rate is zero, so the policy of every mini-batch is the scored policy."""
    optimizer = make_optimizer(OptimizerSettings(), optax.constant_schedule(0.0))
    objective = make_policy_objective(DEFINITION, PLAIN_LOSS, dtype=FLOAT32, remat="none", logits_chunk=6)
    step = UpdateStep(objective, optimizer, optax.constant_schedule(0.0), shardings())
    budget = TokenBudget(16, 16, share_prompts=True, balance=True)
    cut = PackedRowBatcher(budget, forward_flops(ODD))
    state, scored = fresh_state(), []
    ((*parts,),) = select_samples(SIX_GROUPS, [split_by_group(SIX_GROUPS, 3)])
    for part in parts:
        plan = cut(part, make_mesh()).local_plan
        assert plan.num_micro_batches > 1
        logprobs = scorer().per_token(state.params, part, plan, temperature=1.3)
        scored += [replace(s, policy_logprobs=x, behavior_logprobs=x) for s, x in zip(part, logprobs, strict=True)]
    _, metrics = updated(step, state, scored, roles=["policy"], micro_batcher=cut, num_mini_batches=3)
    assert abs(metrics["policy/ratio_max"] - 1) <= 1e-5
    # The sampler has the same weights, so its logprobs differ from those of the update equally little.
    assert metrics["rollout/sampler_scorer_logprob_diff_max"] <= 1e-5
    assert metrics["batching/num_micro_batches"] >= 6


def test_update_batches_have_the_logprobs_of_all_roles_even_without_samples():
    updates: list[Sequence[PolicyBatch]] = []
    of_both: list[ScoredRole] = ["policy", "reference"]
    for roles in (of_both, ()):
        updated(recorded_step(updates), fresh_state(), [], roles=roles)
    for (batch,), is_scored in zip(updates, (True, False), strict=True):
        assert not np.asarray(batch.tokens.loss_mask).any()
        assert (batch.policy_logprobs is not None) == (batch.reference_logprobs is not None) == is_scored


def test_several_updates_change_the_ratio_and_compile_no_new_program(scored):
    several = functools.partial(updated, real_step(), roles=["policy"], num_mini_batches=2, epochs=2)
    state, metrics = several(fresh_state(), scored)
    assert int(state.num_updates) == 4
    assert metrics["policy/ratio_max"] > 1.01
    assert metrics["rollout/sampler_scorer_logprob_diff_max"] <= 1e-5
    with closing(CompilationCounter()) as compilations:
        several(state, scored, temperature=0.7)
        assert compilations.take_count() == 0


PAIRS = [make_sample([i], group_id=i // 2, sample_index=i % 2) for i in range(24)]


def groups_of(epochs) -> list[list[list[int]]]:
    return [[[s.group_id for s in part] for part in epoch] for epoch in epochs]


def drawn(step: int = 1, seed: int = 0) -> list[list[list[int]]]:
    indices = shuffled_mini_batches(PAIRS, step, num_mini_batches=3, epochs=2, seed=seed)
    return groups_of(select_samples(PAIRS, indices))


def test_groups_are_assigned_to_mini_batches_round_robin():
    ids = [7, -1, 7, 30, -1, 7, 5, 5, 2]
    samples = [make_sample([i], group_id=group, sample_index=i) for i, group in enumerate(ids)]
    # The groups are in the order of their first samples: 7, -1, 30, 5, 2.
    assert [part.tolist() for part in split_by_group(samples, 2)] == [[0, 2, 5, 3, 8], [1, 4, 6, 7]]
    assert [part.tolist() for part in split_by_group(samples, 5)] == [[0, 2, 5], [1, 4], [3], [6, 7], [8]]


def test_repeated_mini_batches_are_the_same_in_every_epoch():
    first, second = select_samples(PAIRS, repeated_mini_batches(PAIRS, 1, num_mini_batches=3, epochs=2))
    assert all(part is again for part, again in zip(first, second, strict=True))
    assert groups_of([first])[0][0] == [0, 0, 3, 3, 6, 6, 9, 9]


def test_shuffled_epochs_contain_every_group_once_and_depend_on_seed_step_and_epoch():
    first, second = drawn()
    for epoch in (first, second):
        assert sorted(g for part in epoch for g in part) == sorted(s.group_id for s in PAIRS)
        assert [len(part) for part in epoch] == [8, 8, 8]
        assert all(part[i] == part[i + 1] for part in epoch for i in range(0, 8, 2))
    assert drawn() == [first, second] and first != second
    assert drawn(step=2) != drawn() != drawn(seed=1)


@pytest.mark.parametrize("draw", [repeated_mini_batches, functools.partial(shuffled_mini_batches, seed=7)])
def test_mini_batches_do_not_depend_on_the_number_of_hosts(draw, monkeypatch: pytest.MonkeyPatch):
    def mini_batches(samples) -> list[list[list[int]]]:
        return groups_of(select_samples(samples, draw(samples, 3, num_mini_batches=3, epochs=2)))

    expected = mini_batches(PAIRS)
    num_hosts, per_host = 4, len(PAIRS) // 4
    joined: list[list[list[int]]] = [[[], [], []] for _ in range(2)]
    for host in range(num_hosts):
        monkeypatch.setattr(jax, "process_index", lambda host=host: host)
        own = mini_batches(PAIRS[host * per_host : (host + 1) * per_host])
        joined = [[a + b for a, b in zip(*epochs, strict=True)] for epochs in zip(joined, own, strict=True)]
    assert joined == expected
