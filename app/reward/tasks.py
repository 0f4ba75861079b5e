"""The built-in tasks: reward functions that are exact, always end, and so run in the trainer's own process.

Each function maps (completion, reference answer) to 0 or 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

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

MATH_VERIFY = "math_verify"
"""Built in, but no task: it runs in worker processes (`app.reward.math_answers`)."""


class HasAnswer(Protocol):
    """Whatever names itself and may have a reference answer: a row of a data set or a prompt."""

    @property
    def uid(self) -> str: ...
    @property
    def answer(self) -> str | None: ...


def is_task_reward(name: str) -> bool:
    """Whether a reward function's name is a task's."""
    return name.removesuffix(FORMAT_SUFFIX) in TASKS


def grade(name: str, completion: str, prompt: HasAnswer) -> float:
    """The value of one reward function, 0 or 1.

    Correctness compares exact fractions: `0.5`, `1/2` and `50/100` are the same answer.

    Raises:
        InputError: correctness is asked for without a usable reference answer.
    """
    if name.endswith(FORMAT_SUFFIX):
        return float(_task(name).is_formatted(completion))
    check_answers([prompt], [name])
    given = extract_answer(name, completion)
    return float(given is not None and given == reference_answer(name, prompt))


def is_formatted(name: str, completion: str) -> bool:
    """The format predicate of the task that reward function `name` belongs to (`eval/format_rate`)."""
    return _task(name).is_formatted(completion)


def extract_answer(name: str, completion: str) -> Fraction | None:
    """What a completion answers, for the task that reward function `name` belongs to; None where it gives no number."""
    given = _task(name).extract(completion)
    return None if given is None else parse_number(given)


def reference_answer(name: str, prompt: HasAnswer) -> Fraction | None:
    """What a prompt's reference answer is, for that task; `check_answers` has seen that there is one."""
    return _task(name).parse_reference(prompt.answer or "")


def check_answers(rows: Sequence[HasAnswer], names: Sequence[str], *, eval_source: str | None = None) -> None:
    """Passes when every row can be graded; meant to be called before any device work.

    Names that are no task's are plug-ins, which say themselves what they need.

    Args:
        held_out: where the rows of an evaluation are from, for the error; None: they are others.

    Raises:
        InputError: a correctness function is asked for and a row's reference answer is missing or
            is no number. Names the first such row and counts the others.
    """
    for name in names:
        if name == MATH_VERIFY:
            bad = [row for row in rows if row.answer is None]
        elif is_task_reward(name) and not name.endswith(FORMAT_SUFFIX):
            task = _task(name)
            bad = [row for row in rows if row.answer is None or task.parse_reference(row.answer) is None]
        else:
            bad = []
        if bad:
            raise InputError(_describe_ungradable(name, bad, eval_source))


def _describe_ungradable(name: str, bad: Sequence[HasAnswer], eval_source: str | None) -> str:
    first = bad[0]
    problem = "no answer" if first.answer is None else f"the answer {first.answer[-80:]!r}, no number"
    others = f" (and {len(bad) - 1:,} more rows are like it)" if len(bad) > 1 else ""
    is_task = is_task_reward(name)
    expected, instead = ("number", f", or reward only {name}{FORMAT_SUFFIX}") if is_task else ("answer", "")
    whose = "" if eval_source is None else f" of the evaluation set (data.eval_source: {eval_source})"
    other = "" if eval_source is None else "another data.eval_source, or "
    return (
        f"reward.functions: {name} compares with a reference {expected}, but {first.uid}{whose} has {problem}{others};"
        f" choose {other}the column with data.answer_column{instead}"
    )


def _task(name: str) -> Task:
    return TASKS[name.removesuffix(FORMAT_SUFFIX)]
