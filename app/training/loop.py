"""The corridor: rollout -> reward -> score -> advantage -> update, step after step."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from app.flow import Prompt, Sample
from app.mesh import topology
from app.mesh.placement import max_over_hosts, sum_over_hosts
from app.policy.decoder import Params
from app.prompts.order import PromptOrder, host_slice
from app.report.alerts import Watch
from app.report.completions import completions_table
from app.report.write import write_report
from app.reward.plugin import Moment
from app.reward.rewards import Rewards
from app.reward.weighing import Scored
from app.training.checkpoint import Checkpoints, Progress
from app.training.evaluate import evaluate, evaluation_metrics, host_share
from app.training.interrupts import Interrupts
from app.training.journal import Journal, NoJournal
from app.training.metrics import CompilationCounter, Work, reward_counts, sample_metrics, step_performance
from app.training.pinned_model import pinned, record_commit
from app.training.progress import Board, evaluation_line
from app.training.run_directory import Resume, RunDirectory, check_claim, claim
from app.training.session import Session
from app.training.summary import summary_text
from app.training.training_input import TrainingInput, read_training_input
from app.training.wiring import Learning, check_rows, wire_learning
from app.update.optimizer import TrainState, initial_state
from settings import Resolved, Settings

log = logging.getLogger(__name__)


@dataclass
class Timer:
    """Wall-clock seconds of each phase of a step."""

    board: Board
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.board.phase(name)
        start = time.perf_counter()
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
    rewards: Rewards

    def step(
        self, state: TrainState, *, step: int, position: int, timer: Timer
    ) -> tuple[TrainState, list[Sample], dict[str, float]]:
        """One walk down the corridor. `position` counts the prompts taken before this step."""
        settings = self.settings
        with timer.phase("rollout"):
            weights = self.session.engine.weights(state.params)
            prompts = self.take_prompts(position)
            # Groups are numbered over all hosts, for the metrics that gather them.
            first = jax.process_index() * len(prompts)
            samples = self.session.sample(weights, prompts, policy_version=step - 1, first_group_id=first)
            del weights
        samples = [replace(s, elapsed_s=timer.seconds["time/rollout_s"]) for s in samples]
        with timer.phase("reward"):
            scored = self.rewards.score(samples, Moment(step, settings.run.steps))
            timer.board.tell(scored.notices)
            _check_rewards(scored)
        with timer.phase("score"):
            samples = self.score(state.params, scored.samples)
        with timer.phase("advantage"):
            samples = self.credit(samples)
        with timer.phase("update"):
            temperature = settings.rollout.temperature
            state, metrics = self.learning.updater.update(state, samples, temperature=temperature)
        return state, samples, {**sample_metrics(samples, self.rewards.names), **reward_counts(scored), **metrics}

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

    @property
    def work(self) -> Work:
        """What a step's tokens go through."""
        return Work(
            num_parameters=self.session.input.definition.num_parameters,
            group_size=self.settings.rollout.group_size,
            scoring_passes=self.learning.scores_policy + (self.reference is not None),
            epochs=self.settings.algorithm.epochs,
        )

    def score(self, params: Params, samples: list[Sample]) -> list[Sample]:
        """The policy's logprobs where several updates or a penalised reward need them, the reference's for any KL."""
        temperature, score = self.settings.rollout.temperature, self.settings.score
        if self.learning.scores_policy:
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

    def credit(self, samples: list[Sample]) -> list[Sample]:
        """Advantages among the samples that have a reward.

        The others keep their place, out of the loss: shapes, and the parts that mini-batches and hosts get, do not
        depend on how many there are.
        """
        credited = iter(self.learning.credit([s for s in samples if s.reward is not None]))
        return [next(credited) if s.reward is not None else _without_credit(s) for s in samples]


def _without_credit(sample: Sample) -> Sample:
    length = len(sample.completion_ids)
    return replace(sample, advantages=np.zeros(length, np.float32), loss_mask=np.zeros(length, bool))


def train(resolved: Resolved, *, resume: Resume) -> int:
    """`grpo train`: trains to `run.steps`, prints what came of it and returns the exit code (0, 75 or 130).

    Raises:
        InputError: input that cannot be used; nothing on disk has changed by then.
        RuntimeError: too many non-finite updates in a row.
    """
    settings = resolved.settings
    run = RunDirectory.of(settings.run)
    check_claim(run, resume)
    training_input = read_training_input(pinned(settings, run))
    with ExitStack() as stack:
        rewards = stack.enter_context(training_input.rewards(settings))
        topology.start(settings.mesh)
        session = Session.open(settings, training_input.model)
        check_rows(settings, session)
        if jax.process_index() == 0:
            stack.enter_context(claim(run))
        exit_code, history = _train_in(run, resolved, session, training_input, rewards, stack)
    # Only now: the board, while it lives, takes stdout with it to stderr.
    if jax.process_index() == 0:
        print(summary_text(history, path=str(run.path)), flush=True)
    return exit_code


