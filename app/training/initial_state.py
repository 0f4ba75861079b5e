"""What a run starts from: its directory's newest checkpoint, or the models' own weights."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from app.checkpoint.checkpoints import Checkpoints, Progress
from app.checkpoint.policy_checkpoint import SavedPolicy
from app.checkpoint.retention import NewestAndBest
from app.checkpoint.run_state import RunState
from app.mesh.placement import to_host_memory
from app.model.decoder import Params
from app.runtime.pinned_revisions import record_commits
from app.runtime.reward_model import RewardModel
from app.runtime.session import Session
from app.tracking.run_log import Journal, NoJournal
from app.training.learner import Learning
from app.training.setup import Launch
from app.update.optimizer import TrainState


def open_checkpoints(launch: Launch, learning: Learning) -> Checkpoints:
    settings = launch.resolved.settings.checkpoint
    policy = NewestAndBest(settings.keep, settings.best_metric, settings.best_mode)
    return Checkpoints(launch.run.checkpoints, policy=policy, shapes=learning.shapes, shardings=learning.shardings)


def open_state(checkpoints: Checkpoints, launch: Launch, learning: Learning) -> tuple[RunState, Progress]:
    """The newest good checkpoint's state, that of --checkpoint, or the models' own weights with fresh moments."""
    algorithm = launch.resolved.settings.algorithm
    # Loaded now: in the first step it would count as that step's time and compilations.
    _ = launch.session.frozen
    replay = launch.input.replay
    per_step = launch.resolved.settings.rollout.prompts_per_step * jax.process_count()
    fingerprints = {**launch.input.fingerprints, "rollout.prompts_per_step over all hosts": str(per_step)}
    restored = checkpoints.restore(fingerprints)
    if restored is not None:
        arrays, progress = restored
        if launch.session.workers is not None:
            launch.session.workers.history = progress.lengths or {}
        adapted = progress.kl_coef if algorithm.kl_target is not None else None
        return RunState.of(arrays, kl_coef=algorithm.beta if adapted is None else adapted), progress
    if replay is not None and replay.start is not None:
        return _open_start(replay.start, launch, learning, fingerprints)
    policy = learning.policy.initial_state(launch.session.untrained())
    state = RunState(policy, _fresh_critic(launch.session, learning), kl_coef=algorithm.beta)
    return state, Progress(step=0, position=0, fingerprints=fingerprints)


def _fresh_critic(session: Session, learning: Learning) -> TrainState | None:
    if session.critic is None:
        return None
    assert learning.critic is not None
    return learning.critic.initial_state(session.critic.load_params(session.mesh))


def _open_start(
    start: SavedPolicy, launch: Launch, learning: Learning, fingerprints: Mapping[str, str]
) -> tuple[RunState, Progress]:
    """The state of --checkpoint; a critic that it does not have begins with it."""
    algorithm = launch.resolved.settings.algorithm
    learners = {"policy": learning.policy, **({"critic": learning.critic} if learning.critic else {})}
    found = start.read_states(
        {name: learner.shapes for name, learner in learners.items()},
        {name: learner.shardings for name, learner in learners.items()},
    )
    critic = found["critic"] if "critic" in found else _fresh_critic(launch.session, learning)
    adapted = start.progress.kl_coef if algorithm.kl_target is not None else None
    state = RunState(found["policy"], critic, kl_coef=algorithm.beta if adapted is None else adapted)
    return state, Progress(step=start.step, position=start.progress.position, fingerprints=fingerprints)


def open_journal(launch: Launch, progress: Progress, *, resumed: bool) -> Journal | NoJournal:
    """The run directory from here on tells of this run, or goes on to."""
    if jax.process_index() != 0:
        return NoJournal()
    launch.run.write_settings(launch.resolved)
    record_commits(launch.run, launch.resolved.settings, launch.input.commits)
    # The line of a step whose evaluation is still to come is written after it; that of step 0 always is.
    is_to_come = progress.step == 0 or progress.unevaluated is not None
    last_step = progress.step - is_to_come if resumed else None
    replay = launch.input.replay
    session = ({} if resumed else {"after_step": progress.step}) | (replay.record if replay else {})
    return Journal(launch.run, launch.resolved, last_step=last_step, wandb_id=progress.wandb_id, session=session)


def open_reference(state: RunState, progress: Progress, session: Session) -> Params | None:
    """The weights of `model.path`: a fresh state still holds them, a restored one has moved on.

    With adapters they are those that stay as they are, quantized or not, and there is no second copy.
    """
    if "reference" not in session.settings.scored_roles:
        return None
    if session.input.adapted.lora is not None:
        return session.frozen
    if session.settings.offloads_reference:
        return to_host_memory(session.load_params() if progress.step else state.policy.params)
    return session.load_params() if progress.step else jax.tree.map(jnp.copy, state.policy.params)


def open_reward_model(launch: Launch) -> RewardModel | None:
    model = launch.input.reward_model
    return None if model is None else RewardModel.load(launch.resolved.settings, model, launch.session.mesh)
