"""Builds the updates of policy and critic from the settings, once at start-up."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from app.advantage.custom_estimator import CustomEstimator
from app.batching.micro_batch_shapes import bucket_length
from app.batching.micro_batcher import MicroBatcher, PackedRowBatcher
from app.batching.packing_metrics import critic_batching_metrics, policy_batching_metrics
from app.checkpoint.train_progress import NetworkStates, RunState
from app.mesh.placement import abstract_arrays
from app.model.architecture import Architecture
from app.model.decoder import DecoderDefinition, Params
from app.records.sample import Sample
from app.runtime.advantages import AdvantageEstimator, make_advantage_estimator, make_kl_estimator
from app.runtime.micro_batching import MaxLengths, make_batcher, make_score_batcher, num_bootstrap_tokens
from app.runtime.model_spec import NetworkSpec
from app.runtime.reward_model import make_reward_batcher
from app.runtime.scoring import CriticModel, ScoringSession
from app.training.dynamic_sampling import GroupFilter, StepGroups, keeps_all, rewards_differ
from app.update.loss_aggregation import AggregationFn, StepTotals, aggregations
from app.update.mini_batches import (
    MiniBatchIndices,
    MiniBatchSplitter,
    repeated_mini_batches,
    select_samples,
    shuffled_mini_batches,
)
from app.update.optimizer import (
    TrainState,
    init_train_state,
    make_optimizer,
    make_schedule,
    train_state_shardings,
    update_at_once,
    update_by_layer,
)
from app.update.policy_loss import (
    KL_METRIC,
    SURROGATES,
    TEACHER_KL_METRIC,
    CrossEntropyLoss,
    PolicyLoss,
    SurrogateFn,
    dual_clipped_surrogate,
    make_policy_objective,
)
from app.update.ratios import LOG_RATIOS, LOG_WEIGHTS, ImportanceCorrection, mask_weights, truncate_weights
from app.update.step import POLICY_METRICS, VALUE_METRICS, MetricNames, UpdateStep
from app.update.updater import BatchingMetricsFn, BatchPacker, PolicyBatchPacker, Updater
from app.update.value_loss import (
    ValueBatchPacker,
    clipped_squared_error,
    make_value_objective,
    squared_error,
)
from settings import Settings
from settings.schema.algorithm import AlgorithmSettings, OptimizerSettings, ScoredRole
from settings.schema.reward import OVERLONG_REWARD


@dataclass(frozen=True)
class Learner:
    """Updates one network with its optimizer."""

    update_step: UpdateStep
    updater: Updater
    optimizer: optax.GradientTransformation
    layout: TrainState
    """Shapes and shardings of the training state."""
    frozen_layout: Params
    """Shapes and shardings of the network's frozen weights."""

    def initial_state(self, params: Params) -> TrainState:
        """Returns a training state with these weights, zero moments and step counters of 0."""
        return init_train_state(self.optimizer, params, jax.tree.map(lambda x: x.sharding, self.layout))

    def null_metrics(self, params: Params, frozen: Params) -> dict[str, None]:
        """Returns the metric names of a step's updates, mapped to None. All hosts must call it together."""
        updater = self.updater
        plan = updater.micro_batcher([], updater.mesh)
        batch = updater.pack([], plan.local_plan.micro_batches[0], StepTotals(num_tokens=0, num_samples=0))
        with jax.set_mesh(updater.mesh):
            names = self.update_step.metric_names(params, batch, jnp.float32(1), frozen)
        return dict.fromkeys([*names, *updater.batching_metrics([plan])])