def _train_in(
    run: RunDirectory,
    resolved: Resolved,
    session: Session,
    training_input: TrainingInput,
    rewards: Rewards,
    stack: ExitStack,
) -> tuple[int, Sequence[Mapping[str, Any]]]:
    """The exit code and every line of `metrics.jsonl`; empty on all processes but the first."""
    settings, is_first = resolved.settings, jax.process_index() == 0
    learning = wire_learning(settings, session)
    compilations = stack.enter_context(closing(CompilationCounter()))
    checkpoints = Checkpoints(
        run.checkpoints, keep=settings.checkpoint.keep, shapes=learning.shapes, shardings=learning.shardings
    )
    stack.callback(checkpoints.close)
    state, progress = _open_state(checkpoints, session, learning, training_input)
    reference = _reference(state, progress, session) if settings.algorithm.beta > 0 else None
    trainer = Trainer(settings, session, learning, training_input.prompts, reference, rewards)
    board = stack.enter_context(Board(num_steps=settings.run.steps, first_step=progress.step, shown=is_first))
    board.tell((training_input.report, *rewards.reports))
    if is_first:
        run.write_settings(resolved)
        record_commit(run, settings, training_input.model.files.commit)
    last_step = progress.step if progress.step else None
    journal = Journal(run, resolved, last_step=last_step, wandb_id=progress.wandb_id) if is_first else NoJournal()
    stack.callback(journal.close)
    progress = replace(progress, wandb_id=journal.wandb_id)
    interrupts = stack.enter_context(Interrupts())
    if is_first and settings.logging.report:
        stack.callback(_report, run, board, journal)
    watch = Watch(journal.history)
    held_out = host_share(training_input.held_out) if training_input.held_out else []
    if progress.step:
        board.say(f"continuing after step {progress.step} of {settings.run.steps}")
    elif held_out:
        journal.write(0, _evaluate(trainer, state.params, held_out, 0, run, journal, board))
    exit_code = 0
    for step in range(progress.step + 1, settings.run.steps + 1):
        start, timer = time.perf_counter(), Timer(board)
        state, samples, metrics = trainer.step(state, step=step, position=progress.position, timer=timer)
        if settings.logging.save_rollouts:
            journal.write_samples(run.rollouts(step), samples)
        is_last, asked = step == settings.run.steps, interrupts.agreed_exit_code(step)
        # A signal during the last step changes nothing: the run is complete.
        exit_code = 0 if is_last else asked
        seconds = time.perf_counter() - start
        record = {
            "policy/kl": None,  # until a penalty measures it
            **metrics,
            **timer.seconds,
            "time/step_s": seconds,
            **step_performance(samples, trainer.work, seconds=seconds),
            "perf/compilations": compilations.take(),
        }
        if held_out and (is_last or step % settings.eval.every_steps == 0):
            record |= _evaluate(trainer, state.params, held_out, step, run, journal, board)
        progress = replace(progress, step=step, position=progress.position + trainer.prompts_per_step)
        _tell(step, record, samples, settings=settings, watch=watch, board=board, journal=journal)
        _stop_if_diverged(metrics, settings)
        if is_last or exit_code or step % settings.checkpoint.every_steps == 0:
            board.phase("save")
            checkpoints.save(state, progress)
        if exit_code:
            break
    checkpoints.finish()
    return exit_code, journal.history


def _tell(
    step: int,
    record: dict[str, Any],
    samples: Sequence[Sample],
    *,
    settings: Settings,
    watch: Watch,
    board: Board,
    journal: Journal | NoJournal,
) -> None:
    """A step's figures, some completions where it is their turn, and what is wrong."""
    journal.write(step, record)
    board.step(step, record)
    every = settings.logging.completions_every_steps
    if every and (step == 1 or step % every == 0):
        table = completions_table(samples, step=step)
        board.completions(table)
        journal.completions(table)
    for alert in watch.observe({"step": step, **record}):
        board.alert(alert)
        journal.alert(alert)


def _report(run: RunDirectory, board: Board, journal: Journal | NoJournal) -> None:
    """The report of what there is, however the run ended. It is a convenience: its failure is not the run's."""
    if not any("reward/mean" in record for record in journal.history):
        return
    board.phase("report")
    try:
        board.say(f"report: {write_report(run.path)['report']}")
    except Exception as error:
        log.warning(
            "the report could not be written (%s: %s); `grpo report %s` tries again",
            type(error).__name__,
            error,
            run.path,
        )


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
    moment = Moment(step, trainer.settings.run.steps)
    judged = evaluate(trainer.session, trainer.session.engine.weights(params), prompts, trainer.rewards, moment)
    board.tell(judged.notices)
    _check_rewards(judged)
    metrics = evaluation_metrics(judged)
    journal.write_samples(run.evaluation(step), judged.samples)
    board.say(evaluation_line(step, metrics))
    return {**metrics, "time/eval_s": time.perf_counter() - start}


def _check_rewards(scored: Scored) -> None:
    """Raises RuntimeError, on every host what stops one of them: alone, the others would wait for it for ever."""
    if max_over_hosts(np.asarray(scored.problem is not None)):
        raise RuntimeError(scored.problem or "a reward function failed on another host, which says why")
    num_kept = sum_over_hosts(np.asarray(sum(s.reward is not None for s in scored.samples)))
    if num_kept == 0:
        raise RuntimeError(
            "no sample of this step has a reward, each one was dropped (reward.on_error); first: "
            f"{scored.notices[0]}. Mend the reward functions before going on"
        )


def _stop_if_diverged(metrics: dict[str, float], settings: Settings) -> None:
    if metrics["policy/nonfinite_in_a_row"] >= settings.optimizer.max_nonfinite_steps:
        raise RuntimeError(
            f"{int(metrics['policy/nonfinite_in_a_row'])} optimizer steps in a row had a NaN or infinite loss or "
            "gradient; the weights are those before them. Lower optimizer.learning_rate, or train in float32"
        )
