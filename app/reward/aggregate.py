"""Aggregation of the outcomes of several reward functions into one reward per sample, and handling of failures.

A sample's reward is sum_i weight_i * value_i over the functions that returned a value. Unweighted values are also kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import Field

from app.plugins.values import EXTRA_NAME_PATTERN, MAX_EXTRAS, MAX_TEXT_CHARACTERS, Failure
from app.records.sample import DROPPED_PREFIX, Sample
from settings.schema.reward import MODEL_REWARD

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Extras = Annotated[
    Mapping[Annotated[str, Field(pattern=rf"^{EXTRA_NAME_PATTERN.pattern}$")], Number], Field(max_length=MAX_EXTRAS)
]
Logged = Mapping[Annotated[str, Field(max_length=MAX_TEXT_CHARACTERS)], bool | int | Number | str | None]
OnError = Literal["raise", "zero", "drop"]

NO_REWARD_FINISH_REASON = f"{DROPPED_PREFIX}reward"
"""`finish_reason` of a sample without a reward."""

ERRORS_FIELD = "reward_errors"
"""Field of a sample's record with its failures, one line of text each."""

LOGGED_FIELD = "log_extra"
"""Field of a sample's record with the values that functions logged for it with TRL's `log_extra`."""

ORIGINAL_FINISH_FIELD = "finish_reason_before_drop"
"""Field of a dropped sample's record with the finish reason of its generation."""

ALL_ABSTAINED = Failure("no reward", "every reward function abstained")


@dataclass(frozen=True, slots=True)
class RewardOutcome:
    """The result of a reward function for a sample: a value, a failure, or neither if the function abstained."""

    value: Number | None = None
    token_values: Sequence[Number] | None = None
    """A value per token in place of `value`; only from advantage estimators."""
    failure: Failure | None = None
    extras: Extras = field(default_factory=dict)
    """Additional metrics to log."""
    logged: Logged = field(default_factory=dict)
    """Values that the function logged for the sample with TRL's `log_extra`."""

    @property
    def abstained(self) -> bool:
        return self.value is None and self.failure is None


@dataclass(frozen=True, slots=True)
class RewardFunctionCounts:
    """Counts of one function over this host's samples of a step."""

    num_errors: int
    num_abstained: int
    extras: Mapping[str, tuple[float, int]]
    """Maps each additional metric that the function returned to the sum and count of its values."""


@dataclass(frozen=True, slots=True)
class RewardedSamples:
    """This host's samples of a step with their rewards, in their original order."""

    samples: list[Sample]
    """Samples with `rewards` and `reward`; dropped ones have no `reward`."""
    function_counts: Mapping[str, RewardFunctionCounts]
    num_without_reward: int
    """Number of samples for which every function abstained."""
    notices: tuple[str, ...]
    """Messages about failures, one per function."""
    fatal_error: str | None
    """The reason why the run must stop: a failure with `on_error: raise`, or a plug-in that cannot be restarted."""
    failure_kinds: frozenset[str] = frozenset()
    """The kinds of the failures that occurred."""

    @property
    def num_errors(self) -> int:
        return sum(counts.num_errors for counts in self.function_counts.values()) + self.num_without_reward

    @property
    def num_abstained(self) -> int:
        return sum(counts.num_abstained for counts in self.function_counts.values())


def merge_rewarded(parts: Sequence[RewardedSamples]) -> RewardedSamples:
    """Merges several batches of a step in order. None of them may have a fatal error."""
    counts: dict[str, list[RewardFunctionCounts]] = {}
    for part in parts:
        for name, one in part.function_counts.items():
            counts.setdefault(name, []).append(one)
    return RewardedSamples(
        samples=[sample for part in parts for sample in part.samples],
        function_counts={
            name: RewardFunctionCounts(
                num_errors=sum(one.num_errors for one in found),
                num_abstained=sum(one.num_abstained for one in found),
                extras=_sum_extras((extra, *pair) for one in found for extra, pair in one.extras.items()),
            )
            for name, found in counts.items()
        },
        num_without_reward=sum(part.num_without_reward for part in parts),
        notices=tuple(notice for part in parts for notice in part.notices),
        fatal_error=None,
        failure_kinds=frozenset(kind for part in parts for kind in part.failure_kinds),
    )


