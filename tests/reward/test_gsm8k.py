import json
import time

import numpy as np
import pytest

from app.records.sample import Prompt
from app.reward import gsm8k
from app.reward.builtin_tasks import TASKS, grade


def test_every_gsm8k_answer_parses_and_grades_itself_correct(gsm8k_dir):
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


@pytest.mark.parametrize(
    ("completion", "number"),
    [
        ("#### 18", "18"),
        ("####18 eggs", "18"),
        ("#### $1,000.", "$1,000"),
        ("#### **-7**", "-7"),
        ("#### 3/4", "3/4"),
        (r"\boxed{18}", "18"),
        (r"\boxed {18}", "18"),
        (r"$\boxed{\frac{3}{4}}$", r"\frac{3}{4}"),
        (r"\boxed{\$18.00}", r"\$18.00"),
        (r"\boxed{18\text{ dollars}}", "18"),
        (r"\boxed{\text{18}}", "18"),
        (r"\boxed{18\%}", "18"),
        (r"\boxed{60 miles/hour}", "60"),
        (r"\boxed{120 \text{ ft}^2}", "120"),
        (r"\boxed{x = 5}", "5"),
        (r"\boxed{1{,}000}", "1,000"),
        (r"\boxed{1\,000}", "1000"),
        ("first #### 5, then #### 6", "6"),
        (r"#### 5 and \boxed{6}", "6"),
        (r"\boxed{6} and #### 5", "5"),
        (r"#### \boxed{6}", "6"),
        (r"\boxed{5} \boxed{what}", "5"),
    ],
)
def test_the_last_marked_number_is_the_answer(completion, number):
    assert gsm8k.extract_marked(completion) == gsm8k.extract(completion) == number
    assert gsm8k.is_formatted(completion)


@pytest.mark.parametrize(
    "completion",
    [
        *(
            "",
            "18",
            "The answer is 18.",
            "#### ",
            "#### Step 1: think",
            "### 18",
            "#### x",
            "#### 1/0",
            "#### 12,34",
        ),
        *(r"\boxed{18", r"\boxed{}", r"\boxed{x}", r"boxed{18}", r"\boxed 18", "#### ١٨"),
        *(
            r"\boxed{5 or 6}",
            r"\boxed{5, 6}",
            r"\boxed{10^2}",
            r"\boxed{\sqrt{2}}",
            r"\boxed{10\pi}",
            r"\boxed{9**9}",
        ),
    ],
)
def test_a_mark_without_one_plain_number_is_no_mark(completion):
    assert gsm8k.extract_marked(completion) is None
    assert not gsm8k.is_formatted(completion)


def test_without_a_mark_the_last_number_counts_for_correctness_only():
    prompt = Prompt(uid="q", token_ids=np.array([1], np.int32), source="?", answer="so\n#### 18")
    assert grade("gsm8k", "16 + 2 = 18 eggs.", prompt) == 1.0
    assert grade("gsm8k_format", "16 + 2 = 18 eggs.", prompt) == 0.0
    assert grade("gsm8k", "it is 18, no: #### 17. Or 18", prompt) == 0.0
    assert grade("gsm8k_format", "it is 18, no: #### 17. Or 18", prompt) == 1.0


@pytest.mark.parametrize("answer", ["18", "18.0", "$18", "36/2", r"\boxed{18}", "steps 99\n#### 18"])
def test_a_reference_is_a_solution_or_just_a_number(answer):
    assert gsm8k.parse_reference(answer) == 18


@pytest.mark.parametrize("answer", ["", "x", "the answer is 18", "18 or 19"])
def test_a_reference_is_never_guessed_from_loose_numbers(answer):
    assert gsm8k.parse_reference(answer) is None


HOSTILE = [
    *("9", "#", "{}", "$", "1,", "1,000,", "1/", "9**9"),
    *(
        "####",
        "#### 1 ",
        "#### 1/0 ",
        "\\frac{",
        "\\frac{1",
        "\\frac{1}{0}",
        "\\boxed{",
        "\\boxed{}",
        "\\boxed{18 ",
    ),
    *("\\boxed{{}", "\\boxed{{", "\\boxed{1" + " " * 150 + "x} ", "\\boxed{" + "a " * 90 + "} "),
]


@pytest.mark.parametrize("piece", HOSTILE)
def test_a_hostile_completion_of_ten_megabytes_costs_nothing(piece):
    completion = (piece * (10_000_000 // len(piece) + 1))[:10_000_000]
    start = time.perf_counter()
    for task in TASKS.values():
        task.extract(completion)
        task.is_formatted(completion)
    assert time.perf_counter() - start < 5.0  # measured: 0.1 s at worst; quadratic time would be minutes


@pytest.mark.parametrize(("completion", "number"), [("85", "85"), ("47 + 38 = 85", "85"), ("-3.", "-3"), ("", None)])
def test_arithmetic_reads_the_last_number(completion, number):
    assert TASKS["arithmetic"].extract(completion) == number


@pytest.mark.parametrize(
    ("completion", "formatted"),
    [
        *[("85", True), (" -85\n", True), ("\u221285", True), ("0", True)],
        *[("", False), ("85.", False), ("85 86", False), ("= 85", False), ("8.5", False), ("1,000", False)],
        *[("- 85", False), ("٣", False), ("1" * 201, False)],
    ],
)
def test_arithmetic_format_is_exactly_one_integer(completion, formatted):
    assert TASKS["arithmetic"].is_formatted(completion) is formatted
