"""Outcomes of several functions -> each sample's reward, and what becomes of failures.

A sample's reward is sum_i weight_i * value_i over the functions that gave a value; the unweighted values stay
beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from app.records.sample import DROPPED, Sample
from app.reward.reward_outcome import Failure, Outcome
from settings.schema.reward import MODEL_REWARD

OnError = Literal["raise", "zero", "drop"]

NO_REWARD_FINISH = f"{DROPPED}reward"
"""`finish_reason` of a sample that got no reward."""

ERRORS_FIELD = "reward_errors"
"""Where a sample's record keeps its failures, as lines of text."""

FINISH_FIELD = "finish_reason_before_drop"
"""Where the record of a dropped sample keeps how its generation ended."""

NO_REWARD = Failure("no reward", "every reward function abstained")


@dataclass(frozen=True, slots=True)
class Tally:
    """What one function did with this host's samples of a step."""

    num_errors: int
    num_abstained: int
    extras: Mapping[str, tuple[float, int]]
    """Name -> sum and count of the further numbers it gave."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A host's samples of a step after the reward room, in the order they came."""

    samples: list[Sample]
    """With `rewards` and `reward`; the dropped ones without `reward`."""
    tallies: Mapping[str, Tally]
    """By function."""
    num_without_reward: int
    """Samples that every function abstained from."""
    notices: tuple[str, ...]
    """For people: what failed, once for each function."""
    problem: str | None
    """What the run must stop for: a failure that is to raise, or a plug-in that is lost."""
    kinds: frozenset[str] = frozenset()
    """Of the failures: `Failure.kind`."""

    @property
    def num_errors(self) -> int:
        return sum(tally.num_errors for tally in self.tallies.values()) + self.num_without_reward

    @property
    def num_abstained(self) -> int:
        return sum(tally.num_abstained for tally in self.tallies.values())


def joined(parts: Sequence[Scored]) -> Scored:
    """Several batches of a step as one, in order. None of them is what a run must stop for."""
    names = list(dict.fromkeys(name for part in parts for name in part.tallies))
    return Scored(
        samples=[sample for part in parts for sample in part.samples],
        tallies={name: _sum_of([part.tallies[name] for part in parts if name in part.tallies]) for name in names},
        num_without_reward=sum(part.num_without_reward for part in parts),
        notices=tuple(notice for part in parts for notice in part.notices),
        problem=None,
        kinds=frozenset(kind for part in parts for kind in part.kinds),
    )


def _sum_of(tallies: Sequence[Tally]) -> Tally:
    names = list(dict.fromkeys(name for tally in tallies for name in tally.extras))
    known = {name: [tally.extras[name] for tally in tallies if name in tally.extras] for name in names}
    return Tally(
        num_errors=sum(tally.num_errors for tally in tallies),
        num_abstained=sum(tally.num_abstained for tally in tallies),
        extras={name: (sum(x for x, _ in pairs), sum(n for _, n in pairs)) for name, pairs in known.items()},
    )


def is_unusable(sample: Sample) -> bool:
    """Whether it was dropped before any reward function could be asked, while it was generated."""
    return sample.finish_reason.startswith(DROPPED) and sample.finish_reason != NO_REWARD_FINISH


def with_unusable(scored: Scored, samples: Sequence[Sample], *, fate: str) -> Scored:
    """All samples in their order; those that were not asked about have no reward.

    Args:
        fate: what becomes of these, for people.
    """
    unusable = [sample for sample in samples if is_unusable(sample)]
    if not unusable:
        return scored
    rest = iter(scored.samples)
    placed = [replace(s, rewards={}, reward=None) if is_unusable(s) else next(rest) for s in samples]
    why = unusable[0].finish_reason.removeprefix(DROPPED)
    notice = f"{len(unusable)} of {len(samples)} samples have {why}, {fate}; first {unusable[0].uid}"
    return replace(scored, samples=placed, notices=(*scored.notices, notice))


