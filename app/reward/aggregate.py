"""Outcomes of several functions -> each sample's reward, and what becomes of failures.

A sample's reward is sum_i weight_i * value_i over the functions that gave a value; the unweighted values stay
beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from app.records.sample import DROPPED_PREFIX, Sample
from app.reward.reward_outcome import RewardFailure, RewardOutcome
from settings.schema.reward import MODEL_REWARD

OnError = Literal["raise", "zero", "drop"]

NO_REWARD_FINISH_REASON = f"{DROPPED_PREFIX}reward"
"""`finish_reason` of a sample that got no reward."""

ERRORS_FIELD = "reward_errors"
"""Where a sample's record keeps its failures, as lines of text."""

ORIGINAL_FINISH_FIELD = "finish_reason_before_drop"
"""Where the record of a dropped sample keeps how its generation ended."""

ALL_ABSTAINED = RewardFailure("no reward", "every reward function abstained")


@dataclass(frozen=True, slots=True)
class RewardFunctionCounts:
    """What one function did with this host's samples of a step."""

    num_errors: int
    num_abstained: int
    extras: Mapping[str, tuple[float, int]]
    """Name -> sum and count of the further numbers it gave."""


@dataclass(frozen=True, slots=True)
class RewardedSamples:
    """A host's samples of a step after the reward room, in the order they came."""

    samples: list[Sample]
    """With `rewards` and `reward`; the dropped ones without `reward`."""
    function_counts: Mapping[str, RewardFunctionCounts]
    """By function."""
    num_without_reward: int
    """Samples that every function abstained from."""
    notices: tuple[str, ...]
    """For people: what failed, once for each function."""
    fatal_error: str | None
    """What the run must stop for: a failure that is to raise, or a plug-in that is lost."""
    failure_kinds: frozenset[str] = frozenset()
    """Of the failures: `Failure.kind`."""

    @property
    def num_errors(self) -> int:
        return sum(tally.num_errors for tally in self.function_counts.values()) + self.num_without_reward

    @property
    def num_abstained(self) -> int:
        return sum(tally.num_abstained for tally in self.function_counts.values())


def merge_rewarded(parts: Sequence[RewardedSamples]) -> RewardedSamples:
    """Several batches of a step as one, in order. None of them is what a run must stop for."""
    names = list(dict.fromkeys(name for part in parts for name in part.function_counts))
    return RewardedSamples(
        samples=[sample for part in parts for sample in part.samples],
        function_counts={
            name: _sum_counts([part.function_counts[name] for part in parts if name in part.function_counts])
            for name in names
        },
        num_without_reward=sum(part.num_without_reward for part in parts),
        notices=tuple(notice for part in parts for notice in part.notices),
        fatal_error=None,
        failure_kinds=frozenset(kind for part in parts for kind in part.failure_kinds),
    )


def _sum_counts(tallies: Sequence[RewardFunctionCounts]) -> RewardFunctionCounts:
    names = list(dict.fromkeys(name for tally in tallies for name in tally.extras))
    known = {name: [tally.extras[name] for tally in tallies if name in tally.extras] for name in names}
    return RewardFunctionCounts(
        num_errors=sum(tally.num_errors for tally in tallies),
        num_abstained=sum(tally.num_abstained for tally in tallies),
        extras={name: (sum(x for x, _ in pairs), sum(n for _, n in pairs)) for name, pairs in known.items()},
    )


def was_dropped_in_rollout(sample: Sample) -> bool:
    """Whether it was dropped before any reward function could be asked, while it was generated."""
    return sample.finish_reason.startswith(DROPPED_PREFIX) and sample.finish_reason != NO_REWARD_FINISH_REASON


def restore_dropped(scored: RewardedSamples, samples: Sequence[Sample], *, fate: str) -> RewardedSamples:
    """All samples in their order; those that were not asked about have no reward.

    Args:
        fate: what becomes of these, for people.
    """
    unusable = [sample for sample in samples if was_dropped_in_rollout(sample)]
    if not unusable:
        return scored
    rest = iter(scored.samples)
    placed = [replace(s, rewards={}, reward=None) if was_dropped_in_rollout(s) else next(rest) for s in samples]
    why = unusable[0].finish_reason.removeprefix(DROPPED_PREFIX)
    notice = f"{len(unusable)} of {len(samples)} samples have {why}, {fate}; first {unusable[0].uid}"
    return replace(scored, samples=placed, notices=(*scored.notices, notice))


