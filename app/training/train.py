"""Runs training from launch to the last step, or until it is stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from app.checkpoint.full_disk import explain_full_disk
from app.checkpoint.retention import BestCheckpoint, SaveClock
from app.distributed.collectives import error_barrier
from app.distributed.preemption import PreemptionHandler
from app.distributed.shutdown import broadcast_failure, exit_barrier
from app.mesh.program_cache import CompilationCounter
from app.records.run_directory import Resume, RunDirectory, lock_run_directory
from app.reward.reward_functions import reuse_saved_rewards
from app.runtime.health_checks import check_rewards, check_rewards_for_maxrl
from app.runtime.reward_model import RewardModel
from app.tracking.console import ProgressDisplay
from app.tracking.run_mirror import STOP_S
from app.tracking.run_reporter import RunReporter
from app.tracking.timer import StepProfiler
from app.training.initial_state import load_reference_params, open_checkpoints, open_run_log, restore_or_initialize
from app.training.replay import NO_OPTIONS, StartRequest
from app.training.rollout_source import GivenCompletions, ReplayRolloutSource, make_rollout_source
from app.training.setup import RunSetup, prepare_run
from app.training.step_loop import StepCallback, StepLoop
from app.training.step_stages import RewardStage, ScoreStage
from app.training.trainer import SupervisedTrainer, Trainer
from settings import Resolved
from settings.checks.unused_settings import launch_notices


@dataclass(frozen=True)
class TrainingRun:
    """The result of a finished or stopped run."""

    path: Path
    """The run directory."""
    metrics: Sequence[Mapping[str, Any]] = field(repr=False)
    """The lines of `metrics.jsonl`; empty on all processes except process 0."""
    is_complete: bool
    """False if a signal or `on_step` ended the run before its last step; a checkpoint is then saved."""
    exit_code: int
    """Exit code for the process: 0, or after a signal: 130 for Ctrl-C, otherwise 75."""
    best: BestCheckpoint | None
    """Step, metric and value of the best evaluation, whose checkpoint is `checkpoints/best`. Step 0 is the model before
    training."""
    early_end: str
    """Why early stopping ended the run; empty if it did not."""


def train(
    resolved: Resolved,
    *,
    resume: Resume,
    start_request: StartRequest = NO_OPTIONS,
    allow_changed: Sequence[str] = (),
    on_step: StepCallback | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> TrainingRun:
    """Trains up to step `run.steps`, starting or continuing a run as `resume` says (see `grpo.train`).

    Args:
        start_request: the checkpoint to start from, and the saved samples to train on.
        allow_changed: settings and sections that a resumed run may change although they affect what it learns.
        on_step: called on every host; a true value on any of them ends the run with a checkpoint.
        clock: returns the time in seconds, for `checkpoint.every_minutes`; only the clock of process 0 is used.

    Raises:
        InputError: an input cannot be used; nothing on disk has changed.
        RuntimeError: too many non-finite updates in a row, or unusable rewards, after which the last complete step is
            saved.
    """
    with ExitStack() as stack:
        setup = stack.enter_context(
            prepare_run(resolved, resume=resume, start_request=start_request, allow_changed=allow_changed, writes=True)
        )
        with error_barrier():
            if jax.process_index() == 0:
                stack.enter_context(lock_run_directory(setup.run))
        return _train(setup, stack, clock, on_step)


def _train(setup: RunSetup, stack: ExitStack, clock: Callable[[], float], on_step: StepCallback | None) -> TrainingRun:
    """Runs the steps of a run that has passed its checks; `stack` closes what is opened for them."""
    settings, session, is_process_0 = setup.resolved.settings, setup.session, jax.process_index() == 0
    # Signals are handled from here on, including the final report; a second Ctrl-C stops at once.
    interrupts = stack.enter_context(PreemptionHandler(setup.watchdog.status_board))

    def wait_for_hosts(kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            setup.watchdog.enter_phase("report")
            exit_barrier(setup.watchdog.status_board)

    # On exit without an error, hosts wait for each other while process 0 writes a report and ends the copy.
    stack.push(wait_for_hosts)
    if setup.folder.mirror is not None:
        stack.push(setup.folder.mirror)
    session.stop_when(interrupts.stop_requested)
    compilations = stack.enter_context(closing(CompilationCounter()))
    checkpoints = stack.enter_context(closing(open_checkpoints(setup)))
    state, progress = restore_or_initialize(checkpoints, setup)
    reference = load_reference_params(state, progress, setup)
    reward_model = setup.inputs.reward_model and RewardModel.load(settings, setup.inputs.reward_model, session.mesh)
    replay, compute_rewards = setup.inputs.replay, setup.rewards.compute_rewards
    if settings.is_supervised:
        source = GivenCompletions(settings, setup.inputs.given)
    elif replay is None:
        source = make_rollout_source(
            session, setup.inputs.prompts, max_rounds=setup.learning.max_rounds, pass_rates=progress.pass_rates
        )
    else:
        source = ReplayRolloutSource(replay, num_groups=settings.rollout.prompts_per_step)
        if replay.uses_saved_rewards:
            compute_rewards = partial(reuse_saved_rewards, names=setup.rewards.fallible_names)
    check = check_rewards
    if settings.algorithm.estimator == "maxrl":
        check = partial(check_rewards_for_maxrl, parts=settings.compared_parts)
    reward = RewardStage(compute_rewards, settings.run.steps, reward_model, check)
    score = ScoreStage(session.scoring, setup.learning.score_batchers, reference)
    trainer_class = SupervisedTrainer if settings.is_supervised else Trainer
    trainer = trainer_class(session, source, reward, score, setup.learning, setup.rewards)
    on_phase = setup.watchdog.enter_phase
    display = stack.enter_context(
        ProgressDisplay(num_steps=setup.steps[-1], first_step=progress.step, enabled=is_process_0, on_phase=on_phase)
    )
    display.follow(session)
    display.print_lines(
        (*launch_notices(setup.resolved), *setup.notes, setup.inputs.data_report, *setup.rewards.plug_in_summaries)
    )
    resumed = checkpoints.has_step(progress.step)
    with error_barrier(), explain_full_disk(setup.run, setup.learning.layout):
        run_log = stack.enter_context(closing(open_run_log(setup, progress, resumed=resumed)))
        if setup.folder.mirror is not None:
            setup.folder.mirror.start()
    reporter = RunReporter(setup.run, settings.logging, display, run_log, trainer.timeline, setup.folder.mirror)
    stack.callback(reporter.write_final_report)
    profiler = StepProfiler(settings.logging.profile_steps if is_process_0 else (), setup.run.profile_dir)
    stack.callback(profiler.stop)
    stack.enter_context(closing(source))
    loop = StepLoop(
        setup,
        trainer,
        state,
        replace(progress, wandb_id=run_log.wandb_id),
        checkpoints=checkpoints,
        interrupts=interrupts,
        reporter=reporter,
        profiler=profiler,
        compilations=compilations,
        save_clock=SaveClock(settings.checkpoint.every_minutes if is_process_0 else None, clock),
        on_step=on_step,
    )
    with broadcast_failure(setup.watchdog.status_board), explain_full_disk(setup.run, setup.learning.layout):
        exit_code = loop.run()
    if setup.folder.mirror is not None and exit_code:
        setup.folder.mirror.timeout_s = STOP_S
    is_complete = loop.progress.step == loop.last_step or bool(loop.early_end)
    path = RunDirectory.from_settings(settings.run).path
    return TrainingRun(path, run_log.history, is_complete, exit_code, checkpoints.best, loop.early_end)
