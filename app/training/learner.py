"""Where settings choose functions: once, at start-up. Rooms never see a settings object."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from app.batching.metrics import critic_update_metrics, update_metrics
from app.batching.micro_batcher import Cutter
from app.checkpoint.run_state import arrays_of
from app.mesh.placement import abstract
from app.model.decoder import DecoderDefinition, Params
from app.runtime.advantages import Crediting, wire_crediting, wire_kl
from app.runtime.micro_batching import Longest, wire_role, wire_update
from app.runtime.session import Critic, Session
from app.training.dynamic_sampling import Filter, keeps_all, rewards_differ
from app.update.importance_correction import (
    Bound,
    Correction,
    LogWeight,
    geometric_log_weight,
    masked,
    sequence_log_weight,
    token_log_weight,
    truncated,
)
from app.update.loss_aggregation import Totals, aggregations
from app.update.mini_batches import MiniBatches, in_order, shuffled
from app.update.optimizer import TrainState, initial_state, make_optimizer, make_schedule, state_shardings
from app.update.policy_loss import PolicyLoss, make_objective, own_logprobs, scored_logprobs
from app.update.ratio import LogRatio, sequence_log_ratio, token_log_ratio
from app.update.step import POLICY_METRICS, VALUE_METRICS, MetricNames, UpdateStep
from app.update.surrogate import Surrogate, SurrogateLoss, cispo_surrogate, clipped_surrogate, dual_clipped_surrogate
from app.update.updater import CutMetrics, Pack, PolicyPack, Updater
from app.update.value_loss import (
    ValueLoss,
    clipped_squared_error,
    make_value_objective,
    pack_values,
    squared_error,
)
from settings import Settings
from settings.schema.optimizer import Optimizer
from settings.schema.settings import Algorithm, ScoredRole
from settings.schema.settings import Critic as CriticSettings

LOG_RATIOS: Mapping[str, LogRatio] = MappingProxyType({"token": token_log_ratio, "sequence": sequence_log_ratio})
"""By `algorithm.ratio_level`."""
SURROGATES: Mapping[str, Callable[..., Surrogate]] = MappingProxyType(
    {"ppo": clipped_surrogate, "cispo": cispo_surrogate}
)
"""By `algorithm.clip`."""
LOG_WEIGHTS: Mapping[str, LogWeight] = MappingProxyType(
    {"token": token_log_weight, "sequence": sequence_log_weight, "geometric": geometric_log_weight}
)
"""By `algorithm.correction_level`."""
FILTERS: Mapping[str, Filter] = MappingProxyType({"none": keeps_all, "zero_variance": rewards_differ})
"""By `algorithm.filter`."""


@dataclass(frozen=True)
class Learner:
    """The update room, wired for one network."""

    step: UpdateStep
    updater: Updater
    optimizer: optax.GradientTransformation
    shapes: TrainState
    shardings: TrainState
    frozen: Params
    """Shapes, on their shardings, of the network's weights beside those that learn."""

    def initial_state(self, params: Params) -> TrainState:
        """Fresh moments beside these weights."""
        return initial_state(self.optimizer, params, self.shardings)

    def unmeasured(self, params: Params, frozen: Params) -> dict[str, None]:
        """What the updates of a step would have measured. Every host asks."""
        updater = self.updater
        cut = updater.cut([], updater.mesh)
        batch = updater.pack([], cut.own.micro_batches[0], Totals(num_tokens=0, num_samples=0))
        with jax.set_mesh(updater.mesh):
            names = self.step.metric_names(params, batch, jnp.float32(1), frozen)
        return dict.fromkeys([*names, *updater.cut_metrics([cut])])


@dataclass(frozen=True)
class Learning:
    """Credit and updates, wired for one run."""

    credit: Crediting
    keep: Filter
    """Which groups a step learns from."""
    max_rounds: int
    """Rollouts of a step, while too few groups are kept; 1 without a filter."""
    cuts: Mapping[ScoredRole, Cutter]
    """How the samples that a role scores are cut."""
    mini_batches: MiniBatches
    policy: Learner
    critic: Learner | None

    @property
    def shapes(self) -> Any:
        """Of what a checkpoint holds; see `RunState.arrays`."""
        return arrays_of(self.policy.shapes, self.critic and self.critic.shapes)

    @property
    def shardings(self) -> Any:
        return arrays_of(self.policy.shardings, self.critic and self.critic.shardings)


def wire_learning(settings: Settings, session: Session) -> Learning:
    """Everything of `algorithm.*`, `critic.*` and `optimizer.*`."""
    assert settings.algorithm.filter is not None
    longest = Longest.of(settings)
    cuts: dict[ScoredRole, Cutter] = {
        role: wire_role(settings, role, session.architecture_of(role), longest) for role in settings.scored_roles
    }
    return Learning(
        wire_crediting(settings),
        FILTERS[settings.algorithm.filter],
        1 if settings.algorithm.filter == "none" else settings.algorithm.max_rounds,
        cuts,
        wire_mini_batches(settings),
        wire_policy(settings, session, longest),
        None if session.critic is None else wire_critic(settings, session.critic, session.mesh, longest),
    )


