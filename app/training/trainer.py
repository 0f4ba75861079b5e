"""Runs a training step: take -> reward -> fill -> score -> advantage -> update -> publish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.batching.micro_batcher import gather_lengths
from app.checkpoint.train_progress import RunState
from app.distributed.preemption import cancellation_barrier
from app.records.sample import Sample
from app.reward.reward_functions import RewardFunctions, accuracy_function_name
from app.rollout.scheduling.protocol import EventRecord
from app.rollout.scheduling.schedule_metrics import ScheduleMetrics
from app.runtime.session import Session
from app.tracking.performance import async_metrics, make_step_flops, rollout_performance, schedule_performance
from app.tracking.rollout_timeline import Timeline
from app.tracking.sample_metrics import episode_metrics, mismatch_metrics, sample_metrics
from app.tracking.timer import StepTimer
from app.training.dynamic_sampling import gather_pass_rates
from app.training.learner import LearnerGroup
from app.training.rollout_source import RolloutSource
from app.training.step_stages import RewardedRound, RewardStage, ScoreStage, reward_model_plans, reward_stage_metrics
from settings import Settings

Metrics = dict[str, float | None]


@dataclass
class Trainer:
    """The stages of a training step, configured for a run."""

    session: Session
    source: RolloutSource
    reward: RewardStage
    score: ScoreStage
    learners: LearnerGroup
    reward_functions: RewardFunctions
    """The run's reward functions; a replay of saved rewards calls them only in evaluations."""
    last_schedule: tuple[int, Sequence[EventRecord], ScheduleMetrics] | None = None
    """(step, events, metrics) of this host's last scheduled rollout; None with asynchronous rollouts."""

    @property
    def settings(self) -> Settings:
        return self.session.settings

    def step(
        self, state: RunState, *, step: int, position: int, timer: StepTimer
    ) -> tuple[RunState, list[Sample], Metrics]:
        """Runs one training step; returns the new state, this host's samples and the metrics.

        Args:
            position: number of prompts that earlier steps took.

        Raises:
            StoppedError: generation was stopped, on this host or another; the state is unchanged.
        """
        rounds: list[RewardedRound] = []
        groups = self.learners.new_groups()
        while not groups.are_complete:
            samples = self.take(state, step=step, position=position, number=len(rounds), timer=timer)
            rounds.append(self.reward(samples, step=step, timer=timer))
            groups.add_round(rounds[-1].rewarded.samples)
        self.source.release_weights()
        samples, filled = groups.fill()
        mini_batches = self.learners.mini_batch_sampler(samples, step)
        samples, scored = self.score(state, samples, mini_batches[0], timer)
        with timer.phase("advantage"):
            samples, advantages, kl_coef = self.learners.advantage_estimator(samples, state.kl_coef)
        with timer.phase("update"):
            state, updated = self.learners.update(state, samples, mini_batches, step=step, kl_coef=kl_coef)
        if self.source.curriculum is not None:
            judge = accuracy_function_name(self.settings.reward)
            sampled = [sample for one in rounds for sample in one.rewarded.samples]
            self.source.curriculum.observe(gather_pass_rates(sampled, judge=judge))
        self.publish(state, step=step, timer=timer)
        measured = self.measure(rounds, samples, step=step, timer=timer)
        return state, samples, {**filled, **scored, **advantages, **updated, **measured}

    def take(self, state: RunState, *, step: int, position: int, number: int, timer: StepTimer) -> list[Sample]:
        """Returns this host's samples of the step's round with index `number` (0, 1, ...)."""
        # The wait for the slowest host is part of the phase.
        with timer.phase("rollout"), cancellation_barrier():
            policy = self.session.scoring.full_params(state.policy.params)
            return self.source.take(policy, step=step, position=position, number=number)

    def publish(self, state: RunState, *, step: int, timer: StepTimer) -> None:
        """Passes the updated policy to the rollout source if rollouts are asynchronous."""
        if self.session.generates_async:
            with timer.phase("publish"):
                self.source.publish(self.session.scoring.full_params(state.policy.params), step=step)

    def measure(
        self, rounds: Sequence[RewardedRound], samples: Sequence[Sample], *, step: int, timer: StepTimer
    ) -> Metrics:
        """Returns the metrics of a step's generation, rewards, tokens and FLOPs, over all hosts.

        Args:
            samples: the samples that the step used for training.
        """
        sampled = [sample for one in rounds for sample in one.rewarded.samples]
        schedules = self.session.take_schedule_metrics()
        # A replay generates nothing.
        if schedules and self.session.workers is not None and not self.session.generates_async:
            self.last_schedule = step, self.session.workers.records, schedules[-1]
        parts = [
            sample_metrics(samples, self.reward_functions.reward_names, self.learners.advantage_estimator.learns_from),
            reward_stage_metrics(rounds, timer),
            rollout_performance(self.session.take_counters()),
            schedule_performance(schedules),
            mismatch_metrics(samples),
            self.work_metrics(sampled, samples, rounds, step=step),
        ]
        if self.session.generates_async:
            parts.append(async_metrics(samples, step=step, num_ready=self.source.num_ready))
        if self.settings.env.is_used:
            parts.append(episode_metrics(samples))
        if self.source.curriculum is not None:
            parts.append(self.source.curriculum.metrics())
        return {name: value for part in parts for name, value in part.items()}

    def timeline(self) -> Timeline | None:
        """Returns the timeline of this host's last scheduled rollout, if there is one."""
        if self.last_schedule is None or self.session.workers is None:
            return None
        step, records, metrics = self.last_schedule
        heading = f"{self.settings.run.name}, step {step}"
        return Timeline.from_records(records, metrics, heading=heading, schedule=self.session.workers.schedule)

    def work_metrics(
        self, sampled: Sequence[Sample], learned: Sequence[Sample], rounds: Sequence[RewardedRound], *, step: int
    ) -> dict[str, float]:
        """Returns the tokens and FLOPs of a step, over all hosts, which must call it together."""
        (of_rollout, _), (of_update, _) = map(gather_lengths, (sampled, learned))
        reward_model = self.reward.model and self.reward.model.spec
        trains_policy = self.learners.trains_policy(step)
        flops = make_step_flops(self.settings, self.session, reward_model, trains_policy=trains_policy).total(
            sampled=of_rollout if self.session.generates == "rollouts" else None,
            learned=of_update,
            rewarded=[plan.lengths for plan in reward_model_plans(rounds)],
        )
        return {"perf/flops": flops, "data/num_tokens": int(of_rollout.totals.sum())}


class SupervisedTrainer(Trainer):
    """The stages of a supervised step on the completions in the data: take -> update."""

    def step(
        self, state: RunState, *, step: int, position: int, timer: StepTimer
    ) -> tuple[RunState, list[Sample], Metrics]:
        samples = self.source.take(state.policy.params, step=step, position=position, number=0)
        mini_batches = self.learners.mini_batch_sampler(samples, step)
        with timer.phase("update"):
            state, updated = self.learners.update(state, samples, mini_batches, step=step, kl_coef=state.kl_coef)
        return state, samples, {**updated, **self.work_metrics(samples, samples, (), step=step)}
