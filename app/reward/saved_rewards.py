"""Reuse of the rewards saved in samples, without calling a reward function."""

from __future__ import annotations

from collections.abc import Sequence

from app.records.sample import Sample
from app.reward.aggregate import (
    ALL_ABSTAINED,
    ERRORS_FIELD,
    NO_REWARD_FINISH_REASON,
    RewardedSamples,
    RewardFunctionCounts,
    RewardOutcome,
    was_dropped_in_rollout,
)
from app.reward.plugin import StepInfo


def has_saved_reward(sample: Sample) -> bool:
    """Returns whether a sample has a saved reward, or was dropped and cannot have one."""
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
    """Returns the samples unchanged, with counts of errors and abstentions restored from their records.

    Additional metrics of plug-ins are not restored, because samples do not store them.

    Args:
        names: names of the reward functions and of the reward model.
    """
    del step_info, model_outcomes
    usable = [sample for sample in samples if not was_dropped_in_rollout(sample)]
    errors = [_error_lines(sample) for sample in usable]
    nothing = f"{ALL_ABSTAINED.kind}: {ALL_ABSTAINED.text}"
    counts = {}
    for name in names:
        failed = [any(line.startswith(f"{name}: ") for line in lines) for lines in errors]
        num_abstained = sum(name not in (s.rewards or {}) and not f for s, f in zip(usable, failed, strict=True))
        counts[name] = RewardFunctionCounts(num_errors=sum(failed), num_abstained=num_abstained, extras={})
    num_without = sum(nothing in lines for lines in errors)
    return RewardedSamples(list(samples), counts, num_without, notices=(), fatal_error=None)


def _error_lines(sample: Sample) -> list[str]:
    lines = sample.extra.get(ERRORS_FIELD)
    return [line for line in lines if isinstance(line, str)] if isinstance(lines, list) else []