def _sum_extras(values: Iterable[tuple[str, float, int]]) -> dict[str, tuple[float, int]]:
    sums: dict[str, tuple[float, int]] = {}
    for name, value, count in values:
        total, total_count = sums.get(name, (0.0, 0))
        sums[name] = total + value, total_count + count
    return sums


def was_dropped_in_rollout(sample: Sample) -> bool:
    """Returns whether a sample was dropped during generation, before any reward function."""
    return sample.finish_reason.startswith(DROPPED_PREFIX) and sample.finish_reason != NO_REWARD_FINISH_REASON


def restore_dropped(scored: RewardedSamples, samples: Sequence[Sample], *, fate: str) -> RewardedSamples:
    """Returns the scored samples and the samples dropped in the rollout, which have no reward, in original order.

    Args:
        fate: what happens to the dropped samples, for the notice.
    """
    dropped = [sample for sample in samples if was_dropped_in_rollout(sample)]
    if not dropped:
        return scored
    rest = iter(scored.samples)
    restored = [replace(s, rewards={}, reward=None) if was_dropped_in_rollout(s) else next(rest) for s in samples]
    reasons = Counter(sample.finish_reason.removeprefix(DROPPED_PREFIX) for sample in dropped)
    listed = ", ".join(f"{n} {reason}" for reason, n in reasons.items())
    notice = f"the rollout dropped {len(dropped)} of {len(samples)} samples ({listed}), {fate}; first {dropped[0].uid}"
    return replace(scored, samples=restored, notices=(*scored.notices, notice))


def aggregate_rewards(
    samples: Sequence[Sample],
    outcomes: Mapping[str, Sequence[RewardOutcome]],
    weights: Mapping[str, float],
    on_error: OnError,
    *,
    when_all_abstain: Failure | None = ALL_ABSTAINED,
) -> RewardedSamples:
    """Returns the samples with their rewards.

    Args:
        outcomes: outcomes of each function, one per sample.
        weights: weight of each function.
        on_error: effect of a failure: the function's value counts as 0 (`zero`), the sample has no reward (`drop`), or
            `RewardedSamples.fatal_error` is set (`raise`).
        when_all_abstain: failure to record for a sample if every function abstains; None = no failure.
    """
    failures = [_failures(index, outcomes, when_all_abstain) for index in range(len(samples))]
    rewarded = []
    for index, sample in enumerate(samples):
        values = {name: o[index].value for name, o in outcomes.items()}
        if on_error != "drop":
            values |= dict.fromkeys(failures[index].keys() & outcomes.keys(), 0.0)
        rewards = {name: value for name, value in values.items() if value is not None}
        logged = {name: value for o in outcomes.values() for name, value in o[index].logged.items()}
        rewarded.append(_with_reward(sample, rewards, weights, failures[index], on_error, logged))
    num_without = sum("" in by_function for by_function in failures)
    notices = [_failure_notice(name, samples, failures, on_error) for name in (*outcomes, "")]
    return RewardedSamples(
        samples=rewarded,
        function_counts={name: _count_outcomes(function_outcomes) for name, function_outcomes in outcomes.items()},
        num_without_reward=num_without,
        notices=tuple(notice for notice in notices if notice),
        fatal_error=_first_failure_message(samples, failures) if on_error == "raise" else None,
        failure_kinds=frozenset(failure.kind for by_function in failures for failure in by_function.values()),
    )