@dataclass(frozen=True)
class LearnerGroup:
    """The advantage estimator, the group filter and the learners of policy and critic of a run."""

    session: ScoringSession
    estimator: AdvantageEstimator | None
    """The advantage estimator; None if the completions come from the data (`algorithm.name: sft`)."""
    group_filter: GroupFilter
    """Decides which groups a step keeps for training."""
    max_rounds: int
    """Maximum number of rollout rounds per step; 1 without a filter."""
    score_batchers: Mapping[ScoredRole, MicroBatcher]
    """Maps each role to the micro-batcher of its scoring pass."""
    mini_batch_sampler: MiniBatchSplitter
    policy: Learner
    critic: Learner | None

    @property
    def advantage_estimator(self) -> AdvantageEstimator:
        """The estimator; fails an assertion if the completions come from the data."""
        assert self.estimator is not None
        return self.estimator

    @property
    def networks(self) -> dict[str, Learner]:
        return {"policy": self.policy} if self.critic is None else {"policy": self.policy, "critic": self.critic}

    def new_groups(self) -> StepGroups:
        num_groups = self.session.settings.rollout.prompts_per_step
        return StepGroups(group_filter=self.group_filter, num_groups=num_groups, max_rounds=self.max_rounds)

    def trains_policy(self, step: int) -> bool:
        """Returns whether a step updates the policy; False in the first `critic.warmup_steps` steps."""
        return self.critic is None or step > self.session.settings.critic.warmup_steps

    def update(
        self, state: RunState, samples: list[Sample], mini_batches: MiniBatchIndices, *, step: int, kl_coef: float
    ) -> tuple[RunState, dict[str, float | None]]:
        """Updates critic and policy on the same mini-batches; returns the new state and the metrics.

        During the critic's warm-up, policy and KL coefficient do not change, and the policy's metrics are None.

        Args:
            kl_coef: KL coefficient of the new state.
        """
        epochs, frozen = select_samples(samples, mini_batches), self.session.frozen_params
        settings, metrics = self.session.settings, dict[str, float | None]()
        temperature = 1.0 if settings.is_supervised else settings.rollout.temperature
        policy, critic = state.policy, state.critic
        if critic is not None:
            assert self.critic is not None
            critic, critic_metrics = self.critic.updater.update(critic, epochs, temperature=temperature)
            metrics |= critic_metrics
        if not self.trains_policy(step):
            metrics |= self.policy.null_metrics(policy.params, frozen)
            return dataclasses.replace(state, critic=critic), metrics
        updater = self.policy.updater
        policy, policy_metrics = updater.update(policy, epochs, temperature=temperature, frozen=frozen)
        return RunState(policy, critic, kl_coef), metrics | policy_metrics

    @property
    def layout(self) -> NetworkStates:
        """Shapes and shardings of the arrays in a checkpoint, for each network; see `RunState.networks`."""
        return {name: learner.layout for name, learner in self.networks.items()}


def make_learner_group(session: ScoringSession, custom: CustomEstimator | None = None) -> LearnerGroup:
    """Builds the advantage estimator and the learners; `custom` is the plug-in of `algorithm.estimator`, if any."""
    settings = session.settings
    assert settings.algorithm.filter is not None
    longest = MaxLengths.from_settings(settings)
    cuts: dict[ScoredRole, MicroBatcher] = {
        role: make_score_batcher(settings, role, session.architecture_of(role), longest)
        for role in settings.scored_roles
    }
    estimator = None if settings.is_supervised else make_advantage_estimator(settings, custom)
    sizes = {"num_mini_batches": settings.num_mini_batches, "epochs": settings.algorithm.epochs}
    split = functools.partial(repeated_mini_batches, **sizes)
    if settings.algorithm.shuffle:
        split = functools.partial(shuffled_mini_batches, seed=settings.run.seed, **sizes)
    return LearnerGroup(
        session,
        estimator,
        keeps_all if estimator is None else make_group_filter(settings, estimator),
        1 if settings.algorithm.filter == "none" else settings.algorithm.max_rounds,
        cuts,
        split,
        make_policy_learner(session, longest),
        None if session.critic is None else make_critic_learner(settings, session.critic, session.mesh, longest),
    )


