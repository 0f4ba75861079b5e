"""Environments and tools that come with the program: `calculator`, `lookup` and `guess_number`."""

from __future__ import annotations

import ast
import functools
import operator
import os
import re
import time
from collections.abc import Callable, Sequence
from decimal import Context, Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from app.environments.interface import StepResult, ToolCall
from app.environments.tool_functions import Tool, answer_calls
from app.reward.gsm8k import parse_reference
from app.reward.numbers import last_number, parse_number

MAX_EXPRESSION = 200
"""Characters of an expression."""
OPERATIONS: dict[type, Callable[..., Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv},
    **{ast.UAdd: operator.pos, ast.USub: operator.neg},
}
INLINE_CALL = re.compile(r"<<(?P<argument>[^<>=\n]{1,200})(?:=[^<>\n]*)?(?:>>)?\s*\Z")
"""A call at the end of a turn, as in the solutions of GSM8K: `<<47*38`, `<<47*38>>` or `<<47*38=1786>>`."""

LOOKUP_VARIABLES = ("GRPO_LOOKUP_FILE", "GRPO_LOOKUP_LATENCY_MS")
"""The environment variables that `lookup` reads: a file of lines `key<TAB>value`, and how many milliseconds a call
takes."""


def calculator(expression: str) -> str:
    """Computes the value of an arithmetic expression.

    Args:
        expression: Numbers with + - * / and parentheses, such as (12.5 + 3) * 4.
    """
    expression = re.sub(r"(?<=\d),(?=\d{3})", "", expression.strip())
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"the expression is longer than {MAX_EXPRESSION} characters")
    try:
        value = _evaluate(ast.parse(expression, mode="eval").body, expression)
    except SyntaxError:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from None
    if value.denominator == 1:
        return str(value.numerator)
    decimal = Context(prec=15).divide(Decimal(value.numerator), Decimal(value.denominator))
    return f"{decimal.normalize():f}"


def _evaluate(node: ast.expr, expression: str) -> Fraction:
    number = parse_number(ast.get_source_segment(expression, node) or "") if isinstance(node, ast.Constant) else None
    if number is not None:
        return number
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_evaluate(node.operand, expression))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_evaluate(node.left, expression), _evaluate(node.right, expression))
    raise ValueError(f"{expression!r} is not an arithmetic expression of numbers, + - * / and parentheses")


def lookup(key: str) -> str:
    """Looks up the value of a key in a table.

    Args:
        key: The key.
    """
    time.sleep(float(os.environ.get("GRPO_LOOKUP_LATENCY_MS", "0")) / 1000)
    table = _read_table(os.environ["GRPO_LOOKUP_FILE"])
    if key not in table:
        raise ValueError(f"there is no key {key[:80]!r}")
    return table[key]


@functools.cache
def _read_table(file: str) -> dict[str, str]:
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    return {key: value for key, _, value in (line.partition("\t") for line in lines)}


class OneTool:
    """The data set's questions, with one tool. A turn without a call is the answer, which earns 1.0 if it is right."""

    def __init__(self, tool: Callable[[str], str], is_right: Callable[[str, str], bool]) -> None:
        self._tool = Tool(tool.__name__, tool)
        self._is_right = is_right

    def reset(self, *, answer: str) -> None:
        self._answer = answer

    def step(self, text: str, calls: Sequence[ToolCall]) -> StepResult:
        if not calls and (match := INLINE_CALL.search(text)):
            (parameter,) = self._tool.schema["function"]["parameters"]["properties"]
            calls = [ToolCall(self._tool.name, {parameter: match["argument"]})]
        if not calls:
            return StepResult(reward=float(self._is_right(text, self._answer)), terminated=True)
        messages, counts = answer_calls(calls, {self._tool.name: self._tool})
        return StepResult(messages, metrics=counts)


def has_last_number(text: str, answer: str) -> bool:
    """Whether the last number of a text is the answer: a number, or as in GSM8K, `... #### 72`."""
    reference, number = parse_reference(answer), last_number(text)
    if reference is None:
        raise ValueError(f"the row's answer {answer[-80:]!r} is not a number")
    return number is not None and parse_number(number) == reference


def is_same(text: str, answer: str) -> bool:
    return text.strip() == answer.strip()


class GuessNumber:
    """A secret digit and three guesses, which get `+` (the secret is larger), `-` or `=`; other text gets `?`.

    A hit earns 1. The best policy hits 7 of the 10 digits: one at once, two at the second guess, four at the third.
    """

    def reset(self, *, seed: int) -> str:
        self._secret, self._num_guesses = seed % 10, 0
        return "?"

    def step(self, text: str, calls: Sequence[ToolCall]) -> StepResult:
        self._num_guesses += 1
        guess = text.strip()
        if guess == str(self._secret):
            return StepResult("=", reward=1.0, terminated=True)
        hint = "?" if not re.fullmatch("[0-9]", guess) else "+" if self._secret > int(guess) else "-"
        return StepResult(hint, terminated=self._num_guesses == 3)


ENVIRONMENTS: dict[str, Callable[[], Any]] = {
    "calculator": partial(OneTool, calculator, has_last_number),
    "lookup": partial(OneTool, lookup, is_same),
    "guess_number": GuessNumber,
}
TOOLS: dict[str, Callable[..., Any]] = {"calculator": calculator, "lookup": lookup}
"""What names stand for in `env.source` and in `env.tools`."""
