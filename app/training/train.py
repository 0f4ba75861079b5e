"""A run from its launch to its last step, or to where it is asked to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from app.checkpoint.retention import BestCheckpoint, SaveClock
from app.distributed.lockstep import error_barrier
from app.distributed.preemption import PreemptionHandler
from app.distributed.shutdown import broadcast_failure, exit_barrier
from app.records.run_directory import Resume, lock_run_directory
from app.runtime.packing_check import check_packing, random_samples
from app.tracking.compilation_counter import CompilationCounter
from app.tracking.console import ProgressDisplay
from app.tracking.profiler import StepProfiler
from app.tracking.run_reporter import RunReporter
from app.tracking.summary import summary_text
from app.training.initial_state import (
    load_reference_params,
    load_reward_model,
    open_checkpoints,
    open_run_log,
    restore_or_initialize,
)
from app.training.replay import ReplayRequest
from app.training.setup import RunSetup, prepare_run
from app.training.step_loop import StepLoop
from app.training.trainer import Trainer
from settings import Resolved
from settings.checks.unused_settings import launch_notices


class TrainResult(NamedTuple):
    exit_code: int
    history: Sequence[Mapping[str, Any]]
    """Every line of `metrics.jsonl`; empty on all processes but the first."""
    best: BestCheckpoint | None


def train(
    resolved: Resolved,
    *,
    resume: Resume,
    replay_request: ReplayRequest | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """`grpo train`: trains to `run.steps`, prints what came of it and returns the exit code (0, 75 or 130).

    Args:
        asked: to learn from samples of files, to the last of these.
        clock: in seconds, decides when `checkpoint.every_minutes` have passed; process 0's counts.

    Raises:
        InputError: input that cannot be used; nothing on disk has changed by then.
        RuntimeError: too many non-finite updates in a row, or rewards that must not be gone on with.
    """
    with ExitStack() as stack:
        launch = stack.enter_context(prepare_run(resolved, resume=resume, replay_request=replay_request))
        with error_barrier():
            if jax.process_index() == 0:
                stack.enter_context(lock_run_directory(launch.run))
        outcome = _train(launch, stack, clock)
    # Only now: the board, while it lives, takes stdout with it to stderr.
    if jax.process_index() == 0:
        print(summary_text(outcome.history, path=str(launch.run.path), best=outcome.best), flush=True)
    return outcome.exit_code


def _train(setup: RunSetup, stack: ExitStack, clock: Callable[[], float]) -> TrainResult:
    """From the first step that is to be done to the last, or to where it is asked to stop.

    What it opens, `stack` closes.
    """
    settings, session, is_first = setup.resolved.settings, setup.session, jax.process_index() == 0
    # Everything below comes while signals are minded, the report at the end, too: twice Ctrl-C stops it at once.
    interrupts = stack.enter_context(PreemptionHandler(setup.status_board))
    stack.push(_wait_for_hosts_on_exit(setup))
    session.stop_when(interrupts.stop_requested)
    learning, replay = setup.make_learner_group(), setup.inputs.replay
    compilations = stack.enter_context(closing(CompilationCounter()))
    checkpoints = stack.enter_context(closing(open_checkpoints(setup, learning)))
    state, progress = restore_or_initialize(checkpoints, setup, learning)
    reference = load_reference_params(state, progress, session)
    reward_model = load_reward_model(setup)
    trainer = Trainer(settings, session, learning, setup.inputs.prompts, reference, setup.rewards, reward_model, replay)
    if settings.uses_packing:
        critic = state.critic and state.critic.params
        check_packing(session, session.full_params(state.policy.params), random_samples(session), critic=critic)
    entered = setup.watchdog.enter_phase
    board = stack.enter_context(
        ProgressDisplay(num_steps=setup.steps[-1], first_step=progress.step, enabled=is_first, on_phase=entered)
    )
    if session.workers is not None:
        session.workers.on_progress = board.update_rollout
    board.print_lines(
        (*launch_notices(setup.resolved), *setup.notes, setup.inputs.data_report, *setup.rewards.plug_in_summaries)
    )
    resumed = checkpoints.has_step(progress.step)
    with error_barrier():
        journal = stack.enter_context(closing(open_run_log(setup, progress, resumed=resumed)))
    narrator = RunReporter(setup.run, settings.logging, board, journal)
    stack.callback(narrator.write_final_report)
    traces = StepProfiler(settings.logging.profile_steps if is_first else (), setup.run.profile_dir)
    stack.callback(traces.stop)
    stack.enter_context(closing(trainer.rollout_source))
    walk = StepLoop(
        trainer,
        state,
        replace(progress, wandb_id=journal.wandb_id),
        checkpoints=checkpoints,
        interrupts=interrupts,
        reporter=narrator,
        profiler=traces,
        compilations=compilations,
        watchdog=setup.watchdog,
        eval_prompts=setup.inputs.eval_prompts,
        last_step=setup.steps[-1],
        save_clock=SaveClock(settings.checkpoint.every_minutes if is_first else None, clock),
    )
    with broadcast_failure(setup.status_board):
        exit_code = walk.run()
    return TrainResult(exit_code, journal.history, checkpoints.best)


def _wait_for_hosts_on_exit(setup: RunSetup) -> Callable[..., None]:
    """An exit of a stack: a host that is done waits for the others, of which the first has a report to write."""

    def leave(kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            setup.watchdog.enter_phase("report")
            exit_barrier(setup.status_board)

    return leave
