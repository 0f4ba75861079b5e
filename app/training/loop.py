"""The corridor: rollout -> reward -> score -> advantage -> update, step after step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from app.flow import Prompt, Sample
from app.policy.decoder import Params
from app.prompts.order import PromptOrder, host_slice
from app.reward.weighing import score_rewards
from app.training.checkpoint import Checkpoints, Progress
from app.training.evaluate import evaluate, host_share
from app.training.interrupts import Interrupts
from app.training.journal import Journal, NoJournal
from app.training.launch import Launch, prepare
from app.training.metrics import CompilationCounter, sample_metrics, step_performance
from app.training.preservation import Best, NewestAndBest, SaveClock
from app.training.progress import Board, evaluation_line
from app.training.run_directory import Resume, RunDirectory, claim
from app.training.session import Session
from app.training.step_traces import StepTraces
from app.training.summary import summary_text
from app.training.training_input import TrainingInput
from app.training.wiring import Learning, wire_learning, work_of
from app.update.optimizer import TrainState, initial_state
from settings import Resolved, Settings


@dataclass
class Timer:
    """Wall-clock seconds of each phase of a step."""

    board: Board
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.board.phase(name)
        start = time.perf_counter()
        with jax.profiler.TraceAnnotation(name):
            yield
        self.seconds[f"time/{name}_s"] = time.perf_counter() - start


@dataclass
class Trainer:
    """The rooms of one run and the order of its prompts."""

    settings: Settings
    session: Session
    learning: Learning
    prompts: Sequence[Prompt]
    reference: Params | None
    """Frozen weights of the KL penalty; None, and no memory, when `algorithm.beta` is 0."""

    def step(
        self, state: TrainState, *, step: int, position: int, timer: Timer
    ) -> tuple[TrainState, list[Sample], dict[str, float]]:
        """One walk down the corridor. `position` counts the prompts taken before this step."""
        settings = self.settings
        functions = [(f.name, f.weight) for f in settings.reward.functions]
        with timer.phase("rollout"):
            weights = self.session.engine.weights(state.params)
            prompts = self.take_prompts(position)
            # Groups are numbered over all hosts, for the metrics that gather them.
            first = jax.process_index() * len(prompts)
            samples = self.session.sample(weights, prompts, policy_version=step - 1, first_group_id=first)
            del weights
        samples = [replace(s, elapsed_s=timer.seconds["time/rollout_s"]) for s in samples]
        with timer.phase("reward"):
            samples = score_rewards(samples, functions)
        with timer.phase("score"):
            samples = self.score(state.params, samples)
        with timer.phase("advantage"):
            samples = self.learning.credit(samples)
        with timer.phase("update"):
            temperature = settings.rollout.temperature
            state, metrics = self.learning.updater.update(state, samples, temperature=temperature)
        return state, samples, {**sample_metrics(samples), **metrics}

    def take_prompts(self, position: int) -> list[Prompt]:
        """This host's prompts of the step that starts at a position of the global order."""
        order = PromptOrder(self.settings.run.seed, len(self.prompts), self.settings.data.shuffle)
        indices = order.take(position, self.prompts_per_step)
        own = host_slice(indices, process_index=jax.process_index(), process_count=jax.process_count())
        return [self.prompts[i] for i in own]

    @property
    def prompts_per_step(self) -> int:
        """Over all hosts."""
        return self.settings.rollout.prompts_per_step * jax.process_count()

    def score(self, params: Params, samples: list[Sample]) -> list[Sample]:
        """Proximal logprobs where several updates follow, reference logprobs where a KL penalty needs them."""
        temperature, score = self.settings.rollout.temperature, self.settings.score
        if self.learning.several_updates:
            rows = score.policy.rows_per_device or score.rows_per_device
            scored = self.session.scorer.logprobs(params, samples, temperature=temperature, rows_per_device=rows)
            samples = [replace(s, policy_logprobs=x) for s, x in zip(samples, scored, strict=True)]
        if self.reference is not None:
            rows = score.reference.rows_per_device or score.rows_per_device
            scored = self.session.scorer.logprobs(
                self.reference, samples, temperature=temperature, rows_per_device=rows
            )
            samples = [replace(s, reference_logprobs=x) for s, x in zip(samples, scored, strict=True)]
        return samples


def train(resolved: Resolved, *, resume: Resume, clock: Callable[[], float] = time.monotonic) -> int:
    """`grpo train`: trains to `run.steps`, prints what came of it and returns the exit code (0, 75 or 130).

    `clock`, in seconds, decides when `checkpoint.every_minutes` have passed; process 0's counts.

    Raises:
        InputError: input that cannot be used; nothing on disk has changed by then.
        RuntimeError: too many non-finite updates in a row.
    """
    launch = prepare(resolved, resume=resume)
    with ExitStack() as stack:
        if jax.process_index() == 0:
            stack.enter_context(claim(launch.run))
        outcome = _train_in(launch, stack, clock)
    # Only now: the board, while it lives, takes stdout with it to stderr.
    if jax.process_index() == 0:
        print(summary_text(outcome.history, path=str(launch.run.path), best=outcome.best), flush=True)
    return outcome.exit_code


class Outcome(NamedTuple):
    exit_code: int
    history: Sequence[Mapping[str, Any]]
    """Every line of `metrics.jsonl`; empty on all processes but the first."""
    best: Best | None