def make_group_filter(settings: Settings, estimator: AdvantageEstimator) -> GroupFilter:
    """Returns the filter of `algorithm.filter`, which compares only samples that take part in the loss."""
    if settings.algorithm.filter == "none":
        return keeps_all
    parts = settings.compared_parts.keys() - {OVERLONG_REWARD}
    return lambda group: rewards_differ([*filter(estimator.learns_from, group)], parts=parts)


def longest_rows(
    session: ScoringSession, learning: LearnerGroup, reward_model: NetworkSpec | None
) -> list[tuple[Architecture, int]]:
    """Returns each network that a run updates or scores with, and the maximum number of tokens in a row.

    Conversations of a reward model are assumed to be no longer than samples unless rows have a token quota.
    """
    settings, longest = session.settings, MaxLengths.from_settings(session.settings).sample
    updated: Any = {role: learner.updater.micro_batcher for role, learner in learning.networks.items()}
    passes = [(session.architecture_of(role), batcher, longest) for role, batcher in updated.items()]
    for role, batcher in learning.score_batchers.items():
        passes.append((session.architecture_of(role), batcher, longest + num_bootstrap_tokens(settings, role)))
    if reward_model is not None:
        network = reward_model.architecture
        passes.append((network, make_reward_batcher(settings, network), longest + 1))
    return [
        (network, batcher.budget.row_length if isinstance(batcher, PackedRowBatcher) else bucket_length(num_tokens))
        for network, batcher, num_tokens in passes
    ]


def make_policy_learner(session: ScoringSession, max_lengths: MaxLengths) -> Learner:
    """Builds the learner of the policy, for reinforcement learning or supervised training."""
    settings, definition = session.settings, session.model_spec.policy_definition
    algorithm, model = settings.algorithm, settings.model
    assert algorithm.loss_aggregation is not None
    aggregation = aggregations(max_new_tokens=settings.rollout.max_new_tokens)[algorithm.loss_aggregation]
    loss = CrossEntropyLoss()
    if not settings.is_supervised:
        loss = make_policy_loss(algorithm, has_teacher=session.teacher is not None)
    pack = make_policy_packer(session, aggregation)
    objective = make_policy_objective(
        definition, loss, dtype=jnp.dtype(model.dtype), remat=model.remat, logits_chunk=model.logits_chunk
    )
    schedule = make_schedule(settings.optimizer, num_updates=settings.num_policy_updates)
    batcher = make_batcher(settings, algorithm, session.model_spec.architecture, max_lengths)
    names = POLICY_METRICS, policy_batching_metrics
    return _make_learner(settings.optimizer, schedule, definition, session.mesh, objective, batcher, pack, *names)


def make_policy_packer(session: ScoringSession, aggregation: AggregationFn) -> PolicyBatchPacker:
    """Returns the function that packs the arrays which the policy's loss reads."""
    settings, algorithm = session.settings, session.settings.algorithm
    # The scored logprobs of the proximal policy, and of the reference for any KL.
    is_in_loss = {"policy": settings.updates_per_step > 1, "reference": algorithm.beta > 0, "critic": False}
    # Whether the loss of a token depends on other tokens of its sample.
    corrects_samples = algorithm.correction_level != "token" or algorithm.correction_veto != 0
    reads_samples = algorithm.ratio_level == "sequence" or (algorithm.correction != "none" and corrects_samples)
    return PolicyBatchPacker(
        aggregation=aggregation,
        roles=[role for role in settings.scored_roles if is_in_loss[role]],
        needs_sample_reducer=reads_samples,
        measures_mismatch=not settings.is_supervised and "policy" not in settings.scored_roles,
        route_shape=None if settings.is_supervised else session.route_shape,
    )


