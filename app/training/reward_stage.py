"""The rewards of a step's samples, by reward functions and the reward model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

from app.distributed.collective_files import gather_lines_to_process_0
from app.mesh.program_cache import CompilationCounter
from app.records.sample import Sample
from app.reward.aggregate import RewardedSamples, merge_rewarded
from app.reward.plugin import StepInfo
from app.reward.reward_functions import ComputeRewards
from app.runtime.health_checks import check_rewards
from app.runtime.reward_model import RewardModel, RewardPass, reward_model_metrics
from app.tracking.sample_metrics import reward_counts
from app.tracking.timer import StepTimer


class RewardedRound(NamedTuple):
    """This host's samples of a round with their rewards."""

    rewarded: RewardedSamples
    model_pass: RewardPass | None
    """The reward model's pass over them; None without one."""


@dataclass(frozen=True)
class RewardStage:
    """Rewards the samples of a step, round by round."""

    compute_rewards: ComputeRewards
    """Computes the rewards, or reuses those that are saved in the samples."""
    num_steps: int
    """Number of steps of the run."""
    model: RewardModel | None = None

    def __call__(self, samples: list[Sample], *, step: int, timer: StepTimer) -> RewardedRound:
        """Returns the samples of a round with their rewards. All hosts must call it together.

        Raises:
            RewardError: training cannot go on with the rewards.
        """
        outcomes = model_pass = None
        with timer.phase("reward"):
            if self.model is not None:
                with timer.phase("score_reward"), closing(CompilationCounter()) as compilations:
                    outcomes, plan = self.model.score(samples)
                model_pass = RewardPass(plan, compilations.take_count())
            rewarded = self.compute_rewards(samples, StepInfo(step, self.num_steps), model_outcomes=outcomes)
            timer.display.print_lines(gather_lines_to_process_0(rewarded.notices))
            check_rewards(rewarded)
        return RewardedRound(rewarded, model_pass)


def model_passes(rounds: Sequence[RewardedRound]) -> list[RewardPass]:
    """Returns the reward model's passes of a step; empty without a reward model."""
    return [one.model_pass for one in rounds if one.model_pass is not None]


def reward_stage_metrics(rounds: Sequence[RewardedRound], timer: StepTimer) -> dict[str, float]:
    """Returns the metrics of all rounds of a step, over all hosts."""
    seconds = timer.seconds.get("time/score_reward_s", 0.0)
    counts = reward_counts(merge_rewarded([one.rewarded for one in rounds]))
    return counts | reward_model_metrics(model_passes(rounds), seconds=seconds)