def _failures(
    index: int, outcomes: Mapping[str, Sequence[RewardOutcome]], when_all_abstain: Failure | None
) -> dict[str, Failure]:
    """Maps the functions that failed on a sample to their failures.

    If all abstained, and `when_all_abstain` is given, the empty name maps to it instead.
    """
    if when_all_abstain and all(o[index].abstained for o in outcomes.values()):
        return {"": when_all_abstain}
    return {name: failure for name, o in outcomes.items() if (failure := o[index].failure)}


def _with_reward(
    sample: Sample,
    rewards: Mapping[str, float],
    weights: Mapping[str, float],
    failures: Mapping[str, Failure],
    on_error: OnError,
    logged: Logged,
) -> Sample:
    sample = _undo_drop(sample)
    extra = {**sample.extra, **({LOGGED_FIELD: logged} if logged else {})}
    if failures:
        extra[ERRORS_FIELD] = [_format_failure(name, failure) for name, failure in failures.items()]
    if failures and on_error == "drop":
        extra[ORIGINAL_FINISH_FIELD] = sample.finish_reason
        return replace(sample, rewards=rewards, reward=None, finish_reason=NO_REWARD_FINISH_REASON, extra=extra)
    reward = sum(weights[name] * value for name, value in rewards.items())
    return replace(sample, rewards=rewards, reward=float(reward), extra=extra)


def _undo_drop(sample: Sample) -> Sample:
    """Returns the sample as it was before an earlier aggregation recorded failures."""
    of_rewards = (ERRORS_FIELD, LOGGED_FIELD, ORIGINAL_FINISH_FIELD)
    extra = {name: value for name, value in sample.extra.items() if name not in of_rewards}
    if sample.finish_reason != NO_REWARD_FINISH_REASON:
        return replace(sample, extra=extra)
    finish_reason = str(sample.extra.get(ORIGINAL_FINISH_FIELD, NO_REWARD_FINISH_REASON))
    # Training masks a dropped sample completely and sets no advantage; scoring leaves its mask unchanged.
    mask = sample.loss_mask if sample.mask.any() else sample.written_mask
    return replace(sample, finish_reason=finish_reason, loss_mask=mask, advantages=None, extra=extra)


def _format_failure(name: str, failure: Failure) -> str:
    return f"{name}: {failure.kind}: {failure.text}" if name else f"{failure.kind}: {failure.text}"


def _count_outcomes(outcomes: Sequence[RewardOutcome]) -> RewardFunctionCounts:
    return RewardFunctionCounts(
        num_errors=sum(outcome.failure is not None for outcome in outcomes),
        num_abstained=sum(outcome.abstained for outcome in outcomes),
        extras=_sum_extras((name, value, 1) for outcome in outcomes for name, value in outcome.extras.items()),
    )


def _failure_notice(
    name: str, samples: Sequence[Sample], failures: Sequence[Mapping[str, Failure]], on_error: OnError
) -> str | None:
    """Returns one line about a function's failures, or None if there are none."""
    failed = [
        (s.uid, by_function[name]) for s, by_function in zip(samples, failures, strict=True) if name in by_function
    ]
    if not failed:
        return None
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(failure.kind for _, failure in failed).items())
    uid, first = failed[0]
    fate = {"raise": "", "zero": ", counted as 0", "drop": ", left out"}[on_error]
    subject = f"reward {name} failed on" if name else "no reward for"
    return f"{subject} {len(failed)} of {len(samples)} samples ({kinds}){fate}; first {uid}: {first.text}"


def _first_failure_message(samples: Sequence[Sample], failures: Sequence[Mapping[str, Failure]]) -> str | None:
    for sample, by_function in zip(samples, failures, strict=True):
        for name, failure in by_function.items():
            setting, culprit = ("model", "model") if name == MODEL_REWARD else ("functions", "function")
            return (
                f"reward.{setting}: {_format_failure(name, failure)} (sample {sample.uid}). Fix the {culprit}, or set "
                "reward.on_error to zero (the value counts as 0) or drop (the sample is left out)"
            )
    return None
