"""Restores or initializes the state of a run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from app.checkpoint.checkpoints import Checkpoints, check_fingerprints
from app.checkpoint.retention import LatestAndBestPolicy
from app.checkpoint.saved_policy import load_trained_params
from app.checkpoint.train_progress import RunState, TrainProgress
from app.distributed.collectives import any_host, error_barrier
from app.distributed.host_files import copy_files
from app.mesh.placement import to_host_memory
from app.model.decoder import Params
from app.rollout.scheduling.length_estimator import LearnedLengths
from app.runtime.pinned_revisions import record_commits
from app.tracking.run_log import NullRunLog, RunLog
from app.training.inputs import CHANGEABLE_FINGERPRINTS, MINI_BATCH_PROMPTS, PROMPTS_PER_STEP
from app.training.run_folder import RunFolder
from app.training.setup import RunSetup
from app.update.optimizer import TrainState


def open_checkpoints(setup: RunSetup) -> Checkpoints:
    settings = setup.resolved.settings.checkpoint
    policy = LatestAndBestPolicy(settings.keep, settings.best_metric)
    return Checkpoints(
        setup.run.checkpoints_dir,
        policy=policy,
        layout=setup.learning.layout,
        is_seen_by_all=setup.folder.is_seen_by_all,
        are_devices_shared=bool(setup.session.scoring.generation_devices),
    )


def restore_or_initialize(checkpoints: Checkpoints, setup: RunSetup) -> tuple[RunState, TrainProgress]:
    """Returns the state to start from, and its progress.

    The state comes from the run's newest intact checkpoint or, in the first session of a replay, from `--checkpoint`.
    Any other new run has zero moments, and the policy of `--checkpoint` or of `model.path`.
    """
    settings, session, learning = setup.resolved.settings, setup.session, setup.learning
    # Load it now; otherwise the first step's time and compilations would include it.
    _ = session.scoring.frozen_params
    mini_batch = settings.algorithm.mini_batch_prompts or settings.rollout.prompts_per_step
    fingerprints = {
        **setup.inputs.fingerprints,
        PROMPTS_PER_STEP: str(settings.rollout.prompts_per_step * jax.process_count()),
        MINI_BATCH_PROMPTS: str(mini_batch * jax.process_count()),
    }

    def kl_coef(saved: TrainProgress) -> float:
        if settings.algorithm.kl_target is None or saved.kl_coef is None:
            return settings.algorithm.beta
        return saved.kl_coef

    allowed = {"changeable": CHANGEABLE_FINGERPRINTS, "allowed": setup.allow_changed}
    restored = checkpoints.restore(
        lambda saved: check_fingerprints(saved.fingerprints, fingerprints, **allowed),
        replace_damaged=partial(_fetch_again, setup.folder),
    )
    if restored is not None:
        saved_networks, progress = restored
        progress = replace(progress, fingerprints=fingerprints)
        if session.workers is not None:
            fields = {"prompts": progress.lengths or {}, "finished": progress.finished_lengths or ()}
            session.workers.share_lengths([LearnedLengths.from_json(fields)])
        return RunState.from_networks(saved_networks, kl_coef=kl_coef(progress)), progress
    start, progress = setup.inputs.start, TrainProgress(step=0, position=0, fingerprints=fingerprints)
    networks: dict[str, TrainState] = {}
    before = progress
    if start is not None and setup.inputs.replay is not None:
        before = start.progress
        progress = replace(progress, step=start.step, position=before.position, total_tokens=before.total_tokens)
        networks = dict(start.restore_states(learning.layout))
    if "policy" not in networks:
        if start is None:
            params = session.scoring.initial_trained_params()
        else:
            params = load_trained_params(start, session.model_spec, session.mesh)
        networks["policy"] = learning.policy.initial_state(params)
    # A checkpoint without a critic can start a run with one.
    critic = session.scoring.critic
    if critic is not None and "critic" not in networks:
        assert learning.critic is not None
        networks["critic"] = learning.critic.initial_state(critic.load_params(session.mesh))
    return RunState.from_networks(networks, kl_coef=kl_coef(before)), progress


def _fetch_again(folder: RunFolder, step: int) -> bool:
    """Replaces a damaged checkpoint by its copy in the run's bucket; returns False if there is no copy."""
    with error_barrier():
        is_replaced = folder.mirror is not None and folder.mirror.replace_checkpoint(step)
    is_replaced = any_host(is_replaced)
    if is_replaced and not folder.is_seen_by_all:
        copy_files(folder.run.path, [f"checkpoints/{step}/progress/*"])
    return is_replaced


def open_run_log(setup: RunSetup, progress: TrainProgress, *, resumed: bool) -> RunLog | NullRunLog:
    """Writes the settings into the run directory, and opens its log or, if `resumed`, continues it."""
    if jax.process_index() != 0:
        return NullRunLog()
    # The line of a step is written after its evaluation, and the line of step 0 is always the evaluation.
    is_to_come = progress.step == 0 or progress.unevaluated is not None
    last_step = progress.step - is_to_come if resumed else None
    replay, start = setup.inputs.replay, setup.inputs.start
    began = {"from_rollouts": replay and str(replay.rollouts), "checkpoint": start and str(start.path)}
    given = {name: path for name, path in began.items() if path}
    session = {"after_step": progress.step, **given, "settings": setup.resolved.to_yaml()}
    run_log = RunLog(setup.run, setup.resolved, last_step=last_step, wandb_id=progress.wandb_id, session_fields=session)
    # After the session's line, which marks the folder as a run's.
    setup.run.write_settings(setup.resolved)
    record_commits(setup.run, setup.resolved.settings, setup.inputs.model_commits)
    return run_log


def load_reference_params(state: RunState, progress: TrainProgress, setup: RunSetup) -> Params | None:
    """Returns the weights of the reference: of the teacher or, without a teacher, of the policy before training.

    They are stored in the compute dtype, to which the network would cast them anyway: bfloat16 halves their bytes. With
    adapters and no teacher, they are the policy's frozen weights, without a second copy. None if nothing reads them.
    """
    session = setup.session.scoring
    if "reference" not in session.settings.scored_roles:
        return None
    if not session.has_own_reference:
        return session.frozen_params
    dtype = jnp.dtype(session.settings.model.dtype)
    start = None if setup.inputs.replay else setup.inputs.start
    if session.teacher is None and not progress.step:
        params = jax.tree.map(lambda x: jnp.array(x, dtype), state.policy.params)
    elif session.teacher is not None or start is None:
        params = session.load_reference()
    else:
        trained = load_trained_params(start, session.model_spec, session.mesh)
        params = jax.tree.map(lambda x: x.astype(dtype), trained)
    return to_host_memory(params) if session.settings.offloads_reference else params
