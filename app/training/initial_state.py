"""What a run starts from: its directory's newest checkpoint, or the models' own weights."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from app.checkpoint.checkpoints import Checkpoints, TrainProgress
from app.checkpoint.policy_checkpoint import PolicyCheckpoint
from app.checkpoint.retention import LatestAndBestPolicy
from app.checkpoint.run_state import RunState
from app.mesh.placement import to_host_memory
from app.model.decoder import Params
from app.runtime.pinned_revisions import record_commits
from app.runtime.reward_model import RewardModel
from app.runtime.session import Session
from app.tracking.run_log import NullRunLog, RunLog
from app.training.learner import LearnerGroup
from app.training.setup import RunSetup
from app.update.optimizer import TrainState


def open_checkpoints(setup: RunSetup, learner_group: LearnerGroup) -> Checkpoints:
    settings = setup.resolved.settings.checkpoint
    policy = LatestAndBestPolicy(settings.keep, settings.best_metric, settings.best_mode)
    return Checkpoints(
        setup.run.checkpoints_dir, policy=policy, shapes=learner_group.shapes, shardings=learner_group.shardings
    )


def restore_or_initialize(
    checkpoints: Checkpoints, setup: RunSetup, learner_group: LearnerGroup
) -> tuple[RunState, TrainProgress]:
    """The newest good checkpoint's state, that of --checkpoint, or the models' own weights with fresh moments."""
    algorithm = setup.resolved.settings.algorithm
    # Loaded now: in the first step it would count as that step's time and compilations.
    _ = setup.session.frozen_params
    replay = setup.inputs.replay
    per_step = setup.resolved.settings.rollout.prompts_per_step * jax.process_count()
    fingerprints = {**setup.inputs.fingerprints, "rollout.prompts_per_step over all hosts": str(per_step)}
    restored = checkpoints.restore(fingerprints)
    if restored is not None:
        arrays, progress = restored
        if setup.session.workers is not None:
            setup.session.workers.length_history = progress.lengths or {}
        adapted = progress.kl_coef if algorithm.kl_target is not None else None
        return RunState.from_arrays(arrays, kl_coef=algorithm.beta if adapted is None else adapted), progress
    if replay is not None and replay.initial_checkpoint is not None:
        return _state_from_checkpoint(replay.initial_checkpoint, setup, learner_group, fingerprints)
    policy = learner_group.policy.initial_state(setup.session.initial_trained_params())
    state = RunState(policy, _initial_critic_state(setup.session, learner_group), kl_coef=algorithm.beta)
    return state, TrainProgress(step=0, position=0, fingerprints=fingerprints)


def _initial_critic_state(session: Session, learner_group: LearnerGroup) -> TrainState | None:
    if session.critic is None:
        return None
    assert learner_group.critic is not None
    return learner_group.critic.initial_state(session.critic.load_params(session.mesh))


def _state_from_checkpoint(
    checkpoint: PolicyCheckpoint, setup: RunSetup, learner_group: LearnerGroup, fingerprints: Mapping[str, str]
) -> tuple[RunState, TrainProgress]:
    """The state of --checkpoint; a critic that it does not have begins with it."""
    algorithm = setup.resolved.settings.algorithm
    learners = {"policy": learner_group.policy, **({"critic": learner_group.critic} if learner_group.critic else {})}
    found = checkpoint.restore_states(
        {name: learner.shapes for name, learner in learners.items()},
        {name: learner.shardings for name, learner in learners.items()},
    )
    critic = found["critic"] if "critic" in found else _initial_critic_state(setup.session, learner_group)
    adapted = checkpoint.progress.kl_coef if algorithm.kl_target is not None else None
    state = RunState(found["policy"], critic, kl_coef=algorithm.beta if adapted is None else adapted)
    return state, TrainProgress(step=checkpoint.step, position=checkpoint.progress.position, fingerprints=fingerprints)


def open_run_log(setup: RunSetup, progress: TrainProgress, *, resumed: bool) -> RunLog | NullRunLog:
    """The run directory from here on tells of this run, or goes on to."""
    if jax.process_index() != 0:
        return NullRunLog()
    setup.run.write_settings(setup.resolved)
    record_commits(setup.run, setup.resolved.settings, setup.inputs.model_commits)
    # The line of a step whose evaluation is still to come is written after it; that of step 0 always is.
    is_to_come = progress.step == 0 or progress.unevaluated is not None
    last_step = progress.step - is_to_come if resumed else None
    replay = setup.inputs.replay
    session = ({} if resumed else {"after_step": progress.step}) | (replay.session_fields if replay else {})
    return RunLog(setup.run, setup.resolved, last_step=last_step, wandb_id=progress.wandb_id, session_fields=session)


def load_reference_params(state: RunState, progress: TrainProgress, session: Session) -> Params | None:
    """The weights of `model.path`: a fresh state still holds them, a restored one has moved on.

    With adapters they are those that stay as they are, quantized or not, and there is no second copy.
    """
    if "reference" not in session.settings.scored_roles:
        return None
    if session.model_spec.policy_definition.lora is not None:
        return session.frozen_params
    if session.settings.offloads_reference:
        return to_host_memory(session.load_params() if progress.step else state.policy.params)
    return session.load_params() if progress.step else jax.tree.map(jnp.copy, state.policy.params)


def load_reward_model(setup: RunSetup) -> RewardModel | None:
    model = setup.inputs.reward_model
    return None if model is None else RewardModel.load(setup.resolved.settings, model, setup.session.mesh)
