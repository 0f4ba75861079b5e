"""The training step: rollout -> reward -> score -> advantage -> update."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from app.batching.metrics import scoring_batching_metrics
from app.batching.micro_batcher import gather_lengths
from app.checkpoint.network_states import RunState
from app.distributed.collective_files import gather_lines_to_first_host
from app.distributed.preemption import cancellation_barrier
from app.evaluation.evaluator import evaluate
from app.mesh.placement import to_device_memory
from app.model.decoder import Params
from app.records.sample import Prompt, Sample
from app.reward.aggregate import RewardedSamples, merge_rewarded
from app.reward.plugin import StepInfo
from app.reward.reward_functions import ComputeRewards, RewardFunctions
from app.reward.saved_rewards import reuse_saved_rewards
from app.runtime.advantages import AdvantageResult
from app.runtime.health_checks import check_rewards
from app.runtime.reward_model import RewardModel, RewardPass, reward_model_metrics
from app.runtime.session import Session
from app.tracking.compilation_counter import CompilationCounter
from app.tracking.console import ProgressDisplay
from app.tracking.episode_metrics import episode_metrics
from app.tracking.flops import make_step_flops
from app.tracking.metrics import mismatch_metrics, reward_counts, sample_metrics
from app.tracking.performance import async_metrics, rollout_performance, schedule_performance
from app.tracking.timer import StepTimer
from app.training.dynamic_sampling import DynamicSamplingResult, dynamic_sampling_metrics, sample_until_filled
from app.training.learner import LearnerGroup
from app.training.replay import Replay
from app.training.rollout_source import ReplayRolloutSource, RolloutSource, make_rollout_source
from app.update.mini_batches import EpochMiniBatches, select_samples
from settings import Settings
from settings.schema.score import ScoredRole


@dataclass
class Trainer:
    """The stages of a training step, configured for a run."""

    settings: Settings
    session: Session
    learner_group: LearnerGroup
    prompts: Sequence[Prompt]
    reference_params: Params | None
    """Reference weights, maybe in host memory; None, and no memory, if `algorithm.beta` is 0."""
    rewards: RewardFunctions
    reward_model: RewardModel | None = None
    replay: Replay | None = None
    """Saved samples to learn from; None if they are generated."""
    rollout_source: RolloutSource = field(init=False)
    compute_rewards: ComputeRewards = field(init=False)

    def __post_init__(self) -> None:
        self.compute_rewards = self.rewards.compute_rewards
        if self.replay is None:
            self.rollout_source = make_rollout_source(
                self.session, self.prompts, max_rounds=self.learner_group.max_rounds
            )
            return
        self.rollout_source = ReplayRolloutSource(self.replay, num_groups=self.settings.rollout.prompts_per_step)
        if self.replay.uses_saved_rewards:
            self.compute_rewards = partial(reuse_saved_rewards, names=self.rewards.fallible_names)

    def step(
        self, state: RunState, *, step: int, position: int, timer: StepTimer
    ) -> tuple[RunState, list[Sample], dict[str, float | None]]:
        """Runs one training step. `position` is the number of prompts taken before it.

        Raises:
            StoppedError: generation was stopped, on this host or another; the state is unchanged.
        """
        policy = self.session.full_params(state.policy.params)
        sampling, scored, reward_passes = self.rollout(policy, step=step, position=position, timer=timer)
        del policy
        drawn = self.learner_group.mini_batch_sampler(sampling.samples, step)
        with timer.phase("score"):
            samples, scoring = self.score(state, sampling.samples, drawn[0], timer)
        with timer.phase("advantage"):
            advantages = self.compute_advantages(samples, state.kl_coef)
            samples = advantages.samples
        learns = self.trains_policy(step)
        with timer.phase("update"):
            state, metrics = self.update(state, select_samples(samples, drawn), trains_policy=learns)
            # The coefficient only adapts in steps that train the policy.
            state = replace(state, kl_coef=advantages.kl_coef) if learns else state
        if self.session.generates_async:
            with timer.phase("publish"):
                self.rollout_source.publish(self.session.full_params(state.policy.params), step=step)
        step_metrics = {**reward_counts(scored), **dynamic_sampling_metrics(sampling, scored.samples)}
        step_metrics |= rollout_performance(self.session.take_counters()) | schedule_performance(
            self.session.take_schedule_metrics()
        )
        if self.session.generates_async:
            step_metrics |= async_metrics(samples, step=step, num_ready=self.rollout_source.num_ready)
        seconds = timer.seconds.get("time/score_reward_s", 0.0)
        rewarded = sample_metrics(samples, self.rewards.reward_names) | reward_model_metrics(
            reward_passes, seconds=seconds
        )
        step_metrics |= self._work_metrics(scored.samples, samples, reward_passes, trains_policy=learns)
        step_metrics |= mismatch_metrics(samples)
        if self.settings.env.is_used:
            step_metrics |= episode_metrics(samples)
        return state, samples, {**rewarded, **step_metrics, **scoring, **advantages.metrics, **metrics}

    def _work_metrics(
        self, sampled: Sequence[Sample], learned: Sequence[Sample], reward_passes: Sequence[RewardPass],
        *, trains_policy: bool,
    ) -> dict[str, float]:  # fmt: skip
        """Returns the tokens and FLOPs of a step, over all hosts; this is a collective call."""
        (of_rollout, _), (of_update, _) = map(gather_lengths, (sampled, learned))
        reward_model = self.reward_model and self.reward_model.spec
        work = make_step_flops(self.settings, self.session, reward_model, trains_policy=trains_policy)
        flops = work.total(
            sampled=None if self.replay else of_rollout,
            learned=of_update,
            rewarded=[one.cut.lengths for one in reward_passes],
        )
        return {"perf/flops": flops, "data/num_tokens": int(of_rollout.totals.sum())}

    def trains_policy(self, step: int) -> bool:
        """Returns whether a step updates the policy: not while the critic warms up."""
        return not self.settings.has_critic or step > self.settings.critic.warmup_steps

    def rollout(
        self, params: Params, *, step: int, position: int, timer: StepTimer
    ) -> tuple[DynamicSamplingResult, RewardedSamples, list[RewardPass]]:
        """Returns this host's rewarded groups of a step, all samples of its rounds, and the reward model's passes.

        Raises:
            StoppedError: generation was stopped, on this host or another.
        """
        rounds: list[RewardedSamples] = []
        reward_passes: list[RewardPass] = []
        with self.rollout_source.rounds_for_step(params, step=step, position=position) as take:

            def next_round(number: int) -> list[Sample]:
                # The wait for the slowest host is part of the phase.
                with timer.phase("rollout"), cancellation_barrier():
                    samples = take(number)
                rounds.append(self.reward(samples, reward_passes, step=step, timer=timer))
                return rounds[-1].samples

            sampling = sample_until_filled(
                next_round,
                group_filter=self.learner_group.group_filter,
                num_groups=self.settings.rollout.prompts_per_step,
                max_rounds=self.learner_group.max_rounds,
            )
        return sampling, merge_rewarded(rounds), reward_passes

    def reward(
        self, samples: list[Sample], reward_passes: list[RewardPass], *, step: int, timer: StepTimer
    ) -> RewardedSamples:
        """Returns the samples with their rewards; adds a pass of the reward model to `reward_passes`."""
        with timer.phase("reward"):
            model_outcomes = None
            if self.reward_model is not None:
                with timer.phase("score_reward"), closing(CompilationCounter()) as compilations:
                    model_outcomes, plan = self.reward_model.score(samples)
                reward_passes.append(RewardPass(plan, compilations.take_count()))
            scored = self.compute_rewards(
                samples, StepInfo(step, self.settings.run.steps), model_outcomes=model_outcomes
            )
            timer.display.print_lines(gather_lines_to_first_host(scored.notices))
            check_rewards(scored)
        return scored

    def score(
        self, state: RunState, samples: list[Sample], first_epoch: Sequence[np.ndarray], timer: StepTimer
    ) -> tuple[list[Sample], dict[str, float]]:
        """Returns the samples with the logprobs and values that the updates need, and their metrics.

        Each mini-batch of the first epoch is scored by itself: with equal quotas the update has the same rows.
        """
        metrics: dict[str, float] = {}
        for role in self.settings.scored_roles:
            plans, scored = [], dict[int, Sample]()
            with timer.phase(f"score_{role}"), closing(CompilationCounter()) as compilations:
                weights = self.params_for_role(role, state)
                for part in first_epoch:
                    mini_batch = [samples[i] for i in part]
                    mini_batch, plan = self.session.score(
                        weights, mini_batch, role, batcher=self.learner_group.score_batchers[role]
                    )
                    scored |= zip(part.tolist(), mini_batch, strict=True)
                    plans.append(plan)
                del weights
            samples = [scored[i] for i in range(len(samples))]
            metrics |= {
                **scoring_batching_metrics(role, plans, seconds=timer.seconds[f"time/score_{role}_s"]),
                f"perf/score_{role}_compilations": compilations.take_count(),
            }
        return samples, metrics

    def params_for_role(self, role: ScoredRole, state: RunState) -> Params:
        """Returns the weights that score for a role, on the devices."""
        if role == "reference":
            return to_device_memory(self.reference_params)
        if role == "policy":
            return self.session.full_params(state.policy.params)
        assert state.critic is not None
        return state.critic.params

    def update(
        self, state: RunState, epochs: EpochMiniBatches, *, trains_policy: bool
    ) -> tuple[RunState, dict[str, float | None]]:
        """Returns the state after the step's updates, and their metrics. Critic and policy use the same mini-batches.

        While the critic warms up, the policy's state does not change and its metrics are None.
        """
        temperature, metrics = self.settings.rollout.temperature, dict[str, float | None]()
        policy, critic = state.policy, state.critic
        if critic is not None:
            assert self.learner_group.critic is not None
            critic, critic_metrics = self.learner_group.critic.updater.update(critic, epochs, temperature=temperature)
            metrics |= critic_metrics
        if trains_policy:
            updater, frozen = self.learner_group.policy.updater, self.session.frozen_params
            policy, policy_metrics = updater.update(policy, epochs, temperature=temperature, frozen=frozen)
            metrics |= policy_metrics
        else:
            metrics |= self.learner_group.policy.null_metrics(policy.params, self.session.frozen_params)
        return replace(state, policy=policy, critic=critic), metrics

    def compute_advantages(self, samples: list[Sample], kl_coef: float) -> AdvantageResult:
        """Computes the advantages of the samples that have a reward.

        The others stay in place, masked out of the loss: shapes, and the parts of mini-batches and hosts, do not depend
        on their number.
        """
        advantages = self.learner_group.advantage_estimator([s for s in samples if s.reward is not None], kl_coef)
        rest = iter(advantages.samples)
        return advantages._replace(
            samples=[next(rest) if s.reward is not None else _with_zero_advantages(s) for s in samples]
        )

    def evaluate(
        self, params: Params, prompts: Sequence[Prompt], *, step: int, display: ProgressDisplay
    ) -> RewardedSamples:
        """Samples and rewards this host's part of the evaluation prompts."""
        display.set_phase("evaluate")
        weights = self.session.engine.to_decode_weights(params)
        rewarded = evaluate(self.session, weights, prompts, self.rewards, StepInfo(step, self.settings.run.steps))
        if not self.session.generates_async:
            # The next step must report its own rollouts only.
            self.session.take_counters()
            self.session.take_schedule_metrics()
        display.print_lines(gather_lines_to_first_host(rewarded.notices))
        check_rewards(rewarded)
        return rewarded


def _with_zero_advantages(sample: Sample) -> Sample:
    length = len(sample.completion_ids)
    zeros = np.zeros(length, np.float32)
    return replace(sample, advantages=zeros, returns=zeros, loss_mask=np.zeros(length, bool))
