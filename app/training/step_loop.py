"""Runs the training steps, with evaluation, saving and stopping between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from app.checkpoint.checkpoints import Checkpoints
from app.checkpoint.retention import SaveClock
from app.checkpoint.train_progress import RunState, TrainProgress
from app.distributed.collective_files import gather_lines_to_process_0
from app.distributed.collectives import broadcast_json, error_barrier
from app.distributed.preemption import PreemptionHandler, StopDecision
from app.distributed.stop_check import StoppedError
from app.evaluation.evaluator import evaluation_metrics, generate_samples
from app.mesh.program_cache import CompilationCounter
from app.prompts.turn_end import overlooked_end_notices, written_ids
from app.records.sample import Sample
from app.report.before_after import no_step_left
from app.report.metrics_history import EVAL_PROMPTS, early_stopping_reason
from app.reward.plugin import StepInfo
from app.runtime.health_checks import RewardError, check_rewards, stop_if_diverged
from app.tracking.performance import step_performance
from app.tracking.run_reporter import RunReporter
from app.tracking.timer import StepProfiler, StepTimer
from app.training.setup import RunSetup
from app.training.trainer import Trainer
from settings import Settings

StepCallback = Callable[[Mapping[str, Any]], object]
"""Called with the metrics of a step, as in its line of `metrics.jsonl`; a true value ends the run."""


@dataclass
class StepLoop:
    """Runs the training steps, and evaluates, saves and stops between them."""

    setup: RunSetup
    trainer: Trainer
    state: RunState
    progress: TrainProgress
    """The progress after the last completed step, to which `state` belongs."""
    checkpoints: Checkpoints
    interrupts: PreemptionHandler
    reporter: RunReporter
    profiler: StepProfiler
    compilations: CompilationCounter
    save_clock: SaveClock
    on_step: StepCallback | None = None
    has_looked_for_ends: bool = False
    early_end: str = ""
    """Why early stopping ends the run before its last step; empty if it does not."""

    def run(self) -> int:
        """Runs to the last step or until stopped, saves, and returns the exit code: 0, or 75 or 130 after a signal."""
        decision = None
        try:
            self._start()
            for step in range(self.progress.step + 1, self.last_step + 1):
                if self.early_end:
                    break
                self._step(step)
        except StoppedError:
            decision = self.interrupts.sync_stop_decision()
            self._save()
        except RewardError:
            # Raised on all hosts, and not during an update: the state is the last completed step's.
            if self.progress.step:
                self._save()
                self.checkpoints.finish()
                self.reporter.display.print_line(_stop_message(self.progress, self.last_step, ()))
            raise
        else:
            self.interrupts.all_steps_done = True
        self.reporter.display.set_phase("save")
        self.checkpoints.finish()
        if self.reporter.mirror is not None:  # The mirror copies the last checkpoint while the report is written.
            self.reporter.mirror.request()
        if decision is not None:
            self.reporter.display.print_line(_stop_message(self.progress, self.last_step, decision.signaled_hosts))
            return decision.exit_code
        if self.early_end:
            line = f"ended early, after step {self.progress.step} of {self.last_step}: {self.early_end}"
            self.reporter.display.print_line(line)
        return 0

    @property
    def settings(self) -> Settings:
        return self.trainer.settings

    @property
    def last_step(self) -> int:
        return self.setup.steps[-1]

    def _start(self) -> None:
        """Compiles generation, and runs the evaluation before step 1, or an evaluation that was interrupted."""
        display = self.reporter.display
        display.set_phase("compile")
        self.trainer.source.compile()
        if self.setup.inputs.eval_prompts:
            self.trainer.session.compile_evaluation()
        if self.interrupts.sync_stop_decision().exit_code:
            raise StoppedError
        if self.progress.step:
            display.print_line(f"continuing after step {self.progress.step} of {self.last_step}")
            # The evaluation of the last step may be missing. The steps of a replay are given by its files.
            is_complete = self.progress.step >= self.last_step and self.progress.unevaluated is None
            if is_complete and self.trainer.source.num_prompts is not None:
                display.print_line(no_step_left(self.last_step))
        if self.progress.unevaluated is not None:
            record = self._add_evaluation(self.progress.unevaluated)
            self.reporter.report_step(self.progress.step, record)
            self.checkpoints.update_progress(self.progress)
        elif self.setup.inputs.eval_prompts and not self.progress.step:
            initial = self._evaluate(0)
            evaluation = self.progress.with_evaluation(initial).evaluation
            self.progress = replace(self.progress, initial_evaluation=evaluation)
            self.checkpoints.record_evaluations(self.progress)
            self.reporter.write_metrics(0, initial)
        self._check_early_stopping()

    def _step(self, step: int) -> None:
        """Runs one step. Raises StoppedError on all hosts if the step is interrupted or the run must stop after it."""
        self.setup.watchdog.step = step
        self.profiler.start(step)
        timer = StepTimer(self.reporter.display)
        position, is_last = self.progress.position, step == self.last_step
        self.state, samples, metrics = self.trainer.step(self.state, step=step, position=position, timer=timer)
        if not self.settings.is_supervised:
            self.reporter.report_samples(step, samples)
            self._look_for_ends(samples)
        timer.stop()
        self.profiler.stop()
        seconds, flops = timer.seconds, metrics["perf/flops"]
        assert flops is not None
        performance = step_performance(samples, flops=flops, seconds=seconds["time/step_s"])
        # The KL is null without a penalty.
        record = {"policy/kl": None, **metrics, **seconds, **performance, "time/unix_s": time.time()}
        record |= {"perf/compilations": self.compilations.take_count()}
        if self.trainer.session.generates_async:
            record |= {"perf/training_bubble": seconds["time/rollout_s"] / seconds["time/step_s"]}
        prompts_per_round = self.settings.rollout.prompts_per_step * jax.process_count()
        num_prompts = int(metrics.get("rollout/num_rounds") or 1) * prompts_per_round
        num_tokens = int(metrics["data/num_tokens"] or 0)
        self.progress = self.progress.after_step(
            step, num_prompts=num_prompts, num_tokens=num_tokens, **self._carried_progress()
        )
        record |= {"data/total_tokens": self.progress.total_tokens}
        if self.trainer.source.num_prompts is not None:
            record |= {"data/epoch": self.progress.position / self.trainer.source.num_prompts}
        if self.setup.inputs.eval_prompts and (is_last or step % self.settings.eval.every_steps == 0):
            record = self._add_evaluation(record)
        self.reporter.report_step(step, record)
        decision = self._decide({"step": step, **record})
        stop_if_diverged(metrics)
        self._check_early_stopping()
        is_last = is_last or bool(self.early_end)
        in_turn = is_last or decision.save_is_due or step % self.settings.checkpoint.every_steps == 0
        if in_turn or self.checkpoints.is_best(self.progress):
            self._save()
        self.checkpoints.update_best_link()
        # After the last step a stop changes nothing: the run is complete.
        if (decision.exit_code or decision.end_is_asked) and not is_last:
            raise StoppedError

    def _decide(self, record: Mapping[str, Any]) -> StopDecision:
        """Calls `on_step` and returns the hosts' joint decision; if `on_step` raises on a host, all hosts raise."""
        ends, problem = False, None
        try:
            ends = self.on_step is not None and bool(self.on_step(record))
        # Every exception, because the other hosts wait for this one's decision; it is raised below.
        except Exception as error:
            ends, problem = True, error
        decision = self.interrupts.sync_stop_decision(save_is_due=self.save_clock.is_due, end_is_asked=ends)
        if decision.end_is_asked:
            with error_barrier():
                if problem is not None:
                    raise problem
        return decision

    def _carried_progress(self) -> dict[str, Any]:
        """Returns KL coefficient, lengths and pass rates for the progress. All hosts must call it together."""
        lengths, curriculum = self.trainer.session.share_lengths(), self.trainer.source.curriculum
        return {
            "kl_coef": self.state.kl_coef,
            "lengths": lengths and lengths.prompts,
            "finished_lengths": lengths and lengths.finished,
            "pass_rates": curriculum and {**curriculum.pass_rates},
        }

    def _add_evaluation(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Evaluates and returns the step's record with the results; an interrupted evaluation is repeated on resume."""
        self.progress = replace(self.progress, unevaluated=record)
        # A run that was resumed without evaluations skips the missing one.
        evaluation = self._evaluate(self.progress.step) if self.setup.inputs.eval_prompts else {}
        self.progress = replace(self.progress.with_evaluation(evaluation), **self._carried_progress())
        return {**record, **evaluation}

    def _evaluate(self, step: int) -> dict[str, Any]:
        start = time.perf_counter()
        session, display, prompts = self.trainer.session, self.reporter.display, self.setup.inputs.eval_prompts
        display.set_phase("evaluate")
        policy = session.scoring.full_params(self.state.policy.params)
        # The generator alone refers to the generation weights, so that grading does not keep them.
        samples = [*generate_samples(session, session.to_decode_weights(policy), prompts)]
        rewarded = self.trainer.reward_functions.grade_held_out(samples, StepInfo(step, self.settings.run.steps))
        if not session.generates_async:
            # The next step must report its own rollouts only.
            session.take_counters()
            session.take_schedule_metrics()
        display.print_lines(gather_lines_to_process_0(rewarded.notices))
        check_rewards(rewarded)
        metrics = {**evaluation_metrics(rewarded.samples, self.settings), EVAL_PROMPTS: len(prompts)}
        self.reporter.report_evaluation(step, metrics, rewarded.samples)
        self._look_for_ends(rewarded.samples)
        return {**metrics, "time/eval_s": time.perf_counter() - start, "time/unix_s": time.time()}

    def _look_for_ends(self, samples: Sequence[Sample]) -> None:
        """Warns once if samples seem to end with a token that is no EOS token. All hosts must call it together."""
        if self.has_looked_for_ends:
            return
        self.has_looked_for_ends = True
        tokenizer = self.trainer.session.model_spec.tokenizer
        notices = overlooked_end_notices([written_ids(sample) for sample in samples], tokenizer)
        self.reporter.display.print_lines(gather_lines_to_process_0(notices))

    def _check_early_stopping(self) -> None:
        """Sets `early_end` on all hosts, which must call it together, from the metrics that process 0 has."""
        if self.settings.run.early_stopping.patience is not None and self.progress.step < self.last_step:
            metric, patience = self.settings.checkpoint.best_metric, self.settings.run.early_stopping.patience
            reason = early_stopping_reason(self.reporter.run_log.history, metric=metric, patience=patience) or ""
            self.early_end = broadcast_json(reason)

    def _save(self) -> None:
        self.reporter.display.set_phase("save")
        if not self.checkpoints.has_step(self.progress.step):
            self.checkpoints.save(self.state.networks, self.progress)
            self.save_clock.reset()


def _stop_message(progress: TrainProgress, steps: int, requesting_hosts: Sequence[int]) -> str:
    text = f"stopped after step {progress.step} of {steps}, which is saved; --resume auto continues"
    if progress.unevaluated is not None:
        text += ", with the evaluation of that step"
    if jax.process_count() > 1 and requesting_hosts:
        text += f" (asked to stop: host {' and '.join(map(str, requesting_hosts))})"
    return text
