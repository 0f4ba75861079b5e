"""The built-in tasks: exact reward functions that always terminate and therefore run in the trainer's process.

Each function maps (completion, reference answer) to 0 or 1. `arithmetic` (`47 + 38 = ?`) grades the completion's last
number, so `85` and `47 + 38 = 85` are both correct; its format is a single integer, with optional surrounding space.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, Protocol

from app.records.typed_values import is_text_or_number, to_text
from app.reward import gsm8k
from app.reward.numbers import MAX_NUMBER_CHARACTERS, last_number, parse_number
from settings.errors import InputError


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of question: how its answers are extracted, parsed and formatted."""

    extract: Callable[[str], str | None]
    """Returns the text of the number given as the answer in a completion; None if there is none."""
    parse_reference: Callable[[str], Fraction | None]
    """Returns the exact value of a reference answer; None if it is not a number."""
    is_formatted: Callable[[str], bool]
    """Returns whether a completion has the expected format."""

    def answer(self, completion: str) -> Fraction | None:
        """Returns the number given as the answer in a completion; None if there is none."""
        given = self.extract(completion)
        return None if given is None else parse_number(given)


_INTEGER = re.compile(rf"\s*+[-\u2212]?[0-9]{{1,{MAX_NUMBER_CHARACTERS}}}+\s*+")

TASKS = {
    "gsm8k": Task(gsm8k.extract, gsm8k.parse_reference, gsm8k.is_formatted),
    "arithmetic": Task(last_number, parse_number, lambda completion: _INTEGER.fullmatch(completion) is not None),
}
"""Maps names to tasks. Each has two reward functions: `<task>` for correctness and `<task>_format`."""

FORMAT_SUFFIX = "_format"

MATH_VERIFY = "math_verify"
"""A built-in reward that is not a task: it runs in worker processes (`app.reward.math_answers`)."""

_WITH_EXPONENT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]{1,3}")
_MATH_PUNCTUATION = re.compile(r"\\boxed|[$\\{}()\[\]\s]")


class HasAnswer(Protocol):
    """A data-set row or a prompt, with an id and an optional reference answer."""

    @property
    def uid(self) -> str: ...
    @property
    def answer(self) -> Any: ...


def is_task_reward(name: str) -> bool:
    """Returns whether a reward function belongs to a built-in task."""
    return name.removesuffix(FORMAT_SUFFIX) in TASKS


def task_of(name: str) -> Task:
    """Returns the task that a reward function, `<task>` or `<task>_format`, belongs to."""
    return TASKS[name.removesuffix(FORMAT_SUFFIX)]


def grade(name: str, completion: str, prompt: HasAnswer) -> float:
    """Returns the value of one reward function, 0 or 1.

    Correctness compares exact fractions: `0.5`, `1/2` and `50/100` are the same answer.

    For a correctness function, `check_answers` must accept the prompt.
    """
    task = task_of(name)
    if name.endswith(FORMAT_SUFFIX):
        return float(task.is_formatted(completion))
    given = task.answer(completion)
    return float(given is not None and given == task.parse_reference(to_text(prompt.answer)))


def check_answers(rows: Sequence[HasAnswer], names: Sequence[str], *, eval_source: str | None = None) -> None:
    """Verifies, before any device work, that every row can be graded by the named reward functions.

    Other names are plug-ins, whose signatures are checked when they are loaded.

    Args:
        eval_source: source of the rows if they are evaluation rows, for the error message.

    Raises:
        InputError: a row's reference answer is missing, or is not the number or the mathematical expression that a
            function needs. The message names the first such row and counts the others.
    """
    for name in names:
        bad = [row for row in rows if not _is_gradable(name, row.answer)]
        if bad:
            raise InputError(_describe_ungradable(name, bad, eval_source))


def _is_gradable(name: str, answer: Any) -> bool:
    if name != MATH_VERIFY and (not is_task_reward(name) or name.endswith(FORMAT_SUFFIX)):
        return True
    if not is_text_or_number(answer):
        return False
    text = to_text(answer)
    if name == MATH_VERIFY:
        return bool(_MATH_PUNCTUATION.sub("", math_reference(text)))
    return task_of(name).parse_reference(text) is not None


def math_reference(answer: str) -> str:
    """Returns the expression in a reference answer of `math_verify`: the part after `####`, if it occurs."""
    text = answer.rpartition("####")[2].strip()
    # In mathematics, the e in a program's 1e-05 would be Euler's number.
    return format(Decimal(text), "f") if _WITH_EXPONENT.fullmatch(text) else text


def _describe_ungradable(name: str, bad: Sequence[HasAnswer], eval_source: str | None) -> str:
    first = bad[0]
    is_task = is_task_reward(name)
    expected, instead = ("number", f", or reward only {name}{FORMAT_SUFFIX}") if is_task else ("answer", "")
    problem = "no answer"
    if first.answer is not None:
        wanted = "a number" if is_task else "a mathematical expression"
        problem = f"the answer {to_text(first.answer)[-80:]!r}, which is not {wanted}"
    others = f" (and {len(bad) - 1:,} more like it)" if len(bad) > 1 else ""
    origin, other = "", ""
    if eval_source is not None:
        origin, other = f" of the evaluation set (data.eval_source: {eval_source})", "another data.eval_source, or "
    # Rows of data sets have a location, prompts only a uid.
    where = getattr(first, "where", "") or first.uid
    return (
        f"reward.functions: {name} compares with a reference {expected}, but {where}{origin} has {problem}{others};"
        f" choose {other}the column of the answers with data.answer_column{instead}"
    )
