"""Environments and tools that come with the program: `calculator` and `guess_number`."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

from app.environments.interface import StepResult, ToolCall
from app.environments.tool_functions import Tool, answer_calls
from app.reward.gsm8k import parse_reference
from app.reward.numbers import last_number, parse_number

MAX_EXPRESSION = 200
"""Maximum number of characters of an expression."""
OPERATIONS: dict[type, Callable[..., Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv},
    **{ast.UAdd: operator.pos, ast.USub: operator.neg},
}
INLINE_CALL = re.compile(r"<<(?P<expression>[^<>=\n]{1,200})(?:=[^<>\n]*)?(?:>>)?\s*\Z")
"""Matches a call at the end of a turn, as in the solutions of GSM8K: `<<47*38`, `<<47*38>>` or `<<47*38=1786>>`."""


def calculator(expression: str) -> str:
    """Computes the value of an arithmetic expression.

    Args:
        expression: Numbers with + - * / and parentheses, such as (12.5 + 3) * 4.
    """
    expression = re.sub(r"(?<=\d),(?=\d{3})", "", expression.strip())
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"the expression has {len(expression)} characters, expected at most {MAX_EXPRESSION}")
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


CALCULATOR = Tool("calculator", calculator)


class CalculatorEnvironment:
    """An environment that asks the questions of the data set and offers a calculator.

    A turn without a call is the answer. It earns 1.0 if its last number equals the row's answer, which is a number or,
    as in GSM8K, `... #### 72`.
    """

    def reset(self, *, answer: str) -> None:
        self._answer = answer

    def step(self, text: str, calls: Sequence[ToolCall]) -> StepResult:
        if not calls and (match := INLINE_CALL.search(text)):
            calls = [ToolCall(CALCULATOR.name, {"expression": match["expression"]})]
        if calls:
            messages, counts = answer_calls(calls, {CALCULATOR.name: CALCULATOR})
            return StepResult(messages, metrics=counts)
        reference, number = parse_reference(self._answer), last_number(text)
        if reference is None:
            raise ValueError(f"the row's answer {self._answer[-80:]!r} is not a number; use data with numeric answers")
        is_right = number is not None and parse_number(number) == reference
        return StepResult(reward=float(is_right), terminated=True)


class GuessNumber:
    """A game with a secret digit and three guesses. `+`: the secret is larger, `-`: smaller, `=`: found, `?`: no guess.

    Finding the digit earns 1. The best policy finds 7 of 10 digits: one with the first guess, two with the second, four
    with the third.
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


ENVIRONMENTS: dict[str, Callable[[], Any]] = {"calculator": CalculatorEnvironment, "guess_number": GuessNumber}
TOOLS: dict[str, Callable[..., Any]] = {"calculator": calculator}
"""These two map names in `env.source` to built-in environments, and names in `env.tools` to built-in tools."""
