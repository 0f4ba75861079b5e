from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from app.batching.micro_batch_plan import TokenBudget
from app.batching.micro_batcher import FixedRowBatcher, PackedRowBatcher
from app.mesh.program_cache import CompilationCounter
from app.model.architecture import forward_flops
from app.model.decoder import DecoderDefinition
from app.records.sample import Sample
from app.score.scorer import Scorer
from app.update.loss_aggregation import token_mean
from app.update.mini_batches import repeated_mini_batches, select_samples, split_by_group
from app.update.optimizer import TrainState, init_train_state, make_optimizer, train_state_shardings
from app.update.policy_loss import PolicyBatch, make_policy_objective
from app.update.step import UpdateStep
from app.update.updater import PolicyBatchPacker, Updater, UpdateStepFn, summarize_updates
from settings.schema.algorithm import OptimizerSettings, ScoredRole
from tests.tiny import ODD, PLAIN_LOSS, make_mesh, make_sample, one_a_row, random_params, random_samples

DEFINITION = DecoderDefinition.create(replace(ODD, num_layers=1))
SAMPLES = random_samples(4, 2, vocab_size=ODD.vocab_size)
THREES = one_a_row(len(SAMPLES), rows_per_micro_batch=3, num_tokens=16, num_targets=12)
SIX_GROUPS = random_samples(6, 4, vocab_size=ODD.vocab_size, seed=5)
SCHEDULE = optax.constant_schedule(1e-2)
OPTIMIZER = make_optimizer(OptimizerSettings(), SCHEDULE)
FLOAT32 = jnp.dtype("float32")


class InOrder(Updater):
    """A splitter of a step's samples into the same mini-batches in every epoch."""

    def __init__(self, *arguments: Any, num_mini_batches: int, epochs: int, **others: Any):
        super().__init__(*arguments, **others)
        self.mini_batches = functools.partial(
            repeated_mini_batches, step=1, num_mini_batches=num_mini_batches, epochs=epochs
        )

    def update(self, state: Any, samples: Any, *, temperature: float) -> tuple[Any, dict[str, float]]:
        return super().update(state, select_samples(samples, self.mini_batches(samples)), temperature=temperature)


def make_updater(step: UpdateStepFn, *, roles: Collection[ScoredRole] = (), **changes) -> InOrder:
    arguments = {"num_mini_batches": 1, "epochs": 1, "micro_batcher": FixedRowBatcher(4, trim_tail=False)}
    return InOrder(step, make_mesh(), pack=PolicyBatchPacker(token_mean, roles), **(arguments | changes))


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


COUNT: Any = 0
"""State of a `Tape` before its first update."""


class Tape:
    """A step that learns nothing; its state is a count, and it records its batches."""

    def __init__(self):
        self.updates: list[Sequence[PolicyBatch]] = []

    def __call__(
        self, state: Any, batches: Sequence[PolicyBatch], temperature: Any, frozen: Any
    ) -> tuple[Any, dict[str, Any]]:
        self.updates.append(batches)
        metrics = {"loss": jnp.float32(state), "policy/ratio_max": jnp.float32(10 - state), "rollout/x": state}
        return state + 1, metrics

    @property
    def targets(self) -> list[list[int]]:
        """Returns the completion tokens of every update."""
        return [
            [token for b in update for token in np.asarray(b.tokens.targets)[np.asarray(b.tokens.loss_mask)].tolist()]
            for update in self.updates
        ]


def tokens_of(samples) -> list[int]:
    return [int(token) for s in samples for token in s.completion_ids]


def test_every_epoch_goes_over_every_mini_batch_in_the_same_order():
    tape = Tape()
    state, metrics = make_updater(tape, num_mini_batches=2, epochs=3).update(COUNT, SAMPLES, temperature=1.0)
    assert state == 6
    first, second = SAMPLES[:2] + SAMPLES[4:6], SAMPLES[2:4] + SAMPLES[6:]
    assert tape.targets == [tokens_of(first), tokens_of(second)] * 3
    assert len({batch.tokens.token_ids.shape for update in tape.updates for batch in update}) == 1
    assert metrics["loss"] == pytest.approx(2.5)
    assert metrics["policy/ratio_max"] == 10.0
    assert metrics["rollout/x"] == 0.0


def test_each_mini_batch_has_denominators_of_its_own():
    tape = Tape()
    make_updater(tape, num_mini_batches=2).update(COUNT, SAMPLES, temperature=1.0)
    for update in tape.updates:
        assert sum(float(np.sum(batch.loss_weights)) for batch in update) == pytest.approx(1.0)
        assert sum(float(np.sum(batch.token_weights)) for batch in update) == pytest.approx(1.0)


def test_logprobs_that_were_not_scored_are_not_sent():
    tape = Tape()
    unscored = [replace(s, policy_logprobs=None, reference_logprobs=None) for s in SAMPLES]
    make_updater(tape).update(COUNT, unscored, temperature=1.0)
    assert tape.updates[0][0].policy_logprobs is None
    assert tape.updates[0][0].reference_logprobs is None


def test_each_mini_batch_has_whole_groups_one_of_every_block():
    ids = [7, -1, 7, 30, -1, 7, 5, 5, 2]
    samples = [make_sample([i], group_id=group, sample_index=i) for i, group in enumerate(ids)]
    # Groups in the order they came: 7, -1, 30, 5, 2.
    assert [part.tolist() for part in split_by_group(samples, 2)] == [[0, 2, 5, 3, 8], [1, 4, 6, 7]]
    assert [part.tolist() for part in split_by_group(samples, 5)] == [
        [0, 2, 5], [1, 4], [3], [6, 7], [8],
    ]  # fmt: skip


def test_a_step_summarises_its_updates():
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


