"""A run from its launch to its last step, or to where it is asked to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from app.checkpoint.checkpoints import Checkpoints, Progress
from app.checkpoint.retention import Best, SaveClock
from app.checkpoint.train_state import RunState
from app.distributed.cancellation import StoppedError
from app.distributed.lockstep import together
from app.distributed.preemption import Interrupts
from app.distributed.shutdown import meet, telling
from app.distributed.watchdog import Watchdog
from app.evaluation.evaluator import evaluation_metrics
from app.records.run_directory import Resume, claim
from app.records.sample import Prompt, Sample
from app.runtime.health_checks import stop_if_diverged
from app.runtime.packing_check import check_packing, random_samples
from app.tracking.compilation_counter import CompilationCounter
from app.tracking.console import Board
from app.tracking.performance import step_performance
from app.tracking.profiler import StepTraces
from app.tracking.run_reporter import Narrator
from app.tracking.summary import summary_text
from app.tracking.timer import Timer
from app.training.launch import Launch, prepared
from app.training.loop import Trainer
from app.training.opening import open_checkpoints, open_journal, open_reference, open_reward_model, open_state
from app.training.replay import Asked
from settings import Resolved, Settings
from settings.unread import launch_lines


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


@dataclass
class Walk:
    """Steps, one after the other, and what comes between them."""

    trainer: Trainer
    state: RunState
    progress: Progress
    """Of the last step that is done, like the state; what a checkpoint says."""
    checkpoints: Checkpoints
    interrupts: Interrupts
    narrator: Narrator
    traces: StepTraces
    compilations: CompilationCounter
    watchdog: Watchdog
    held_out: Sequence[Prompt]
    """The evaluation prompts of all hosts; none where nothing is evaluated."""
    last_step: int
    save_clock: SaveClock

    def go(self) -> int:
        """Ends with a checkpoint on disk. The exit code: 0 when all steps are done, else what it was stopped with."""
        exit_code = 0
        try:
            self._begin()
            for step in range(self.progress.step + 1, self.last_step + 1):
                self._step(step)
        except StoppedError:
            agreed = self.interrupts.agreed()
            exit_code = agreed.exit_code
            assert exit_code, "generation was stopped, and nobody has asked"
            if not self.checkpoints.has(self.progress.step):
                self._save()
        else:
            self.interrupts.all_steps_done = True
        self.narrator.board.phase("save")
        self.checkpoints.finish()
        if exit_code:
            self.narrator.board.say(_farewell(self.progress, self.last_step, agreed.asked))
        return exit_code

    @property
    def settings(self) -> Settings:
        return self.trainer.settings

    def _begin(self) -> None:
        """What comes before the first step that is to be done."""
        board = self.narrator.board
        board.phase("compile")
        self.trainer.rounds.compile()
        if self.held_out:
            self.trainer.session.compile_evaluation()
        if self.interrupts.agreed().exit_code:
            raise StoppedError
        if self.progress.step:
            board.say(_continuing(self.progress, self.last_step, self.settings.logging.profile_steps))
        if self.progress.unevaluated is not None:
            record = self._evaluated(self.progress.unevaluated)
            self.narrator.step(self.progress.step, record)
            self.checkpoints.amend(self.progress)
        elif self.held_out and not self.progress.step:
            self.narrator.journal.write(0, self._evaluation(0))

    def _step(self, step: int) -> None:
        """Raises StoppedError where it is given up, and behind it where another would follow."""
        self.watchdog.step = step
        self.traces.start(step)
        timer = Timer(self.narrator.board)
        position, is_last = self.progress.position, step == self.last_step
        self.state, samples, metrics = self.trainer.step(self.state, step=step, position=position, timer=timer)
        self.narrator.samples(step, samples)
        agreed = self.interrupts.agreed(save_is_due=self.save_clock.is_due)
        timer.stop()
        self.traces.stop()
        record = _record(metrics, samples, timer) | {"perf/compilations": self.compilations.take()}
        num_prompts = int(metrics["rollout/num_rounds"] or 1) * self.trainer.prompts_per_step
        self.progress = self.progress.after(step, num_prompts=num_prompts, **self._between_steps())
        if self.held_out and (is_last or step % self.settings.eval.every_steps == 0):
            record = self._evaluated(record)
        self.narrator.step(step, record)
        stop_if_diverged(metrics, self.settings)
        in_turn = is_last or agreed.save_is_due or step % self.settings.checkpoint.every_steps == 0
        if in_turn or self.checkpoints.is_best(self.progress):
            self._save()
        self.checkpoints.point_at_best()
        # A signal during the last step changes nothing: the run is complete.
        if agreed.exit_code and not is_last:
            raise StoppedError

    def _between_steps(self) -> dict[str, Any]:
        """What of the progress changes beside the step and the evaluation, as of now. All hosts ask together."""
        return {"kl_coef": self.state.kl_coef, "lengths": self.trainer.session.share_lengths()}

    def _evaluated(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """The record of the step that is done, with its evaluation. Where that is stopped, it is still to come."""
        self.progress = replace(self.progress, unevaluated=record)
        # A run that goes on without evaluations has none to catch up on.
        evaluation = self._evaluation(self.progress.step) if self.held_out else {}
        self.progress = replace(self.progress.evaluated(evaluation), **self._between_steps())
        return {**record, **evaluation}

    def _evaluation(self, step: int) -> dict[str, Any]:
        """The metrics of an evaluation, which has been told of by then."""
        start = time.perf_counter()
        policy = self.trainer.session.whole(self.state.policy.params)
        judged = self.trainer.evaluate(policy, self.held_out, step=step, board=self.narrator.board)
        metrics = evaluation_metrics(judged.samples, self.settings)
        self.narrator.evaluation(step, metrics, judged.samples)
        return {**metrics, "time/eval_s": time.perf_counter() - start}

    def _save(self) -> None:
        self.narrator.board.phase("save")
        self.checkpoints.save(self.state.arrays, self.progress)
        self.save_clock.reset()


def _record(metrics: dict[str, float | None], samples: Sequence[Sample], timer: Timer) -> dict[str, Any]:
    """A step's line of `metrics.jsonl`."""
    flops = metrics["perf/flops"]
    assert flops is not None
    performance = step_performance(samples, flops=flops, seconds=timer.seconds["time/step_s"])
    # Null until a penalty measures it.
    return {"policy/kl": None, **metrics, **timer.seconds, **performance}


def _continuing(progress: Progress, steps: int, profiled: Sequence[int]) -> str:
    """What a run says first that does not begin with step 1."""
    text = f"continuing after step {progress.step} of {steps}"
    done = [step for step in profiled if step <= progress.step]
    return f"{text}\nlogging.profile_steps: done before, so not profiled: {', '.join(map(str, done))}" if done else text


def _farewell(progress: Progress, steps: int, asked: Sequence[int]) -> str:
    """What a run that was stopped says last."""
    text = f"stopped after step {progress.step} of {steps}, which is saved; --resume auto goes on"
    if progress.unevaluated is not None:
        text += ", with the evaluation of that step"
    if jax.process_count() > 1:
        text += f" (asked to stop: host {' and '.join(map(str, asked))})"
    return text