def weigh(
    samples: Sequence[Sample],
    outcomes: Mapping[str, Sequence[Outcome]],
    weights: Mapping[str, float],
    on_error: OnError,
    *,
    when_all_abstain: Failure | None = NO_REWARD,
) -> Scored:
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
        weighed.append(_weighed(sample, rewards, weights, failures[index], on_error))
    num_without = sum("" in found for found in failures)
    notices = [_notice(name, samples, failures, on_error) for name in (*outcomes, "")]
    return Scored(
        samples=weighed,
        tallies={name: _tally(of_function) for name, of_function in outcomes.items()},
        num_without_reward=num_without,
        notices=tuple(notice for notice in notices if notice),
        problem=_problem(samples, failures) if on_error == "raise" else None,
        kinds=frozenset(failure.kind for of_sample in failures for failure in of_sample.values()),
    )


def _failures(
    index: int, outcomes: Mapping[str, Sequence[Outcome]], when_all_abstain: Failure | None
) -> dict[str, Failure]:
    """By function; under the empty name where all of them abstained."""
    if when_all_abstain and all(o[index].abstained for o in outcomes.values()):
        return {"": when_all_abstain}
    return {name: failure for name, o in outcomes.items() if (failure := o[index].failure)}


def _weighed(
    sample: Sample,
    rewards: Mapping[str, float],
    weights: Mapping[str, float],
    failures: Mapping[str, Failure],
    on_error: OnError,
) -> Sample:
    sample = _undropped(sample)
    extra = dict(sample.extra)
    if failures:
        extra[ERRORS_FIELD] = [_told(name, failure) for name, failure in failures.items()]
    if failures and on_error == "drop":
        extra[FINISH_FIELD] = sample.finish_reason
        return replace(sample, rewards=rewards, reward=None, finish_reason=NO_REWARD_FINISH, extra=extra)
    reward = sum(weights[name] * value for name, value in rewards.items())
    return replace(sample, rewards=rewards, reward=float(reward), extra=extra)


def _undropped(sample: Sample) -> Sample:
    """As it was before an earlier weighing said what had failed."""
    extra = {name: value for name, value in sample.extra.items() if name not in (ERRORS_FIELD, FINISH_FIELD)}
    if sample.finish_reason != NO_REWARD_FINISH:
        return replace(sample, extra=extra)
    finish_reason = str(sample.extra.get(FINISH_FIELD, NO_REWARD_FINISH))
    # Training masks what was dropped as a whole, and gives it no advantage; scoring leaves its mask alone.
    mask = sample.loss_mask if sample.mask.any() else None
    return replace(sample, finish_reason=finish_reason, loss_mask=mask, advantages=None, extra=extra)


def _told(name: str, failure: Failure) -> str:
    return f"{name}: {failure.kind}: {failure.text}" if name else f"{failure.kind}: {failure.text}"


def _tally(outcomes: Sequence[Outcome]) -> Tally:
    extras: dict[str, tuple[float, int]] = {}
    for outcome in outcomes:
        for name, value in outcome.extras.items():
            total, count = extras.get(name, (0.0, 0))
            extras[name] = total + value, count + 1
    return Tally(
        num_errors=sum(outcome.failure is not None for outcome in outcomes),
        num_abstained=sum(outcome.abstained for outcome in outcomes),
        extras=extras,
    )


def _notice(
    name: str, samples: Sequence[Sample], failures: Sequence[Mapping[str, Failure]], on_error: OnError
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


def _problem(samples: Sequence[Sample], failures: Sequence[Mapping[str, Failure]]) -> str | None:
    for sample, of_sample in zip(samples, failures, strict=True):
        for name, failure in of_sample.items():
            setting, culprit = ("model", "model") if name == MODEL_REWARD else ("functions", "function")
            return (
                f"reward.{setting}: {_told(name, failure)} (sample {sample.uid}). Mend the {culprit}, or set "
                "reward.on_error to zero (its value counts 0) or drop (the sample is left out)"
            )
    return None
