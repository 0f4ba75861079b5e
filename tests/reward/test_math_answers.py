"""Tests of math-verify in worker processes, in which it may hang."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from app.reward.math_answers import math_verify
from settings.errors import InputError
from tests.reward.samples import kinds_of, make_prompt, make_sample, score, values_of

installed = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed: pip install -e '.[math]'"
)


@installed
@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        (r"so $\frac{36}{2}$", "18", 1.0),
        (r"\boxed{18}", "9 + 9 = 18\n#### 18", 1.0),
        (r"the answer is \boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
        (r"the answer is \boxed{0.5}", r"$\frac{1}{2}$", 1.0),
        (r"\boxed{x + 1}", "1 + x", 1.0),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0),
        ("17", "18", 0.0),
        (r"\boxed{\frac{1}{0}}", "18", 0.0),
        ("", "18", 0.0),
        ("no idea", "18", 0.0),
    ],
)
def test_equal_is_equal_however_it_is_written(completion: str, answer: str, value: float) -> None:
    assert math_verify(completion, answer) == value


@installed
def test_a_reference_without_mathematics_is_no_reference() -> None:
    with pytest.raises(ValueError, match="the reference answer ' ' is no mathematical expression"):
        math_verify("18", " ")


@installed
def test_a_completion_that_sympy_never_finishes_costs_its_own_sample() -> None:
    prompt = make_prompt("18")
    samples = [make_sample(text, prompt) for text in (r"\boxed{18}", "9**9**9**9", r"\boxed{19}", "18")]
    scored = score(["math_verify"], samples, timeout_s=2)
    assert values_of(scored) == [1.0, 0.0, 0.0, 1.0]
    assert kinds_of(scored) == [None, "timeout", None, None]


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "math_verify", raising=False)
    with pytest.raises(InputError, match=r"reward\.functions: math_verify needs an optional package; pip install"):
        score(["math_verify"], [make_sample("18")])