def wire_policy(settings: Settings, session: Session, longest: Longest) -> Learner:
    """The policy's objective, optimizer and compiled update step."""
    algorithm, model, definition = settings.algorithm, settings.model, session.input.adapted
    assert algorithm.loss_aggregation is not None
    objective = make_objective(
        definition,
        wire_loss(algorithm, several_updates=settings.updates_per_step > 1),
        dtype=jnp.dtype(model.dtype),
        remat=model.remat,
        logits_chunk=model.logits_chunk,
    )
    pack = PolicyPack(
        aggregation=aggregations(max_new_tokens=settings.rollout.max_new_tokens)[algorithm.loss_aggregation],
        roles=_roles_in_loss(settings),
        reads_sample_means=_reads_samples(algorithm),
    )
    schedule = make_schedule(settings.optimizer, num_updates=settings.policy_updates)
    cut = wire_update(settings, algorithm, session.input.architecture, longest)
    names = POLICY_METRICS, update_metrics
    return _learner(settings.optimizer, schedule, definition, session.mesh, objective, cut, pack, *names)


def wire_critic(settings: Settings, critic: Critic, mesh: Mesh, longest: Longest) -> Learner:
    """The critic's; it learns in every step."""
    definition = critic.input.definition
    objective = make_value_objective(
        definition,
        wire_value_loss(settings.critic),
        dtype=jnp.dtype(settings.model.dtype),
        remat=settings.model.remat,
    )
    optimizer = settings.optimizer.model_copy(update={"learning_rate": settings.critic.learning_rate})
    schedule = make_schedule(optimizer, num_updates=settings.run.steps * settings.updates_per_step)
    cut = wire_update(settings, settings.critic, critic.input.architecture, longest)
    names = VALUE_METRICS, critic_update_metrics
    return _learner(optimizer, schedule, definition, mesh, objective, cut, pack_values, *names)


def _learner(
    settings: Optimizer,
    schedule: optax.Schedule,
    definition: DecoderDefinition,
    mesh: Mesh,
    objective: Callable[..., Any],
    cut: Cutter,
    pack: Pack,
    metrics: MetricNames,
    cut_metrics: CutMetrics,
) -> Learner:
    optimizer = make_optimizer(settings, schedule)
    params, params_lie = definition.trained(definition.shapes), definition.trained(definition.shardings(mesh))
    shardings = state_shardings(optimizer, params, params_lie, mesh)
    counter: Any = jax.ShapeDtypeStruct((), jnp.int32)
    shapes = TrainState(params, jax.eval_shape(optimizer.init, params), counter, counter, counter)
    frozen = definition.frozen(abstract(definition.shapes, definition.shardings(mesh)))
    step = UpdateStep(objective, optimizer, schedule, shardings, metrics=metrics)
    updater = Updater(step, mesh, cut=cut, pack=pack, cut_metrics=cut_metrics)
    return Learner(step, updater, optimizer, shapes, shardings, frozen)


def wire_value_loss(critic: CriticSettings) -> ValueLoss:
    """Clipped or not."""
    if critic.clip_range is None:
        return ValueLoss(squared_error)
    return ValueLoss(functools.partial(clipped_squared_error, clip_range=critic.clip_range))


def wire_mini_batches(settings: Settings) -> MiniBatches:
    """The same in every epoch, or drawn anew."""
    sizes = {"num_mini_batches": settings.num_mini_batches, "epochs": settings.algorithm.epochs}
    if settings.algorithm.shuffle:
        return functools.partial(shuffled, seed=settings.run.seed, **sizes)
    return functools.partial(in_order, **sizes)


def _roles_in_loss(settings: Settings) -> list[ScoredRole]:
    """Whose scored logprobs the loss reads: the policy's as the proximal ones, the reference's for any KL."""
    read = {"policy": settings.updates_per_step > 1, "reference": settings.algorithm.beta > 0, "critic": False}
    return [role for role in settings.scored_roles if read[role]]


def wire_loss(algorithm: Algorithm, *, several_updates: bool) -> PolicyLoss:
    """The loss of every token, before aggregation."""
    assert algorithm.ratio_level is not None
    return PolicyLoss(
        proximal=scored_logprobs if several_updates else own_logprobs,
        surrogate=wire_surrogate(algorithm),
        kl_estimator=wire_kl(algorithm) if algorithm.beta > 0 else None,
        beta=0.0 if algorithm.kl_in_reward else algorithm.beta,
        entropy_coef=algorithm.entropy_coef,
        log_ratio=LOG_RATIOS[algorithm.ratio_level],
        correction=wire_correction(algorithm),
    )


def wire_correction(algorithm: Algorithm) -> Correction | None:
    """What tokens of an older policy weigh; None where they are taken for the policy's own."""
    if algorithm.correction == "none":
        return None
    assert algorithm.correction_level is not None and algorithm.correction_veto is not None
    bounds: Mapping[str | None, Bound] = {
        "truncate": functools.partial(truncated, max_weight=algorithm.correction_max),
        "mask": functools.partial(masked, min_weight=algorithm.correction_min, max_weight=algorithm.correction_max),
    }
    return Correction(
        LOG_WEIGHTS[algorithm.correction_level], bounds[algorithm.correction], veto=algorithm.correction_veto
    )


def _reads_samples(algorithm: Algorithm) -> bool:
    """Whether the loss of a token depends on the others of its sample."""
    corrects_samples = algorithm.correction_level != "token" or algorithm.correction_veto != 0
    return algorithm.ratio_level == "sequence" or (algorithm.correction != "none" and corrects_samples)


def wire_surrogate(algorithm: Algorithm) -> SurrogateLoss:
    """One clip or two."""
    assert algorithm.clip is not None and algorithm.clip_low is not None and algorithm.clip_high is not None
    clips = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high}
    if algorithm.dual_clip is None:
        return functools.partial(SURROGATES[algorithm.clip], **clips)
    return functools.partial(dual_clipped_surrogate, dual_clip=algorithm.dual_clip, **clips)
