"""The corridor: rollout -> reward -> score -> advantage -> update."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import numpy as np

from app.batching.metrics import scoring_metrics
from app.checkpoint.run_state import RunState
from app.distributed.lockstep import lines_to_first_host
from app.distributed.preemption import stopped_together
from app.evaluation.evaluator import evaluate
from app.mesh.placement import to_device_memory
from app.model.decoder import Params
from app.records.sample import Prompt, Sample
from app.reward.aggregate import Scored, joined
from app.reward.plugin import Moment
from app.reward.reward_functions import Rewarding, Rewards
from app.reward.saved_rewards import as_saved
from app.runtime.advantages import Credited
from app.runtime.flops import NO_TOKENS, Tokens, work_of
from app.runtime.health_checks import check_rewards
from app.runtime.reward_model import RewardModel, RewardPass, asking_metrics
from app.runtime.session import Session
from app.tracking.compilation_counter import CompilationCounter
from app.tracking.console import Board
from app.tracking.metrics import reward_counts, sample_metrics
from app.tracking.performance import rollout_performance, schedule_performance, staleness_metrics
from app.tracking.timer import Timer
from app.training.dynamic_sampling import Refilled, refill, refill_metrics
from app.training.learner import Learning
from app.training.replay import Replay
from app.training.rollout_source import Replayed, Rounds, open_rounds
from app.update.mini_batches import Epochs, picked
from settings import Settings
from settings.schema.settings import ScoredRole


@dataclass
class Trainer:
    """The rooms of one run and the order of its prompts."""

    settings: Settings
    session: Session
    learning: Learning
    prompts: Sequence[Prompt]
    reference: Params | None
    """Frozen weights of the KL penalty, maybe in the hosts' memory; None, and no memory, when `algorithm.beta` is 0."""
    rewards: Rewards
    reward_model: RewardModel | None = None
    replay: Replay | None = None
    """Samples to learn from, instead of generating them."""
    rounds: Rounds = field(init=False)
    rewarding: Rewarding = field(init=False)

    def __post_init__(self) -> None:
        self.rewarding = self.rewards.score
        if self.replay is None:
            self.rounds = open_rounds(self.session, self.prompts, max_rounds=self.learning.max_rounds)
            return
        self.rounds = Replayed(self.replay, num_groups=self.settings.rollout.prompts_per_step)
        if self.replay.takes_rewards:
            self.rewarding = partial(as_saved, names=self.rewards.asked)

    def step(
        self, state: RunState, *, step: int, position: int, timer: Timer
    ) -> tuple[RunState, list[Sample], dict[str, float | None]]:
        """One walk down the corridor. `position` counts the prompts taken before this step.

        Raises:
            StoppedError: generation was stopped, on this host or another; the state is as it was.
        """
        policy = self.session.whole(state.policy.params)
        refilled, scored, asking = self.rollout(policy, step=step, position=position, timer=timer)
        del policy
        drawn = self.learning.mini_batches(refilled.samples, step)
        with timer.phase("score"):
            samples, scoring = self.score(state, refilled.samples, drawn[0], timer)
        with timer.phase("advantage"):
            credited = self.credit(samples, state.kl_coef)
            samples = credited.samples
        learns = self.policy_learns(step)
        with timer.phase("update"):
            state, metrics = self.update(state, picked(samples, drawn), policy_learns=learns)
            # A policy that stands still has the same KL whatever its coefficient.
            state = replace(state, kl_coef=credited.kl_coef) if learns else state
        self.rounds.publish(self.session.whole(state.policy.params), step=step)
        told = {**reward_counts(scored), **refill_metrics(refilled, scored.samples)}
        told |= rollout_performance(self.session.take_tally()) | schedule_performance(self.session.take_figures())
        told |= staleness_metrics(samples, step=step) if self.session.runs_ahead else {}
        rewarded = {**sample_metrics(samples, self.rewards.names), **told, **asking}
        sampled, learned = Tokens.of(scored.samples, samples)
        work = work_of(self.settings, self.session, policy_learns=learns)
        drawn_now = NO_TOKENS if self.replay else sampled
        flops = {"perf/flops": work.flops(sampled=drawn_now, learned=learned)}
        return state, samples, {**rewarded, **scoring, **credited.metrics, **metrics, **flops}

    def policy_learns(self, step: int) -> bool:
        """Not while only the critic warms up."""
        return not self.settings.has_critic or step > self.settings.critic.warmup_steps

    def rollout(
        self, params: Params, *, step: int, position: int, timer: Timer
    ) -> tuple[Refilled, Scored, dict[str, float]]:
        """This host's groups of a step with their rewards, and all that was sampled to find them.

        Also the metrics of the reward model's passes.

        Raises:
            StoppedError: generation was stopped, on this host or another; nothing has been learned.
        """
        rounds: list[Scored] = []
        asked: list[RewardPass] = []
        with self.rounds.of_step(params, step=step, position=position, timer=timer) as take:

            def next_round(number: int) -> list[Sample]:
                with stopped_together():
                    samples = take(number)
                rounds.append(self.reward(samples, asked, step=step, timer=timer))
                return rounds[-1].samples

            refilled = refill(
                next_round,
                keep=self.learning.keep,
                num_groups=self.settings.rollout.prompts_per_step,
                max_rounds=self.learning.max_rounds,
            )
        return refilled, joined(rounds), asking_metrics(asked)

    def reward(self, samples: list[Sample], asked: list[RewardPass], *, step: int, timer: Timer) -> Scored:
        """The samples with their rewards; a pass of the reward model is added to `asked`."""
        with timer.phase("reward"):
            of_model = None
            if self.reward_model is not None:
                with timer.phase("score_reward"), closing(CompilationCounter()) as compilations:
                    of_model, cut = self.reward_model.outcomes(samples)
                asked.append(RewardPass(cut, compilations.take()))
            scored = self.rewarding(samples, Moment(step, self.settings.run.steps), of_model=of_model)
            timer.board.tell(lines_to_first_host(scored.notices))
            check_rewards(scored)
        return scored

    @property
    def prompts_per_step(self) -> int:
        """Over all hosts."""
        return self.settings.rollout.prompts_per_step * jax.process_count()

    def score(
        self, state: RunState, samples: list[Sample], first_epoch: Sequence[np.ndarray], timer: Timer
    ) -> tuple[list[Sample], dict[str, float]]:
        """The samples with the logprobs and values that the step needs before its updates, and the metrics of them.

        Cut like the update: by the mini-batches of its first epoch, so that with equal quotas both see the same rows.
        """
        metrics: dict[str, float] = {}
        for role in self.settings.scored_roles:
            cuts, scored = [], dict[int, Sample]()
            with timer.phase(f"score_{role}"), closing(CompilationCounter()) as compilations:
                weights = self.weights_of(role, state)
                for part in first_epoch:
                    mini_batch = [samples[i] for i in part]
                    mini_batch, cut = self.session.score(weights, mini_batch, role, cut=self.learning.cuts[role])
                    scored |= zip(part.tolist(), mini_batch, strict=True)
                    cuts.append(cut)
                del weights
            samples = [scored[i] for i in range(len(samples))]
            metrics |= {**scoring_metrics(role, cuts), f"perf/score_{role}_compilations": compilations.take()}
        return samples, metrics

    def weights_of(self, role: ScoredRole, state: RunState) -> Params:
        """On the devices."""
        if role == "reference":
            return to_device_memory(self.reference)
        if role == "policy":
            return self.session.whole(state.policy.params)
        assert state.critic is not None
        return state.critic.params

    def update(
        self, state: RunState, epochs: Epochs, *, policy_learns: bool
    ) -> tuple[RunState, dict[str, float | None]]:
        """The state after the step's updates. Critic and policy see the same mini-batches.

        While only the critic warms up, nothing of the policy's state changes, and what its updates measure is None.
        """
        temperature, metrics = self.settings.rollout.temperature, dict[str, float | None]()
        policy, critic = state.policy, state.critic
        if critic is not None:
            assert self.learning.critic is not None
            critic, of_critic = self.learning.critic.updater.update(critic, epochs, temperature=temperature)
            metrics |= of_critic
        if policy_learns:
            updater, frozen = self.learning.policy.updater, self.session.frozen
            policy, of_policy = updater.update(policy, epochs, temperature=temperature, frozen=frozen)
            metrics |= of_policy
        else:
            metrics |= self.learning.policy.unmeasured(policy.params, self.session.frozen)
        return replace(state, policy=policy, critic=critic), metrics

    def credit(self, samples: list[Sample], kl_coef: float) -> Credited:
        """Advantages among the samples that have a reward.

        The others keep their place, out of the loss: shapes, and the parts that mini-batches and hosts get, do not
        depend on how many there are.
        """
        credited = self.learning.credit([s for s in samples if s.reward is not None], kl_coef)
        rest = iter(credited.samples)
        return credited._replace(samples=[next(rest) if s.reward is not None else _without_credit(s) for s in samples])

    def evaluate(self, params: Params, prompts: Sequence[Prompt], *, step: int, board: Board) -> Scored:
        """One judged sample of each held-out prompt of this host's run of them."""
        board.phase("evaluate")
        weights = self.session.engine.weights(params)
        judged = evaluate(self.session, weights, prompts, self.rewards, Moment(step, self.settings.run.steps))
        if not self.session.runs_ahead:
            # The next step tells of its own rollouts alone.
            self.session.take_tally()
            self.session.take_figures()
        board.tell(lines_to_first_host(judged.notices))
        check_rewards(judged)
        return judged


def _without_credit(sample: Sample) -> Sample:
    length = len(sample.completion_ids)
    zeros = np.zeros(length, np.float32)
    return replace(sample, advantages=zeros, returns=zeros, loss_mask=np.zeros(length, bool))
