"""Runs training steps one after the other, with evaluation, saving and stopping between them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from app.checkpoint.checkpoints import Checkpoints, Progress
from app.checkpoint.retention import SaveClock
from app.checkpoint.run_state import RunState
from app.distributed.cancellation import StoppedError
from app.distributed.preemption import Interrupts
from app.distributed.watchdog import Watchdog
from app.evaluation.evaluator import evaluation_metrics
from app.records.sample import Prompt, Sample
from app.runtime.health_checks import stop_if_diverged
from app.tracking.compilation_counter import CompilationCounter
from app.tracking.performance import step_performance
from app.tracking.profiler import StepTraces
from app.tracking.run_reporter import Narrator
from app.tracking.timer import Timer
from app.training.trainer import Trainer
from settings import Settings


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
