import subprocess
import sys
from pathlib import Path

import pytest

from app.reward.builtin_tasks import (
    check_answers,
    grade,
    is_task_reward,
    task_of,
)
from settings.errors import InputError
from settings.schema.reward import BUILT_IN_REWARDS
from tests.reward.samples import make_prompt, make_sample, score, values_of


def test_reward_is_the_weighted_sum_with_its_breakdown():
    samples = [make_sample(text) for text in ("#### 18", "so 18", "#### 17", "")]
    scored = score(["gsm8k", {"name": "gsm8k_format", "weight": 0.25}], samples)
    assert values_of(scored) == [1.25, 1.0, 0.25, 0.0]
    assert scored.samples[0].rewards == {"gsm8k": 1.0, "gsm8k_format": 1.0}
    assert scored.samples[2].rewards == {"gsm8k": 0.0, "gsm8k_format": 1.0}
    assert samples[0].reward is None and scored.samples[0].completion_ids is samples[0].completion_ids
    assert (scored.num_errors, scored.num_abstained, scored.notices, scored.fatal_error) == (0, 0, (), None)


@pytest.mark.parametrize("completion", ["18", "18.0", "36/2", "$18", "1800%/100"])
def test_equal_numbers_are_equal_however_they_are_written(completion):
    assert grade("gsm8k", f"it is {completion}", make_prompt()) == (0.0 if "%/" in completion else 1.0)


def test_votes_for_one_number_are_one_however_they_are_written():
    assert (
        task_of("gsm8k").answer("#### 18")
        == task_of("gsm8k").answer("so $18.00")
        == task_of("gsm8k").parse_reference("1 + 17 #### 18")
    )
    assert task_of("gsm8k").answer("who knows") is None


def test_correctness_is_exact_and_not_within_a_tolerance():
    assert grade("gsm8k", "0.3333333333333333333", make_prompt("1/3")) == 0.0


def test_format_alone_needs_no_answer():
    assert grade("gsm8k_format", "#### 18", make_prompt(None)) == 1.0
    check_answers([make_prompt(None)], ["gsm8k_format", "a_plug_in"])


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (["1", None, None], r"gsm8k compares .* q/1 has no answer \(and 1 more like it\)"),
        (
            ["1", "x^2", "3"],
            r"q/1 has the answer 'x\^2', which is not a number; choose the column of the answers with",
        ),
    ],
)
def test_rows_that_cannot_be_graded_are_found_early(answers, message):
    prompts = [make_prompt(answer, f"q/{i}") for i, answer in enumerate(answers)]
    with pytest.raises(InputError, match=message):
        check_answers(prompts, ["gsm8k_format", "gsm8k"])


def test_held_out_rows_that_cannot_be_graded_are_told_by_where_they_are_from():
    message = (
        r"but q/0 of the evaluation set \(data\.eval_source: a\.jsonl\) has no answer; choose another data\.eval_s"
    )
    with pytest.raises(InputError, match=message):
        check_answers([make_prompt(None)], ["gsm8k"], eval_source="a.jsonl")


def test_math_verify_needs_an_answer_of_any_kind():
    check_answers([make_prompt("x^2")], ["math_verify"])
    with pytest.raises(InputError, match=r"a reference answer, but q/0 has no answer; choose .*answer_column$"):
        check_answers([make_prompt(None)], ["math_verify"])


def test_scoring_a_sample_without_its_answer_is_an_input_error():
    with pytest.raises(InputError, match="q/0 has no answer"):
        grade("arithmetic", "18", make_prompt(None))


def test_the_format_predicate_belongs_to_the_correctness_function():
    assert task_of("gsm8k").is_formatted("#### 18") and not task_of("arithmetic").is_formatted("#### 18")
    assert task_of("arithmetic").is_formatted("18") and not task_of("gsm8k").is_formatted("18")


def test_every_built_in_name_but_one_is_a_tasks():
    assert [name for name in BUILT_IN_REWARDS if not is_task_reward(name)] == ["math_verify"]


def test_rewards_import_without_jax():
    root = Path(__file__).parents[2]
    program = "import sys, app.reward.reward_functions; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, cwd=root).returncode == 0