def test_fill_is_the_share_of_real_tokens():
    tape = Tape()
    samples = [make_sample([0] * 3, prompt_ids=[1] * 5), make_sample([0] * 2, prompt_ids=[1] * 2)]
    samples = [replace(s, advantages=np.zeros(len(s.completion_ids), np.float32)) for s in samples]
    _, metrics = make_updater(tape).update(COUNT, samples, temperature=1.0)
    # Two rows of 16 tokens hold 8 and 4 real ones.
    assert metrics["batching/fill"] == pytest.approx(12 / 32)


def test_one_update_has_a_ratio_of_exactly_one_without_a_scoring_pass():
    unscored = [replace(s, policy_logprobs=None, reference_logprobs=None) for s in SAMPLES]
    state, metrics = make_updater(real_step()).update(fresh_state(), unscored, temperature=1.3)
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


def test_at_the_first_of_several_updates_the_ratio_is_one_within_rounding(scored):
    updater = make_updater(real_step(), roles=["policy"])
    _, metrics = updater.update(fresh_state(), scored, temperature=1.3)
    assert abs(metrics["policy/ratio_max"] - 1) <= 1e-5
    # The same weights, so the sampler's logprobs differ from the update's by as little, in both directions.
    assert metrics["rollout/sampler_scorer_logprob_diff_max"] <= 1e-5


def test_scorer_and_update_share_one_plan_of_packed_rows_and_every_mini_batch_starts_at_ratio_one():
    """Nothing is learned, so every mini-batch is like the first."""
    optimizer = make_optimizer(OptimizerSettings(), optax.constant_schedule(0.0))
    objective = make_policy_objective(DEFINITION, PLAIN_LOSS, dtype=FLOAT32, remat="none", logits_chunk=6)
    step = UpdateStep(objective, optimizer, optax.constant_schedule(0.0), shardings())
    budget = TokenBudget(16, 16, share_prompts=True, balance=True)
    cut = PackedRowBatcher(budget, forward_flops(ODD))
    updater, state = make_updater(step, micro_batcher=cut, roles=["policy"], num_mini_batches=3), fresh_state()
    scored = []
    ((*parts,),) = select_samples(SIX_GROUPS, [split_by_group(SIX_GROUPS, 3)])
    for part in parts:
        plan = cut(part, updater.mesh).local_plan
        assert plan.num_micro_batches > 1
        logprobs = scorer().per_token(state.params, part, plan, temperature=1.3)
        scored += [replace(s, policy_logprobs=x, behavior_logprobs=x) for s, x in zip(part, logprobs, strict=True)]
    _, metrics = updater.update(state, scored, temperature=1.3)
    assert abs(metrics["policy/ratio_max"] - 1) <= 1e-5
    assert metrics["batching/num_micro_batches"] >= 6


def test_a_host_without_samples_feeds_rows_of_the_same_kind():
    tape = Tape()
    make_updater(tape, roles=["policy", "reference"]).update(COUNT, [], temperature=1.0)
    (batch,) = tape.updates[0]
    assert not np.asarray(batch.tokens.loss_mask).any()
    assert batch.policy_logprobs is not None and batch.reference_logprobs is not None


def test_several_updates_move_the_ratio_and_compile_once(scored):
    updater = make_updater(real_step(), roles=["policy"], num_mini_batches=2, epochs=2)
    state, metrics = updater.update(fresh_state(), scored, temperature=1.3)
    assert int(state.num_updates) == 4
    assert metrics["policy/ratio_max"] > 1.01
    assert metrics["rollout/sampler_scorer_logprob_diff_max"] <= 1e-5
    compilations = CompilationCounter()
    updater.update(state, scored, temperature=0.7)
    assert compilations.take_count() == 0


def test_steps_of_random_lengths_compile_each_row_shape_once():
    step = real_step()
    budget = TokenBudget(64, 32, share_prompts=True, balance=True)
    updater = make_updater(step, micro_batcher=PackedRowBatcher(budget, forward_flops(ODD)))

    def shapes_of(samples: Sequence[Sample]) -> set:
        return {
            (len(one.rows), one.shape) for one in updater.micro_batcher(samples, updater.mesh).local_plan.micro_batches
        }

    state, warm = fresh_state(), shapes_of(steps_samples(0))
    for _ in range(2):
        state, _ = updater.update(state, steps_samples(0), temperature=1.0)
    seen = set(warm)
    with closing(CompilationCounter()) as compilations:
        for seed in range(200):
            samples = steps_samples(seed)
            seen |= shapes_of(samples)
            state, _ = updater.update(state, samples, temperature=1.0)
        assert compilations.take_count() == len(seen - warm)
    assert len(seen) <= 16


def steps_samples(seed: int) -> list[Sample]:
    samples = random_samples(seed % 6 + 2, 3, vocab_size=ODD.vocab_size, seed=seed)
    return [replace(s, policy_logprobs=None, reference_logprobs=None) for s in samples]


def test_updates_raise_the_logprobs_of_rewarded_samples_and_lower_those_of_the_others(scored):
    params = random_params(DEFINITION)
    signed = [
        replace(s, advantages=np.full(len(s.completion_ids), 1.0 if s.sample_index else -1.0, np.float32))
        for s in scored
    ]
    state, _ = make_updater(real_step(), roles=["policy"], epochs=2).update(fresh_state(), signed, temperature=1.3)
    gains = []
    for before, after in zip(
        scorer().per_token(params, signed, THREES, temperature=1.3),
        scorer().per_token(state.params, signed, THREES, temperature=1.3),
        strict=True,
    ):
        gains.append(float(np.sum(after - before)))
    assert min(gains[1::2]) > 0 > max(gains[::2])
