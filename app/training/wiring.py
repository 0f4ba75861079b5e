"""Where settings choose functions: once, at start-up. Rooms never see a settings object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax

from app.advantage.group import credit_by_group
from app.flow import Sample
from app.mesh.placement import num_local_row_shards
from app.policy.decoder import DecoderDefinition
from app.training.metrics import Work
from app.training.session import Session
from app.update.aggregation import AGGREGATIONS
from app.update.kl import ESTIMATORS
from app.update.objective import make_objective, own_logprobs, scored_logprobs
from app.update.optimizer import TrainState, make_optimizer, make_schedule, state_shardings
from app.update.step import make_update_step
from app.update.updater import Updater
from settings import Settings
from settings.errors import InputError

ADVANTAGES: Mapping[str, Callable[[Sequence[Sample]], list[Sample]]] = MappingProxyType({"grpo": credit_by_group})
"""`algorithm.name` -> how samples get their credit."""


@dataclass(frozen=True)
class Learning:
    """The update room, wired for one run."""

    credit: Callable[[Sequence[Sample]], list[Sample]]
    updater: Updater
    optimizer: optax.GradientTransformation
    shapes: TrainState
    shardings: TrainState
    several_updates: bool
    """More than one optimizer step per rollout: the policy must be scored before the first."""


def wire_learning(settings: Settings, session: Session) -> Learning:
    """Objective, optimizer and compiled update step of `algorithm.*` and `optimizer.*`."""
    algorithm, model, definition = settings.algorithm, settings.model, session.input.definition
    several = "policy" in settings.scored_roles
    schedule = make_schedule(settings.optimizer, num_updates=settings.run.steps * settings.updates_per_step)
    optimizer = make_optimizer(settings.optimizer, schedule)
    shardings = state_shardings(optimizer, definition.shapes, definition.shardings(session.mesh), session.mesh)
    counter: Any = jax.ShapeDtypeStruct((), jnp.int32)
    shapes = TrainState(definition.shapes, jax.eval_shape(optimizer.init, definition.shapes), counter, counter, counter)
    objective = make_objective(
        definition,
        proximal=scored_logprobs if several else own_logprobs,
        kl_estimator=ESTIMATORS[algorithm.kl_estimator],
        beta=algorithm.beta,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dtype=jnp.dtype(model.dtype),
        remat=model.remat,
        logits_chunk=model.logits_chunk,
    )
    updater = Updater(
        make_update_step(objective, optimizer, schedule, shardings),
        session.mesh,
        aggregation=AGGREGATIONS[algorithm.loss_aggregation],
        num_mini_batches=settings.num_mini_batches,
        epochs=algorithm.epochs,
        rows_per_device=algorithm.rows_per_device,
    )
    return Learning(ADVANTAGES[algorithm.name], updater, optimizer, shapes, shardings, several)


def work_of(settings: Settings, definition: DecoderDefinition) -> Work:
    """What a step's tokens go through."""
    return Work(
        num_parameters=definition.num_parameters,
        group_size=settings.rollout.group_size,
        scoring_passes=len(settings.scored_roles),
        epochs=settings.algorithm.epochs,
    )


def check_rows(settings: Settings, session: Session) -> None:
    """Raises InputError where a host's samples do not fill its devices evenly; names the nearest counts that do."""
    devices = num_local_row_shards(session.mesh)
    group_size = settings.rollout.group_size
    for field, prompts in (
        ("rollout.prompts_per_step", settings.rollout.prompts_per_step),
        ("algorithm.mini_batch_prompts", settings.rollout.prompts_per_step // settings.num_mini_batches),
    ):
        if prompts * group_size % devices != 0:
            fitting = [n for n in range(1, prompts + devices + 1) if n * group_size % devices == 0]
            below = [n for n in fitting if n < prompts][-1:]
            above = [n for n in fitting if n > prompts][:1]
            raise InputError(
                f"{field}: {prompts} prompts x rollout.group_size {group_size} = {prompts * group_size} samples do not "
                f"divide over the {devices} devices of a host (mesh.shape {settings.mesh.shape}); the nearest values "
                f"of {field} that fit: {' or '.join(map(str, below + above))}"
            )
