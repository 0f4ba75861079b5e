"""Tests how numbers and answers are found in texts."""

import json
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.reward import gsm8k
from app.reward.builtin_tasks import TASKS, grade
from app.reward.numbers import last_number, parse_number
from tests.program import DEADLINE_S, REPOSITORY
from tests.reward.samples import make_prompt


def test_all_gsm8k_references_are_parsed_and_correct(gsm8k_dir):
    count = 0
    for path in (gsm8k_dir / "train.jsonl", gsm8k_dir / "test.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            answer = json.loads(line)["answer"]
            final = answer.rpartition("#### ")[2]
            assert gsm8k.parse_reference(answer) == gsm8k.parse_reference(final) == int(final.replace(",", ""))
            assert gsm8k.parse_reference(gsm8k.extract(answer) or "") == gsm8k.parse_reference(answer)
            assert gsm8k.is_formatted(answer)
            count += 1
    assert count == 8792


MARKED = {
    **{"#### 18": "18", "####18 eggs": "18", "#### $1,000.": "$1,000", "#### **-7**": "-7", "#### 3/4": "3/4"},
    **{r"\boxed{18}": "18", r"\boxed {18}": "18", r"$\boxed{\frac{3}{4}}$": r"\frac{3}{4}"},
    **{r"\boxed{\$18.00}": r"\$18.00", r"\boxed{18\text{ dollars}}": "18", r"\boxed{\text{18}}": "18"},
    **{r"\boxed{18\%}": "18", r"\boxed{60 miles/hour}": "60", r"\boxed{120 \text{ ft}^2}": "120"},
    **{r"\boxed{x = 5}": "5", r"\boxed{1{,}000}": "1,000", r"\boxed{1\,000}": "1000"},
    **{"first #### 5, then #### 6": "6", r"#### 5 and \boxed{6}": "6", r"\boxed{6} and #### 5": "5"},
    **{r"#### \boxed{6}": "6", r"\boxed{5} \boxed{what}": "5", r"\boxed{\frac12}": r"\frac12"},
    **{r"\boxed{2\frac{1}{2}}": r"2\frac{1}{2}", "#### 2 1/2": "2 1/2", "#### 1 000 eggs": "1 000"},
    **{"#### \uff11\uff0c\uff10\uff10\uff10": "1,000", "#### 1.5e3": "1.5e3", r"\boxed{USD18}": "USD18"},
    **{"\\boxed{\u5171 = 18 \u5143}": "18"},
}


@pytest.mark.parametrize("completion", MARKED)
def test_the_last_marked_number_is_the_answer(completion):
    assert gsm8k.extract_marked(completion) == gsm8k.extract(completion) == MARKED[completion]
    assert gsm8k.is_formatted(completion)


@pytest.mark.parametrize(
    "completion",
    [
        *("", "18", "The answer is 18.", "#### ", "#### Step 1: think", "### 18", "#### x", "#### 1/0", "#### 12,34"),
        *(r"\boxed{18", r"\boxed{}", r"\boxed{x}", r"boxed{18}", r"\boxed 18", "#### ١٨", r"\boxed{5 or 6}"),
        *(r"\boxed{5, 6}", r"\boxed{10^2}", r"\boxed{\sqrt{2}}", r"\boxed{10\pi}", r"\boxed{9**9}"),
    ],
)
def test_an_answer_mark_without_one_plain_number_is_ignored(completion):
    assert gsm8k.extract_marked(completion) is None
    assert not gsm8k.is_formatted(completion)


def test_without_an_answer_mark_the_last_number_counts_for_correctness_but_not_format():
    prompt = make_prompt("so\n#### 18")
    for completion, correct, formatted in (("16 + 2 = 18 eggs.", 1, 0), ("it is 18, no: #### 17. Or 18", 0, 1)):
        assert grade("gsm8k", completion, prompt) == correct
        assert grade("gsm8k_format", completion, prompt) == formatted


def test_a_reference_answer_may_be_a_solution_or_a_single_number():
    for answer in ("18", "18.0", "$18", "36/2", r"\boxed{18}", "steps 99\n#### 18"):
        assert gsm8k.parse_reference(answer) == 18
    for answer in ("", "x", "the answer is 18", "18 or 19"):
        assert gsm8k.parse_reference(answer) is None


HOSTILE = [
    *("9", "{}", "$", "1,", "1,000,", "1/", "####", "#### 1 ", "\\frac{", "\\frac{1}{0}", "\\boxed{", "\\boxed{18 "),
    *("\\boxed{{}", "\\boxed{{", "\\boxed{1" + " " * 150 + "x} ", "\\boxed{" + "a " * 90 + "} "),
]

READING = """\
import sys
from app.reward.builtin_tasks import TASKS
for piece in sys.stdin.read().split("\\0"):
    text = (piece * (10_000_000 // len(piece) + 1))[:10_000_000] + "\\n#### 18"
    assert [task.extract(text) for task in TASKS.values()] == ["18", "18"], piece
    assert [task.is_formatted(text) for task in TASKS.values()] == [True, False], piece
"""


def test_the_answer_is_found_quickly_after_ten_megabytes_of_hostile_text():
    """The search runs in a process that can be killed, since no signal ends it: in quadratic time it takes hours."""
    program, pieces = [sys.executable, "-c", READING], "\0".join(HOSTILE)
    ended = subprocess.run(program, input=pieces, text=True, cwd=REPOSITORY, timeout=DEADLINE_S)
    assert ended.returncode == 0


def test_arithmetic_answer_is_the_last_number_and_its_format_a_single_integer():
    for completion, number in {"85": "85", "47 + 38 = 85": "85", "-3.": "-3", "": None}.items():
        assert TASKS["arithmetic"].extract(completion) == number
    for completion in ("85", " -85\n", "\u221285", "0"):
        assert TASKS["arithmetic"].is_formatted(completion)
    for completion in ("", "85.", "85 86", "= 85", "8.5", "1,000", "- 85", "٣", "1" * 201):
        assert not TASKS["arithmetic"].is_formatted(completion)


NUMBERS = {
    **{"18": 18, " 18\n": 18, "18.": 18, "007": 7, "1,234": 1234, "1,234,567.50": Fraction(2469135, 2)},
    **{"-5": -5, "\u22125": -5, "+3.50": Fraction(7, 2), ".5": Fraction(1, 2), "0.1": Fraction(1, 10)},
    **{"3/4": Fraction(3, 4), "-3 / 4": Fraction(-3, 4), "1.5/2": Fraction(3, 4), r"\frac{3}{4}": Fraction(3, 4)},
    **{r"-\dfrac{3}{4}": Fraction(-3, 4), r"\tfrac{-3}{4}": Fraction(-3, 4), "$18.00": 18, r"\$1,000": 1000},
    **{"-$5": -5, "$-5": -5, "€ 5": 5, "25%": 25, r"25 \%.": 25, "USD18": 18, "-USD 18": -18, "US$18": 18},
    **{"1 234": 1234, "1\u202f234.5": Fraction(2469, 2), "1.5e3": 1500, "1e6": 10**6, "-2.5E-1": Fraction(-1, 4)},
    **{r"\frac12": Fraction(1, 2), r"\dfrac1{20}": Fraction(1, 20), r"\frac{1}2": Fraction(1, 2)},
    **{r"-2\frac{1}{2}": Fraction(-5, 2), r"2\frac12": Fraction(5, 2), "2 1/2": Fraction(5, 2), "\uff11\uff18": 18},
}


@pytest.mark.parametrize("text", NUMBERS)
def test_numbers_in_every_notation_are_parsed_exactly(text):
    assert parse_number(text) == NUMBERS[text]


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "x", "-", "$", "%", ".", "1 2", "1,23", "1,2345", "12,34", ",123", "1.2.3", "--5", "-$-5"),
        *("1e100", "e5", "1e5x", "1 0000", "1,234 567", r"\frac123", r"2\frac{-1}{2}", "2 1/0"),
        *("0x10", "1_000", "nan", "inf", "9**9**9", "2x", "1/0", "1/0.0", r"\frac{1}{0}", r"\frac{1}{}"),
        *("٣", "²", "½", "1٣", "1" * 201, "__import__('os')"),
    ],
)
def test_texts_that_are_not_numbers_are_not_parsed(text):
    assert parse_number(text) is None