def _train_in(launch: Launch, stack: ExitStack, clock: Callable[[], float]) -> Outcome:
    """The run itself. What it opens, `stack` closes."""
    resolved, run, training_input, session = launch.resolved, launch.run, launch.input, launch.session
    settings, is_first = resolved.settings, jax.process_index() == 0
    learning = wire_learning(settings, session)
    compilations = stack.enter_context(closing(CompilationCounter()))
    checkpoints = _open_checkpoints(launch, learning)
    stack.callback(checkpoints.close)
    state, progress = _open_state(checkpoints, session, learning, training_input)
    reference = _reference(state, progress, session) if "reference" in settings.scored_roles else None
    trainer = Trainer(settings, session, learning, training_input.prompts, reference)
    work = work_of(settings, session.input.definition)
    board = stack.enter_context(Board(num_steps=settings.run.steps, first_step=progress.step, shown=is_first))
    board.say(training_input.report)
    if is_first:
        run.write_settings(resolved)
    last_step = progress.step if progress.step else None
    journal = Journal(run, resolved, last_step=last_step, wandb_id=progress.wandb_id) if is_first else NoJournal()
    stack.callback(journal.close)
    progress = replace(progress, wandb_id=journal.wandb_id)
    interrupts = stack.enter_context(Interrupts())
    traces = StepTraces(settings.logging.profile_steps if is_first else (), run.profile)
    stack.callback(traces.stop)
    held_out = host_share(training_input.held_out) if training_input.held_out else []
    if progress.step:
        board.say(_continuing(progress, settings))
    elif held_out:
        journal.write(0, _evaluate(trainer, state.params, held_out, 0, run, journal, board))
    exit_code, save_clock = 0, SaveClock(settings.checkpoint.every_minutes, clock)
    for step in range(progress.step + 1, settings.run.steps + 1):
        traces.start(step)
        start, timer = time.perf_counter(), Timer(board)
        state, samples, metrics = trainer.step(state, step=step, position=progress.position, timer=timer)
        if settings.logging.save_rollouts:
            journal.write_samples(run.rollouts(step), samples)
        is_last = step == settings.run.steps
        agreed = interrupts.agreed(step, save_is_due=is_first and save_clock.is_due)
        # A signal during the last step changes nothing: the run is complete.
        exit_code = 0 if is_last else agreed.exit_code
        seconds = time.perf_counter() - start
        traces.stop()
        record = {
            "policy/kl": None,  # until a penalty measures it
            **metrics,
            **timer.seconds,
            "time/step_s": seconds,
            **step_performance(samples, work, seconds=seconds),
            "perf/compilations": compilations.take(),
        }
        if held_out and (is_last or step % settings.eval.every_steps == 0):
            record |= _evaluate(trainer, state.params, held_out, step, run, journal, board)
        progress = replace(
            progress,
            step=step,
            position=progress.position + trainer.prompts_per_step,
            evaluation={name: value for name, value in record.items() if name.startswith("eval/")} or None,
        )
        journal.write(step, record)
        board.step(step, record)
        _stop_if_diverged(metrics, settings)
        in_turn = is_last or exit_code or agreed.save_is_due or step % settings.checkpoint.every_steps == 0
        if in_turn or checkpoints.is_best(progress):
            board.phase("save")
            checkpoints.save(state, progress)
            save_clock.reset()
        checkpoints.point_at_best()
        if exit_code:
            break
    checkpoints.finish()
    return Outcome(exit_code, journal.history, checkpoints.best)


def _continuing(progress: Progress, settings: Settings) -> str:
    """What a resumed run says first."""
    text = f"continuing after step {progress.step} of {settings.run.steps}"
    done = [step for step in settings.logging.profile_steps if step <= progress.step]
    return f"{text}\nlogging.profile_steps: done before, so not profiled: {', '.join(map(str, done))}" if done else text


def _open_checkpoints(launch: Launch, learning: Learning) -> Checkpoints:
    settings = launch.resolved.settings.checkpoint
    policy = NewestAndBest(settings.keep, settings.best_metric, settings.best_mode)
    return Checkpoints(launch.run.checkpoints, policy=policy, shapes=learning.shapes, shardings=learning.shardings)


def _open_state(
    checkpoints: Checkpoints, session: Session, learning: Learning, training_input: TrainingInput
) -> tuple[TrainState, Progress]:
    """The newest good checkpoint's state, or the model's own weights with fresh moments."""
    per_step = session.settings.rollout.prompts_per_step * jax.process_count()
    fingerprints = {**training_input.fingerprints, "rollout.prompts_per_step over all hosts": str(per_step)}
    restored = checkpoints.restore(fingerprints)
    if restored is not None:
        return restored
    state = initial_state(learning.optimizer, session.load_params(), learning.shardings)
    return state, Progress(step=0, position=0, fingerprints=fingerprints)


def _reference(state: TrainState, progress: Progress, session: Session) -> Params:
    """The weights of `model.path`: a fresh state still holds them, a restored one has moved on."""
    return session.load_params() if progress.step else jax.tree.map(jnp.copy, state.params)


def _evaluate(
    trainer: Trainer,
    params: Params,
    prompts: Sequence[Prompt],
    step: int,
    run: RunDirectory,
    journal: Journal | NoJournal,
    board: Board,
) -> dict[str, Any]:
    board.phase("evaluate")
    start = time.perf_counter()
    metrics, samples = evaluate(trainer.session, trainer.session.engine.weights(params), prompts)
    journal.write_samples(run.evaluation(step), samples)
    board.say(evaluation_line(step, metrics))
    return {**metrics, "time/eval_s": time.perf_counter() - start}


def _stop_if_diverged(metrics: dict[str, float], settings: Settings) -> None:
    if metrics["policy/nonfinite_in_a_row"] >= settings.optimizer.max_nonfinite_steps:
        raise RuntimeError(
            f"{int(metrics['policy/nonfinite_in_a_row'])} optimizer steps in a row had a NaN or infinite loss or "
            "gradient; the weights are those before them. Lower optimizer.learning_rate, or train in float32"
        )