def make_critic_learner(settings: Settings, critic: CriticModel, mesh: Mesh, max_lengths: MaxLengths) -> Learner:
    """Builds the learner of the critic, whose loss is the squared error, optionally clipped, of its values."""
    definition = critic.spec.definition
    clip_range = settings.critic.clip_range
    errors = squared_error if clip_range is None else functools.partial(clipped_squared_error, clip_range=clip_range)
    objective = make_value_objective(
        definition, errors, dtype=jnp.dtype(settings.model.dtype), remat=settings.model.remat
    )
    optimizer = settings.optimizer.model_copy(update={"learning_rate": settings.critic.learning_rate})
    schedule = make_schedule(optimizer, num_updates=settings.run.steps * settings.updates_per_step)
    batcher = make_batcher(settings, settings.critic, critic.spec.architecture, max_lengths)
    names = VALUE_METRICS, critic_batching_metrics
    return _make_learner(optimizer, schedule, definition, mesh, objective, batcher, ValueBatchPacker(), *names)


def _make_learner(
    settings: OptimizerSettings,
    schedule: optax.Schedule,
    definition: DecoderDefinition,
    mesh: Mesh,
    objective: Callable[..., Any],
    batcher: MicroBatcher,
    pack: BatchPacker,
    metric_names: MetricNames,
    batching_metrics_fn: BatchingMetricsFn,
) -> Learner:
    optimizer = make_optimizer(settings, schedule)
    params, param_shardings = definition.trainable(definition.shapes), definition.trainable(definition.shardings(mesh))
    shardings = train_state_shardings(optimizer, params, param_shardings, mesh, offload=settings.offload)
    counter: Any = jax.ShapeDtypeStruct((), jnp.int32)
    shapes = TrainState(params, jax.eval_shape(optimizer.init, params), counter, counter, counter)
    frozen = definition.frozen(abstract_arrays(definition.shapes, definition.shardings(mesh)))
    run_update = update_by_layer if settings.offload else update_at_once
    step = UpdateStep(objective, optimizer, schedule, shardings, metrics=metric_names, run_update=run_update)
    updater = Updater(step, mesh, micro_batcher=batcher, pack=pack, batching_metrics=batching_metrics_fn)
    return Learner(step, updater, optimizer, abstract_arrays(shapes, shardings), frozen)


def make_policy_loss(algorithm: AlgorithmSettings, *, has_teacher: bool = False) -> PolicyLoss:
    """Builds the policy's loss per token, before aggregation."""
    assert algorithm.ratio_level is not None
    return PolicyLoss(
        surrogate=make_surrogate(algorithm),
        kl_estimator=make_kl_estimator(algorithm) if algorithm.beta > 0 else None,
        beta=0.0 if algorithm.penalizes_samples else algorithm.beta,
        entropy_coef=algorithm.entropy_coef,
        kl_metric=TEACHER_KL_METRIC if has_teacher else KL_METRIC,
        log_ratio=LOG_RATIOS[algorithm.ratio_level],
        correction=make_correction(algorithm),
    )


def make_correction(algorithm: AlgorithmSettings) -> ImportanceCorrection | None:
    """Builds the importance correction of off-policy tokens; None if `algorithm.correction` is `none`."""
    if algorithm.correction == "none":
        return None
    assert algorithm.correction_level is not None and algorithm.correction_veto is not None
    bounds: dict[str | None, Any] = {
        "truncate": functools.partial(truncate_weights, max_weight=algorithm.correction_max),
        "mask": functools.partial(
            mask_weights, min_weight=algorithm.correction_min, max_weight=algorithm.correction_max
        ),
    }
    return ImportanceCorrection(
        LOG_WEIGHTS[algorithm.correction_level], bounds[algorithm.correction], veto=algorithm.correction_veto
    )


def make_surrogate(algorithm: AlgorithmSettings) -> SurrogateFn:
    """Builds the clipped surrogate; `algorithm.dual_clip` adds the second clip of dual-clip PPO."""
    assert algorithm.clip is not None and algorithm.clip_low is not None and algorithm.clip_high is not None
    clips = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high}
    if algorithm.dual_clip is None:
        return functools.partial(SURROGATES[algorithm.clip], **clips)
    return functools.partial(dual_clipped_surrogate, dual_clip=algorithm.dual_clip, **clips)