@given(st.fractions(), st.integers(-(10**30), 10**30), st.integers(0, 999))
def test_formatted_numbers_are_parsed_as_their_value(value, whole, thousandths):
    assert parse_number(str(value)) == value
    assert parse_number(rf"\frac{{{value.numerator}}}{{{value.denominator}}}") == value
    text = f"{abs(whole):,}.{thousandths:03}"
    decimal = abs(whole) + Fraction(thousandths, 1000)
    assert parse_number(text) == decimal
    assert parse_number(f"-${text}") == -decimal


LAST_NUMBERS = {
    **{"16 - 3 = 13 eggs": "13", "16-3": "3", "f(2)-3": "3", "16 - 3": "3", "a loss of -3": "-3", "=-3": "-3"},
    **{"it costs $1,250.50.": "$1,250.50", "half: 1/2 of it": "1/2", r"so $\frac{3}{4}$.": r"$\frac{3}{4}"},
    **{"1, 2, 3": "3", "1,2,3": "3", "release 1.2.3": "1.2", "5 apples, x2, H2O": "5", "**18**": "18"},
    **{"18٣": None, "none": None, "": None, "it takes 2 1/2 hours": "2 1/2", "costs USD 18.": "USD 18"},
    **{"1 000 in all": "1 000", "of 5 100 g each": "100", "1\u00a0250": "1\u00a0250", "1.5e3 g": "1.5e3"},
    **{"\u662f\uff11\uff18\u3002": "18", "\u662f-5\u5ea6": "-5", "1.5e3\u5143": "1.5e3", "\u00e9t\u00e92": None},
}


@pytest.mark.parametrize("text", LAST_NUMBERS)
def test_the_last_number_of_a_text_is_found(text):
    assert last_number(text) == LAST_NUMBERS[text]
