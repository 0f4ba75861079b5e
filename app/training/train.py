"""A run from its launch to its last step, or to where it is asked to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from app.checkpoint.retention import Best, SaveClock
from app.distributed.lockstep import together
from app.distributed.preemption import Interrupts
from app.distributed.shutdown import meet, telling
from app.records.run_directory import Resume, claim
from app.runtime.packing_check import check_packing, random_samples
from app.tracking.compilation_counter import CompilationCounter
from app.tracking.console import Board
from app.tracking.profiler import StepTraces
from app.tracking.run_reporter import Narrator
from app.tracking.summary import summary_text
from app.training.initial_state import open_checkpoints, open_journal, open_reference, open_reward_model, open_state
from app.training.replay import Asked
from app.training.setup import Launch, prepared
from app.training.step_loop import Walk
from app.training.trainer import Trainer
from settings import Resolved
from settings.checks.unused_settings import launch_lines


class Outcome(NamedTuple):
    exit_code: int
    history: Sequence[Mapping[str, Any]]
    """Every line of `metrics.jsonl`; empty on all processes but the first."""
    best: Best | None


def train(
    resolved: Resolved, *, resume: Resume, asked: Asked | None = None, clock: Callable[[], float] = time.monotonic
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
        launch = stack.enter_context(prepared(resolved, resume=resume, asked=asked))
        with together():
            if jax.process_index() == 0:
                stack.enter_context(claim(launch.run))
        outcome = _run(launch, stack, clock)
    # Only now: the board, while it lives, takes stdout with it to stderr.
    if jax.process_index() == 0:
        print(summary_text(outcome.history, path=str(launch.run.path), best=outcome.best), flush=True)
    return outcome.exit_code


def _run(launch: Launch, stack: ExitStack, clock: Callable[[], float]) -> Outcome:
    """From the first step that is to be done to the last, or to where it is asked to stop.

    What it opens, `stack` closes.
    """
    settings, session, is_first = launch.resolved.settings, launch.session, jax.process_index() == 0
    # Everything below comes while signals are minded, the report at the end, too: twice Ctrl-C stops it at once.
    interrupts = stack.enter_context(Interrupts(launch.bulletin))
    stack.push(_met(launch))
    session.stop_when(interrupts.is_asked)
    learning, replay = launch.learning(), launch.input.replay
    compilations = stack.enter_context(closing(CompilationCounter()))
    checkpoints = stack.enter_context(closing(open_checkpoints(launch, learning)))
    state, progress = open_state(checkpoints, launch, learning)
    reference = open_reference(state, progress, session)
    reward_model = open_reward_model(launch)
    trainer = Trainer(
        settings, session, learning, launch.input.prompts, reference, launch.rewards, reward_model, replay
    )
    if settings.packs_rows:
        critic = state.critic and state.critic.params
        check_packing(session, session.whole(state.policy.params), random_samples(session), critic=critic)
    entered = launch.watchdog.enter
    board = stack.enter_context(
        Board(num_steps=launch.steps[-1], first_step=progress.step, shown=is_first, entered=entered)
    )
    if session.workers is not None:
        session.workers.watch = board.watch
    board.tell((*launch_lines(launch.resolved), *launch.notes, launch.input.report, *launch.rewards.reports))
    resumed = checkpoints.has(progress.step)
    with together():
        journal = stack.enter_context(closing(open_journal(launch, progress, resumed=resumed)))
    narrator = Narrator(launch.run, settings.logging, board, journal)
    stack.callback(narrator.report)
    traces = StepTraces(settings.logging.profile_steps if is_first else (), launch.run.profile)
    stack.callback(traces.stop)
    stack.enter_context(closing(trainer.rounds))
    walk = Walk(
        trainer,
        state,
        replace(progress, wandb_id=journal.wandb_id),
        checkpoints=checkpoints,
        interrupts=interrupts,
        narrator=narrator,
        traces=traces,
        compilations=compilations,
        watchdog=launch.watchdog,
        held_out=launch.input.held_out,
        last_step=launch.steps[-1],
        save_clock=SaveClock(settings.checkpoint.every_minutes if is_first else None, clock),
    )
    with telling(launch.bulletin):
        exit_code = walk.go()
    return Outcome(exit_code, journal.history, checkpoints.best)


def _met(launch: Launch) -> Callable[..., None]:
    """An exit of a stack: a host that is done waits for the others, of which the first has a report to write."""

    def leave(kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            launch.watchdog.enter("report")
            meet(launch.bulletin)

    return leave
