"""The corridor: rollout -> reward -> score -> advantage -> update."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import numpy as np

from app.batching.metrics import scoring_batching_metrics
from app.checkpoint.run_state import RunState
from app.distributed.lockstep import gather_lines_to_first_host
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
from app.tracking.flops import NO_TOKENS, TokenCounts, make_step_flops
from app.tracking.metrics import reward_counts, sample_metrics
from app.tracking.performance import rollout_performance, schedule_performance, staleness_metrics
from app.tracking.timer import StepTimer
from app.training.dynamic_sampling import DynamicSamplingResult, dynamic_sampling_metrics, sample_until_filled
from app.training.learner import LearnerGroup
from app.training.replay import Replay
from app.training.rollout_source import ReplayRolloutSource, RolloutSource, make_rollout_source
from app.update.mini_batches import EpochMiniBatches, select_samples
from settings import Settings
from settings.schema.settings import ScoredRole


@dataclass
class Trainer:
    """The rooms of one run and the order of its prompts."""

    settings: Settings
    session: Session
    learner_group: LearnerGroup
    prompts: Sequence[Prompt]
    reference_params: Params | None
    """Frozen weights of the KL penalty, maybe in the hosts' memory; None, and no memory, when `algorithm.beta` is 0."""
    rewards: RewardFunctions
    reward_model: RewardModel | None = None
    replay: Replay | None = None
    """Samples to learn from, instead of generating them."""
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
        """One walk down the corridor. `position` counts the prompts taken before this step.

        Raises:
            StoppedError: generation was stopped, on this host or another; the state is as it was.
        """
        policy = self.session.full_params(state.policy.params)
        refilled, scored, asking = self.rollout(policy, step=step, position=position, timer=timer)
        del policy
        drawn = self.learner_group.mini_batch_sampler(refilled.samples, step)
        with timer.phase("score"):
            samples, scoring = self.score(state, refilled.samples, drawn[0], timer)
        with timer.phase("advantage"):
            credited = self.compute_advantages(samples, state.kl_coef)
            samples = credited.samples
        learns = self.trains_policy(step)
        with timer.phase("update"):
            state, metrics = self.update(state, select_samples(samples, drawn), trains_policy=learns)
            # A policy that stands still has the same KL whatever its coefficient.
            state = replace(state, kl_coef=credited.kl_coef) if learns else state
        self.rollout_source.publish(self.session.full_params(state.policy.params), step=step)
        told = {**reward_counts(scored), **dynamic_sampling_metrics(refilled, scored.samples)}
        told |= rollout_performance(self.session.take_counters()) | schedule_performance(
            self.session.take_schedule_metrics()
        )
        told |= staleness_metrics(samples, step=step) if self.session.generates_async else {}
        rewarded = {**sample_metrics(samples, self.rewards.reward_names), **told, **asking}
        sampled, learned = TokenCounts.count_over_hosts(scored.samples, samples)
        work = make_step_flops(self.settings, self.session, trains_policy=learns)
        drawn_now = NO_TOKENS if self.replay else sampled
        flops = {"perf/flops": work.total(sampled=drawn_now, learned=learned)}
        return state, samples, {**rewarded, **scoring, **credited.metrics, **metrics, **flops}

    def trains_policy(self, step: int) -> bool:
        """Not while only the critic warms up."""
        return not self.settings.has_critic or step > self.settings.critic.warmup_steps

    def rollout(
        self, params: Params, *, step: int, position: int, timer: StepTimer
    ) -> tuple[DynamicSamplingResult, RewardedSamples, dict[str, float]]:
        """This host's groups of a step with their rewards, and all that was sampled to find them.

        Also the metrics of the reward model's passes.

        Raises:
            StoppedError: generation was stopped, on this host or another; nothing has been learned.
        """
        rounds: list[RewardedSamples] = []
        asked: list[RewardPass] = []
        with self.rollout_source.rounds_for_step(params, step=step, position=position, timer=timer) as take:

            def next_round(number: int) -> list[Sample]:
                with cancellation_barrier():
                    samples = take(number)
                rounds.append(self.reward(samples, asked, step=step, timer=timer))
                return rounds[-1].samples

            refilled = sample_until_filled(
                next_round,
                group_filter=self.learner_group.group_filter,
                num_groups=self.settings.rollout.prompts_per_step,
                max_rounds=self.learner_group.max_rounds,
            )
        return refilled, merge_rewarded(rounds), reward_model_metrics(asked)

    def reward(
        self, samples: list[Sample], reward_passes: list[RewardPass], *, step: int, timer: StepTimer
    ) -> RewardedSamples:
        """The samples with their rewards; a pass of the reward model is added to `asked`."""
        with timer.phase("reward"):
            model_outcomes = None
            if self.reward_model is not None:
                with timer.phase("score_reward"), closing(CompilationCounter()) as compilations:
                    model_outcomes, cut = self.reward_model.score(samples)
                reward_passes.append(RewardPass(cut, compilations.take_count()))
            scored = self.compute_rewards(
                samples, StepInfo(step, self.settings.run.steps), model_outcomes=model_outcomes
            )
            timer.display.print_lines(gather_lines_to_first_host(scored.notices))
            check_rewards(scored)
        return scored

    @property
    def global_prompts_per_step(self) -> int:
        """Over all hosts."""
        return self.settings.rollout.prompts_per_step * jax.process_count()

    def score(
        self, state: RunState, samples: list[Sample], first_epoch: Sequence[np.ndarray], timer: StepTimer
    ) -> tuple[list[Sample], dict[str, float]]:
        """The samples with the logprobs and values that the step needs before its updates, and the metrics of them.

        Cut like the update: by the mini-batches of its first epoch, so that with equal quotas both see the same rows.
        """
        metrics: dict[str, float] = {}
        for role in self.settings.scored_roles:
            cuts, scored = [], dict[int, Sample]()
            with timer.phase(f"score_{role}"), closing(CompilationCounter()) as compilations:
                weights = self.params_for_role(role, state)
                for part in first_epoch:
                    mini_batch = [samples[i] for i in part]
                    mini_batch, cut = self.session.score(
                        weights, mini_batch, role, batcher=self.learner_group.score_batchers[role]
                    )
                    scored |= zip(part.tolist(), mini_batch, strict=True)
                    cuts.append(cut)
                del weights
            samples = [scored[i] for i in range(len(samples))]
            metrics |= {
                **scoring_batching_metrics(role, cuts),
                f"perf/score_{role}_compilations": compilations.take_count(),
            }
        return samples, metrics

    def params_for_role(self, role: ScoredRole, state: RunState) -> Params:
        """On the devices."""
        if role == "reference":
            return to_device_memory(self.reference_params)
        if role == "policy":
            return self.session.full_params(state.policy.params)
        assert state.critic is not None
        return state.critic.params

    def update(
        self, state: RunState, epochs: EpochMiniBatches, *, trains_policy: bool
    ) -> tuple[RunState, dict[str, float | None]]:
        """The state after the step's updates. Critic and policy see the same mini-batches.

        While only the critic warms up, nothing of the policy's state changes, and what its updates measure is None.
        """
        temperature, metrics = self.settings.rollout.temperature, dict[str, float | None]()
        policy, critic = state.policy, state.critic
        if critic is not None:
            assert self.learner_group.critic is not None
            critic, of_critic = self.learner_group.critic.updater.update(critic, epochs, temperature=temperature)
            metrics |= of_critic
        if trains_policy:
            updater, frozen = self.learner_group.policy.updater, self.session.frozen_params
            policy, of_policy = updater.update(policy, epochs, temperature=temperature, frozen=frozen)
            metrics |= of_policy
        else:
            metrics |= self.learner_group.policy.null_metrics(policy.params, self.session.frozen_params)
        return replace(state, policy=policy, critic=critic), metrics

    def compute_advantages(self, samples: list[Sample], kl_coef: float) -> AdvantageResult:
        """Advantages among the samples that have a reward.

        The others keep their place, out of the loss: shapes, and the parts that mini-batches and hosts get, do not
        depend on how many there are.
        """
        credited = self.learner_group.advantage_estimator([s for s in samples if s.reward is not None], kl_coef)
        rest = iter(credited.samples)
        return credited._replace(
            samples=[next(rest) if s.reward is not None else _with_zero_advantages(s) for s in samples]
        )

    def evaluate(
        self, params: Params, prompts: Sequence[Prompt], *, step: int, display: ProgressDisplay
    ) -> RewardedSamples:
        """One judged sample of each held-out prompt of this host's run of them."""
        display.set_phase("evaluate")
        weights = self.session.engine.to_decode_weights(params)
        judged = evaluate(self.session, weights, prompts, self.rewards, StepInfo(step, self.settings.run.steps))
        if not self.session.generates_async:
            # The next step tells of its own rollouts alone.
            self.session.take_counters()
            self.session.take_schedule_metrics()
        display.print_lines(gather_lines_to_first_host(judged.notices))
        check_rewards(judged)
        return judged


def _with_zero_advantages(sample: Sample) -> Sample:
    length = len(sample.completion_ids)
    zeros = np.zeros(length, np.float32)
    return replace(sample, advantages=zeros, returns=zeros, loss_mask=np.zeros(length, bool))
