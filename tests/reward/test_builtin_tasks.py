"""Tests the built-in tasks, and math-verify in worker processes, where it may hang."""

import importlib.util
import sys
from decimal import Decimal

import pytest

from app.records.typed_values import to_json
from app.reward.builtin_tasks import check_answers, grade, task_of
from app.reward.math_answers import math_verify
from settings.errors import InputError
from tests.reward.samples import kinds_of, make_prompt, make_sample, score, values_of


def test_gsm8k_correctness_compares_exact_numbers():
    for completion in ("18", "18.0", "36/2", "$18"):
        assert grade("gsm8k", f"it is {completion}", make_prompt()) == 1.0
    assert grade("gsm8k", "1800%/100", make_prompt()) == 0.0
    assert grade("gsm8k", "0.3333333333333333333", make_prompt("1/3")) == 0.0
    answers = {task_of("gsm8k").answer(completion) for completion in ("#### 18", "so $18.00")}
    assert (
        answers == {task_of("gsm8k").parse_reference("1 + 17 #### 18")} and task_of("gsm8k").answer("who knows") is None
    )


def test_format_rewards_need_no_reference_answer():
    assert grade("gsm8k_format", "#### 18", make_prompt(None)) == 1.0
    check_answers([make_prompt(None)], ["gsm8k_format", "a_plug_in"])


@pytest.mark.parametrize(
    ("answers", "source", "message"),
    [
        (["1", None, None], None, r"gsm8k compares .* q/1 has no answer \(and 1 more like it\)"),
        (["1", "x^2", "3"], None, r"q/1 has the answer 'x\^2', which is not a number; choose the column of"),
        ([1, True], None, "q/1 has the answer 'true', which is not a number"),
        ([["1"]], None, r"q/0 has the answer '\[\"1\"\]', which is not a number"),
        ([None], "a", r"q/0 of the evaluation set \(data\.eval_source: a\) has no answer; choose another data\.eval"),
    ],
)
def test_rows_without_a_usable_answer_are_refused(answers, source, message):
    prompts = [make_prompt(answer, f"q/{i}") for i, answer in enumerate(answers)]
    with pytest.raises(InputError, match=message):
        check_answers(prompts, ["gsm8k_format", "gsm8k"], eval_source=source)
    check_answers([make_prompt(answer) for answer in ("x^2", r"\$36", "∞", 3)], ["math_verify"])
    for answer, problem in ((None, "no answer"), ("", "''"), ("9 #### ", "'9 #### '"), (r"$\boxed{}$", ""), ([1], "")):
        with pytest.raises(
            InputError, match=rf"a reference answer, but q/0 has .*{problem}.*; choose .*answer_column$"
        ):
            check_answers([make_prompt(answer)], ["math_verify"])


def test_numeric_answers_are_accepted_as_references():
    for answer in (18, 18.0, to_json(Decimal("18.00"))):
        check_answers([make_prompt(answer)], ["gsm8k", "math_verify"])
        assert grade("gsm8k", "#### 18", make_prompt(answer)) == 1.0
        assert grade("gsm8k", "#### 17", make_prompt(answer)) == 0.0


installed = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed: pip install -e '.[math]'"
)


@installed
@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        (r"so $\frac{36}{2}$", "18", 1.0),
        (r"\boxed{18}", "9 + 9 = 18\n#### 18", 1.0),
        (r"the answer is \boxed{0.5}", r"$\frac{1}{2}$", 1.0),
        (r"\boxed{x + 1}", "1 + x", 1.0),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0),
        *(
            (text, answer, 1.0)
            for text in (r"\boxed{\$36}", r"it is \$36.")
            for answer in (r"\$36", "$36", r"$\$36$", 36)
        ),
        (r"\boxed{32348}", r"\$32,\!348", 1.0),
        *((r"\boxed{0.00001}", answer, 1.0) for answer in (1e-05, Decimal("1e-5"), "1e-05")),
        (r"\boxed{\frac{1}{2}}", "\\frac{1}\n{2}", 1.0),
        ("٣", "٣", 0.0),
        *((text, "18", 0.0) for text in ("17", r"\boxed{\frac{1}{0}}", "", "no idea")),
    ],
)
def test_math_verify_compares_mathematical_values(completion: str, answer: str | int, value: float) -> None:
    assert math_verify(completion, answer) == value


@installed
def test_a_math_verify_timeout_affects_only_its_own_sample() -> None:
    prompt = make_prompt("18")
    samples = [make_sample(text, prompt) for text in (r"\boxed{18}", "9**9**9**9", r"\boxed{19}", "18")]
    scored = score(["math_verify"], samples, timeout_s=2)
    assert values_of(scored) == [1.0, 0.0, 0.0, 1.0]
    assert kinds_of(scored) == [None, "timeout", None, None]


def test_error_about_missing_math_verify_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "math_verify", raising=False)
    with pytest.raises(
        InputError, match=r"reward\.functions: math_verify needs the package math-verify; run pip install"
    ):
        score(["math_verify"], [make_sample("18")])
