"""Rewards that samples bring along: what was said of them is told again, and no function is asked."""

from __future__ import annotations

from collections.abc import Sequence

from app.records.sample import Sample
from app.reward.aggregate import ERRORS_FIELD, NO_REWARD, NO_REWARD_FINISH, Scored, Tally, is_unusable
from app.reward.plugin import Moment
from app.reward.reward_outcome import Outcome


def is_judged(sample: Sample) -> bool:
    """Whether a sample has its reward, or was left out because there was none for it."""
    return sample.reward is not None or is_unusable(sample) or sample.finish_reason == NO_REWARD_FINISH


def as_saved(
    samples: Sequence[Sample], moment: Moment, *, of_model: Sequence[Outcome] | None = None, names: Sequence[str]
) -> Scored:
    """The samples as they are, with the counts of the weighing that they come from, whenever and of whatever model.

    Further numbers that plug-ins gave are not among what a sample keeps.

    Args:
        names: of the functions, and of the reward model.
    """
    del moment, of_model
    usable = [sample for sample in samples if not is_unusable(sample)]
    errors = [_errors(sample) for sample in usable]
    nothing = f"{NO_REWARD.kind}: {NO_REWARD.text}"
    tallies = {}
    for name in names:
        failed = [any(line.startswith(f"{name}: ") for line in lines) for lines in errors]
        silent = sum(name not in (s.rewards or {}) and not f for s, f in zip(usable, failed, strict=True))
        tallies[name] = Tally(num_errors=sum(failed), num_abstained=silent, extras={})
    return Scored(list(samples), tallies, sum(nothing in lines for lines in errors), notices=(), problem=None)


def _errors(sample: Sample) -> list[str]:
    lines = sample.extra.get(ERRORS_FIELD)
    return [line for line in lines if isinstance(line, str)] if isinstance(lines, list) else []