def aggregate_rewards(
    samples: Sequence[Sample],
    outcomes: Mapping[str, Sequence[RewardOutcome]],
    weights: Mapping[str, float],
    on_error: OnError,
    *,
    when_all_abstain: RewardFailure | None = ALL_ABSTAINED,
) -> RewardedSamples:
    """The samples with their rewards.

    Args:
        outcomes: by function, one per sample.
        weights: by function.
        on_error: a failed function's value counts 0 (`zero`), or its sample has no reward (`drop`); `raise` fills
            `Scored.problem`.
        when_all_abstain: how a sample has failed that every function abstained from; None: it has not.
    """
    failures = [_failures(index, outcomes, when_all_abstain) for index in range(len(samples))]
    weighed = []
    for index, sample in enumerate(samples):
        values = {name: o[index].value for name, o in outcomes.items()}
        if on_error != "drop":
            values |= dict.fromkeys(failures[index].keys() & outcomes.keys(), 0.0)
        rewards = {name: value for name, value in values.items() if value is not None}
        weighed.append(_with_reward(sample, rewards, weights, failures[index], on_error))
    num_without = sum("" in found for found in failures)
    notices = [_failure_notice(name, samples, failures, on_error) for name in (*outcomes, "")]
    return RewardedSamples(
        samples=weighed,
        function_counts={name: _count_outcomes(of_function) for name, of_function in outcomes.items()},
        num_without_reward=num_without,
        notices=tuple(notice for notice in notices if notice),
        fatal_error=_first_failure_message(samples, failures) if on_error == "raise" else None,
        failure_kinds=frozenset(failure.kind for of_sample in failures for failure in of_sample.values()),
    )


def _failures(
    index: int, outcomes: Mapping[str, Sequence[RewardOutcome]], when_all_abstain: RewardFailure | None
) -> dict[str, RewardFailure]:
    """By function; under the empty name where all of them abstained."""
    if when_all_abstain and all(o[index].abstained for o in outcomes.values()):
        return {"": when_all_abstain}
    return {name: failure for name, o in outcomes.items() if (failure := o[index].failure)}


def _with_reward(
    sample: Sample,
    rewards: Mapping[str, float],
    weights: Mapping[str, float],
    failures: Mapping[str, RewardFailure],
    on_error: OnError,
) -> Sample:
    sample = _undo_drop(sample)
    extra = dict(sample.extra)
    if failures:
        extra[ERRORS_FIELD] = [_format_failure(name, failure) for name, failure in failures.items()]
    if failures and on_error == "drop":
        extra[ORIGINAL_FINISH_FIELD] = sample.finish_reason
        return replace(sample, rewards=rewards, reward=None, finish_reason=NO_REWARD_FINISH_REASON, extra=extra)
    reward = sum(weights[name] * value for name, value in rewards.items())
    return replace(sample, rewards=rewards, reward=float(reward), extra=extra)


def _undo_drop(sample: Sample) -> Sample:
    """As it was before an earlier weighing said what had failed."""
    extra = {name: value for name, value in sample.extra.items() if name not in (ERRORS_FIELD, ORIGINAL_FINISH_FIELD)}
    if sample.finish_reason != NO_REWARD_FINISH_REASON:
        return replace(sample, extra=extra)
    finish_reason = str(sample.extra.get(ORIGINAL_FINISH_FIELD, NO_REWARD_FINISH_REASON))
    # Training masks what was dropped as a whole, and gives it no advantage; scoring leaves its mask alone.
    mask = sample.loss_mask if sample.mask.any() else None
    return replace(sample, finish_reason=finish_reason, loss_mask=mask, advantages=None, extra=extra)


def _format_failure(name: str, failure: RewardFailure) -> str:
    return f"{name}: {failure.kind}: {failure.text}" if name else f"{failure.kind}: {failure.text}"


def _count_outcomes(outcomes: Sequence[RewardOutcome]) -> RewardFunctionCounts:
    extras: dict[str, tuple[float, int]] = {}
    for outcome in outcomes:
        for name, value in outcome.extras.items():
            total, count = extras.get(name, (0.0, 0))
            extras[name] = total + value, count + 1
    return RewardFunctionCounts(
        num_errors=sum(outcome.failure is not None for outcome in outcomes),
        num_abstained=sum(outcome.abstained for outcome in outcomes),
        extras=extras,
    )


def _failure_notice(
    name: str, samples: Sequence[Sample], failures: Sequence[Mapping[str, RewardFailure]], on_error: OnError
) -> str | None:
    """One line about a function's failures; None where it had none."""
    found = [(s.uid, of_sample[name]) for s, of_sample in zip(samples, failures, strict=True) if name in of_sample]
    if not found:
        return None
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(failure.kind for _, failure in found).items())
    uid, first = found[0]
    fate = {"raise": "", "zero": ", counted as 0", "drop": ", left out"}[on_error]
    subject = f"reward {name} failed on" if name else "no reward for"
    return f"{subject} {len(found)} of {len(samples)} samples ({kinds}){fate}; first {uid}: {first.text}"


def _first_failure_message(samples: Sequence[Sample], failures: Sequence[Mapping[str, RewardFailure]]) -> str | None:
    for sample, of_sample in zip(samples, failures, strict=True):
        for name, failure in of_sample.items():
            setting, culprit = ("model", "model") if name == MODEL_REWARD else ("functions", "function")
            return (
                f"reward.{setting}: {_format_failure(name, failure)} (sample {sample.uid}). Mend the {culprit}, or set "
                "reward.on_error to zero (its value counts 0) or drop (the sample is left out)"
            )
    return None
