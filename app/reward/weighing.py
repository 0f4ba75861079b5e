"""The reward functions by name, and their weighted sum over samples.

Each function maps (completion, reference answer) to a value in [0, 1]. A sample's reward is
sum_i weight_i * value_i; the unweighted values stay beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Protocol

from app.flow import Sample
from app.reward import arithmetic, gsm8k
from app.reward.numbers import parse_number
from settings.errors import InputError


@dataclass(frozen=True, slots=True)
class Task:
    """One kind of question: how its answers are found, read and expected to be written."""

    extract: Callable[[str], str | None]
    """Completion to the number given as its answer."""
    parse_reference: Callable[[str], Fraction | None]
    """Reference answer to its exact value."""
    is_formatted: Callable[[str], bool]


TASKS = {
    "gsm8k": Task(gsm8k.extract, gsm8k.parse_reference, gsm8k.is_formatted),
    "arithmetic": Task(arithmetic.extract, arithmetic.parse_reference, arithmetic.is_formatted),
}
"""Every task gives two reward functions: `<task>` (correctness) and `<task>_format`."""

FORMAT_SUFFIX = "_format"


class Answered(Protocol):
    """Whatever names itself and may have a reference answer: a row of a data set or a prompt."""

    @property
    def uid(self) -> str: ...
    @property
    def answer(self) -> str | None: ...


def score_rewards(samples: Sequence[Sample], functions: Sequence[tuple[str, float]]) -> list[Sample]:
    """The samples with `rewards` (unweighted, by name) and `reward` = sum of weight * value.

    Args:
        samples: N samples.
        functions: (name, weight) pairs, as `reward.functions` lists them.

    Raises:
        InputError: an unknown or repeated name, or a reference answer that cannot be graded.
    """
    names = [name for name, _ in functions]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"reward.functions: {', '.join(repeated)} stands there twice; add up the weights")
    return [_score_one(sample, functions) for sample in samples]


def _score_one(sample: Sample, functions: Sequence[tuple[str, float]]) -> Sample:
    rewards = {name: evaluate(name, sample.completion, sample.prompt) for name, _ in functions}
    reward = sum(weight * rewards[name] for name, weight in functions)
    return replace(sample, rewards=rewards, reward=float(reward))


def evaluate(name: str, completion: str, prompt: Answered) -> float:
    """The value of one reward function, 0 or 1.

    Correctness compares exact fractions: `0.5`, `1/2` and `50/100` are the same answer.

    Raises:
        InputError: an unknown name, or correctness is asked for without a usable reference answer.
    """
    task = _task(name)
    if name.endswith(FORMAT_SUFFIX):
        return float(task.is_formatted(completion))
    check_answers([prompt], [(name, 1.0)])
    given = task.extract(completion)
    return float(given is not None and parse_number(given) == task.parse_reference(prompt.answer or ""))


def is_formatted(name: str, completion: str) -> bool:
    """The format predicate of the task that reward function `name` belongs to (`eval/format_rate`)."""
    return _task(name).is_formatted(completion)


def check_answers(rows: Sequence[Answered], functions: Sequence[tuple[str, float]]) -> None:
    """Passes when every row can be graded; meant to be called before any device work.

    Raises:
        InputError: a correctness function is asked for and a row's reference answer is missing or
            is no number. Names the first such row and counts the others.
    """
    for name, _ in functions:
        task = _task(name)
        if name.endswith(FORMAT_SUFFIX):
            continue
        bad = [row for row in rows if row.answer is None or task.parse_reference(row.answer) is None]
        if bad:
            raise InputError(_describe_ungradable(name, bad))


def _describe_ungradable(name: str, bad: Sequence[Answered]) -> str:
    first = bad[0]
    problem = "no answer" if first.answer is None else f"the answer {first.answer[-80:]!r}, no number"
    others = f" (and {len(bad) - 1:,} more rows are like it)" if len(bad) > 1 else ""
    return (
        f"reward.functions: {name} compares with a reference number, but {first.uid} has {problem}{others};"
        f" choose the column with data.answer_column, or reward only {name}{FORMAT_SUFFIX}"
    )


def _task(name: str) -> Task:
    task = TASKS.get(name.removesuffix(FORMAT_SUFFIX))
    if task is None:
        known = ", ".join(f"{task}, {task}{FORMAT_SUFFIX}" for task in TASKS)
        raise InputError(f"reward.functions: unknown {name!r}, expected one of {known}")
    return task
