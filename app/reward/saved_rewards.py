"""Rewards that samples bring along: what was said of them is told again, and no function is asked."""

from __future__ import annotations

from collections.abc import Sequence

from app.records.sample import Sample
from app.reward.aggregate import (
    ALL_ABSTAINED,
    ERRORS_FIELD,
    NO_REWARD_FINISH_REASON,
    RewardedSamples,
    RewardFunctionCounts,
    was_dropped_in_rollout,
)
from app.reward.plugin import StepInfo
from app.reward.reward_outcome import RewardOutcome


def has_saved_reward(sample: Sample) -> bool:
    """Whether a sample has its reward, or was left out because there was none for it."""
    return (
        sample.reward is not None or was_dropped_in_rollout(sample) or sample.finish_reason == NO_REWARD_FINISH_REASON
    )


def reuse_saved_rewards(
    samples: Sequence[Sample],
    step_info: StepInfo,
    *,
    model_outcomes: Sequence[RewardOutcome] | None = None,
    names: Sequence[str],
) -> RewardedSamples:
    """The samples as they are, with the counts of the weighing that they come from, whenever and of whatever model.

    Further numbers that plug-ins gave are not among what a sample keeps.

    Args:
        names: of the functions, and of the reward model.
    """
    del step_info, model_outcomes
    usable = [sample for sample in samples if not was_dropped_in_rollout(sample)]
    errors = [_error_lines(sample) for sample in usable]
    nothing = f"{ALL_ABSTAINED.kind}: {ALL_ABSTAINED.text}"
    tallies = {}
    for name in names:
        failed = [any(line.startswith(f"{name}: ") for line in lines) for lines in errors]
        silent = sum(name not in (s.rewards or {}) and not f for s, f in zip(usable, failed, strict=True))
        tallies[name] = RewardFunctionCounts(num_errors=sum(failed), num_abstained=silent, extras={})
    return RewardedSamples(
        list(samples), tallies, sum(nothing in lines for lines in errors), notices=(), fatal_error=None
    )


def _error_lines(sample: Sample) -> list[str]:
    lines = sample.extra.get(ERRORS_FIELD)
    return [line for line in lines if isinstance(line, str)] if isinstance(lines, list) else []
