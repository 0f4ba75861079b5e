"""Implements the stages of a step that add rewards, logprobs and values to its samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from app.batching.micro_batcher import GlobalPlan, MicroBatcher
from app.batching.packing_metrics import scoring_batching_metrics
from app.checkpoint.train_progress import RunState
from app.distributed.collective_files import gather_lines_to_process_0
from app.mesh.placement import to_device_memory
from app.mesh.program_cache import CompilationCounter
from app.model.decoder import Params
from app.records.sample import Sample
from app.reward.aggregate import RewardedSamples, merge_rewarded
from app.reward.plugin import StepInfo
from app.reward.reward_functions import ComputeRewards
from app.runtime.health_checks import check_rewards
from app.runtime.reward_model import RewardModel
from app.runtime.scoring import ScoringSession
from app.tracking.sample_metrics import reward_counts
from app.tracking.timer import StepTimer
from settings.schema.algorithm import ScoredRole


class RewardedRound(NamedTuple):
    """This host's samples of a round with their rewards."""

    rewarded: RewardedSamples
    model_plan: GlobalPlan | None
    """The reward model's micro-batches of these samples; None without a reward model."""
    num_compilations: int
    """Number of programs compiled for the reward model."""


@dataclass(frozen=True)
class RewardStage:
    """Computes the rewards of a step's samples, round by round."""

    compute_rewards: ComputeRewards
    """Computes the rewards or, in a replay, reuses saved rewards."""
    num_steps: int
    """Number of training steps of the run, which reward functions can read."""
    model: RewardModel | None = None
    check: Callable[[RewardedSamples], None] = check_rewards
    """Raises `RewardError` if training cannot continue with the rewards of a round."""

    def __call__(self, samples: list[Sample], *, step: int, timer: StepTimer) -> RewardedRound:
        """Returns the samples of a round with their rewards. All hosts must call it together.

        Raises:
            RewardError: training cannot continue with the rewards.
        """
        outcomes, plan, num_compilations = None, None, 0
        with timer.phase("reward"):
            if self.model is not None:
                with timer.phase("score_reward"), closing(CompilationCounter()) as compilations:
                    outcomes, plan = self.model.score(samples)
                num_compilations = compilations.take_count()
            rewarded = self.compute_rewards(samples, StepInfo(step, self.num_steps), model_outcomes=outcomes)
            timer.display.print_lines(gather_lines_to_process_0(rewarded.notices))
            self.check(rewarded)
        return RewardedRound(rewarded, plan, num_compilations)


def reward_model_plans(rounds: Sequence[RewardedRound]) -> list[GlobalPlan]:
    return [one.model_plan for one in rounds if one.model_plan is not None]


def reward_stage_metrics(rounds: Sequence[RewardedRound], timer: StepTimer) -> dict[str, float]:
    """Returns the reward metrics of all rounds of a step, over all hosts."""
    counts = reward_counts(merge_rewarded([one.rewarded for one in rounds]))
    if not (plans := reward_model_plans(rounds)):
        return counts
    return {
        **counts,
        **scoring_batching_metrics("reward", plans, seconds=timer.seconds["time/score_reward_s"]),
        "perf/score_reward_compilations": sum(one.num_compilations for one in rounds),
    }


@dataclass(frozen=True)
class ScoreStage:
    """Computes the logprobs and values of a step's samples that the algorithm needs."""

    session: ScoringSession
    batchers: Mapping[ScoredRole, MicroBatcher]
    reference_params: Params | None
    """Weights of the reference, possibly in host memory; None if it is not scored."""

    def __call__(
        self, state: RunState, samples: list[Sample], mini_batches: Sequence[np.ndarray], timer: StepTimer
    ) -> tuple[list[Sample], dict[str, float]]:
        """Returns the samples with the logprobs and values of all scored roles, and the metrics of the passes.

        Each mini-batch of the first epoch is scored separately, so that scoring packs the same rows as the update if
        their token quotas are equal.

        Args:
            mini_batches: the indices of the samples in each mini-batch of the first epoch.
        """
        metrics: dict[str, float] = {}
        with timer.phase("score"):
            for role, batcher in self.batchers.items():
                plans, scored = [], dict[int, Sample]()
                with timer.phase(f"score_{role}"), closing(CompilationCounter()) as compilations:
                    weights = self._params_for_role(role, state)
                    for part in mini_batches:
                        mini_batch = [samples[i] for i in part]
                        mini_batch, plan = self.session.score(weights, mini_batch, role, batcher=batcher)
                        scored |= zip(part.tolist(), mini_batch, strict=True)
                        plans.append(plan)
                    del weights
                samples = [scored[i] for i in range(len(samples))]
                metrics |= {
                    **scoring_batching_metrics(role, plans, seconds=timer.seconds[f"time/score_{role}_s"]),
                    f"perf/score_{role}_compilations": compilations.take_count(),
                }
        return samples, metrics

    def _params_for_role(self, role: ScoredRole, state: RunState) -> Params:
        if role == "reference":
            return to_device_memory(self.reference_params)
        if role == "policy":
            return self.session.full_params(state.policy.params)
        assert state.critic is not None
        return state.critic.params
