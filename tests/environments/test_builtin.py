"""Tests the environments that come with the program."""

from typing import Any

import pytest

from app.environments.builtin import ENVIRONMENTS, GuessNumber, calculator
from app.environments.interface import ToolCall


def test_the_calculator_computes_exactly() -> None:
    values = {
        **{"47*38": "1786", "-3 + +4": "1", "(12.5 + 3) * 4": "62", "0.1+0.2": "0.3", "1/8": "0.125"},
        **{"1/3": "0.333333333333333", "1,250,000/2": "625000", "1" + "0" * 20 + "/3": "33333333333333300000"},
    }
    assert {expression: calculator(expression) for expression in values} == values


@pytest.mark.parametrize(
    "expression",
    [
        *("", "2 +", "x", "f(2)", "'a'*9", "True+1", "2 if 1 else 3", "1j", "1 < 2", "1//2", "1%2", "~1", "[1]"),
        *("9**9**9", "2**2", "1" * 201, "1e999999999", "(" * 99 + ")" * 99, "0x10", "é", "\x00"),
        "__import__('os')",
    ],
)
def test_the_calculator_refuses_anything_but_plain_arithmetic(expression: str) -> None:
    with pytest.raises(ValueError, match="expression"):
        calculator(expression)


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ("She has <<47*38>>", [], "1786"),
        ("She has <<47*38", [], "1786"),
        ("She has <<1+1=2>>2, then <<47*38=1786>>\n", [], "1786"),
        ("", [ToolCall("calculator", {"expression": "47*38"})], "1786"),
        ("<<1/0", [], "Error: ZeroDivisionError: Fraction(1, 0)"),
    ],
)
def test_the_calculator_reads_calls_and_gsm8k_annotations(text: str, calls: list[ToolCall], content: str) -> None:
    environment = ENVIRONMENTS["calculator"]()
    assert environment.reset(answer="#### 1786") is None
    answer = environment.step(text, calls)
    assert answer.messages == [{"role": "tool", "content": content}]
    errors = {"tool_errors": 1} if "Error" in content else {}
    assert (answer.reward, answer.terminated, answer.metrics) == (0.0, False, {"tool_calls": 1} | errors)


def test_a_turn_without_a_call_is_scored_by_its_last_number() -> None:
    for text, reward in {"It is 1,786.": 1.0, "<<47*38=1786>>1786": 1.0, "1786 or 1787": 0.0}.items():
        environment = ENVIRONMENTS["calculator"]()
        environment.reset(answer="long division\n#### 1786")
        result = environment.step(text, [])
        assert (result.reward, result.terminated, result.messages) == (reward, True, ())


def play(secret: int, guesses: tuple[str, ...]) -> list[tuple[Any, float, bool]]:
    environment = GuessNumber()
    assert environment.reset(seed=secret) == "?"
    answers = [environment.step(guess, []) for guess in guesses]
    return [(answer.messages, answer.reward, answer.terminated) for answer in answers]


def test_number_guessing_answers_each_guess_and_ends_after_the_third() -> None:
    assert play(7, ("5", "9", "8")) == [("+", 0.0, False), ("-", 0.0, False), ("-", 0.0, True)]
    assert play(7, ("5", "7")) == [("+", 0.0, False), ("=", 1.0, True)]
    assert play(7, ("seven", "77", "²")) == [("?", 0.0, False), ("?", 0.0, False), ("?", 0.0, True)]
    assert play(7, (" 7\n",)) == [("=", 1.0, True)]
