"""Tests that a trial reports reward functions which do not distinguish the reference answer from others."""

import re
from typing import Any

import pytest

from app.records.typed_values import to_text
from app.reward.function_pool import register_callables
from app.runtime.reward_trial import indifference_warnings
from settings.errors import InputError
from tests.reward.samples import make_prompt, make_sample, opened


def found_for(function: Any, answer: Any, *others: str) -> list[str]:
    """Returns the warnings about a function, or about the built-in one of that name."""
    prompt = make_prompt(answer)
    texts = [to_text(answer), *(others or ("132", "7", "8"))]
    samples = [make_sample(text, prompt, index=index) for index, text in enumerate(texts)]
    named: list[Any] = [function if isinstance(function, str) else {"name": "f", "function": "callable:f"}]
    functions: dict[str, Any] = {"f": function}
    with register_callables(functions), opened(named, samples) as rewards:
        tried = rewards.try_functions(samples)
        return indifference_warnings(rewards, samples, tried)


def exact(completions: list[str], answer: list[Any], **kwargs: Any) -> list[float]:
    numbers = [re.findall(r"-?\d+", text) for text in completions]
    return [float(bool(found) and int(found[-1]) == one) for found, one in zip(numbers, answer, strict=True)]


def in_tags(completion: str, answer: str) -> float:
    inside = re.search(r"<answer>(.*)</answer>", completion)
    return 0.1 + (inside[1] == answer) if inside else 0.0


def thinks(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(text.startswith("<think>")) for text in completions]


@pytest.mark.parametrize(
    ("function", "answer"),
    [
        (exact, 391),
        (in_tags, "391"),
        (thinks, "391"),
        (lambda completion: -len(completion), "391"),
        # It is unknown what a completion with such an answer looks like.
        (lambda completion, answer: float(str(answer["target"]) == completion), {"target": 391}),
        (lambda completions: [None] * len(completions), "391"),
        *(("gsm8k", answer) for answer in ("391", "17 * 23\n#### 391", 391)),
        *((name, "391") for name in ("arithmetic", "arithmetic_format", "gsm8k_format")),
    ],
)
def test_reward_functions_that_grade_answers_or_format_pass_the_trial(function: Any, answer: Any) -> None:
    assert found_for(function, answer) == []


@pytest.mark.parametrize(
    ("function", "answer", "value"),
    [
        (exact, "391", "0 for the reference answer '391' (str)"),
        (in_tags, 391, "0 for the reference answer 391 (int)"),
        (lambda completion: 0.5, "391", "0.5 for the reference answer '391' (str)"),
    ],
)
def test_a_reward_function_that_grades_all_answers_equally_is_reported(function, answer, value):
    (warning,) = found_for(function, answer)
    assert f"f gives {value} of q/0, and for 3 other answers; check data.answer_column" in warning


def test_a_reward_function_that_fails_in_one_answer_format_is_reported() -> None:
    def loses(completions: list[str], answer: list[Any]) -> list[float]:
        return [0.0 for text in completions if "boxed" not in text]

    reason = r"training failed on the answer '.*boxed.*391.* returned a list of length 0"
    with pytest.raises(InputError, match=reason):
        found_for(loses, "391")
