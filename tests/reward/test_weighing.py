import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from app.flow import Prompt, Sample
from app.reward.weighing import check_answers, is_formatted, score_rewards
from settings.errors import InputError
from settings.schema import RewardFunction


def make_prompt(answer, uid="q/0"):
    return Prompt(uid=uid, token_ids=np.array([1], np.int32), source="?", answer=answer)


def make_sample(completion: str, answer: str | None = "18"):
    return Sample(
        prompt=make_prompt(answer),
        sample_index=0,
        group_id=0,
        completion_ids=np.array([1], np.int32),
        completion=completion,
        behavior_logprobs=np.array([-0.5], np.float32),
        finish_reason="stop",
        policy_version=0,
    )


def test_reward_is_the_weighted_sum_with_its_breakdown():
    samples = [make_sample(text) for text in ("#### 18", "so 18", "#### 17", "")]
    scored = score_rewards(samples, [("gsm8k", 1.0), ("gsm8k_format", 0.25)])
    assert [sample.reward for sample in scored] == [1.25, 1.0, 0.25, 0.0]
    assert scored[0].rewards == {"gsm8k": 1.0, "gsm8k_format": 1.0}
    assert scored[2].rewards == {"gsm8k": 0.0, "gsm8k_format": 1.0}
    assert samples[0].reward is None and scored[0].completion_ids is samples[0].completion_ids


def test_weight_zero_is_shown_but_not_counted_and_negative_weights_punish():
    (scored,) = score_rewards([make_sample("18")], [("arithmetic", 0.0), ("arithmetic_format", -0.5)])
    assert (scored.reward, scored.rewards) == (-0.5, {"arithmetic": 1.0, "arithmetic_format": 1.0})


@pytest.mark.parametrize("completion", ["18", "18.0", "36/2", "$18", "1800%/100"])
def test_equal_numbers_are_equal_however_they_are_written(completion):
    (scored,) = score_rewards([make_sample(f"it is {completion}")], [("gsm8k", 1.0)])
    assert scored.reward == (0.0 if "%/" in completion else 1.0)


def test_correctness_is_exact_and_not_within_a_tolerance():
    (scored,) = score_rewards([make_sample("0.3333333333333333333", answer="1/3")], [("gsm8k", 1.0)])
    assert scored.reward == 0.0


def test_format_alone_needs_no_answer():
    (scored,) = score_rewards([make_sample("#### 18", answer=None)], [("gsm8k_format", 1.0)])
    assert scored.reward == 1.0
    check_answers([make_prompt(None)], [("gsm8k_format", 1.0)])


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (["1", None, None], r"gsm8k compares .* q/1 has no answer \(and 1 more rows are like it\)"),
        (
            ["1", "x^2", "3"],
            r"q/1 has the answer 'x\^2', no number; choose the column with data\.answer_column",
        ),
    ],
)
def test_rows_that_cannot_be_graded_are_found_early(answers, message):
    prompts = [make_prompt(answer, f"q/{i}") for i, answer in enumerate(answers)]
    with pytest.raises(InputError, match=message):
        check_answers(prompts, [("gsm8k_format", 1.0), ("gsm8k", 1.0)])


def test_scoring_a_sample_without_its_answer_is_an_input_error():
    with pytest.raises(InputError, match="q/0 has no answer"):
        score_rewards([make_sample("18", answer=None)], [("arithmetic", 1.0)])


def test_a_repeated_function_is_an_input_error():
    with pytest.raises(InputError, match="gsm8k stands there twice"):
        score_rewards([], [("gsm8k", 1.0), ("gsm8k", 2.0)])


def test_an_unknown_function_is_an_input_error_that_lists_the_known():
    with pytest.raises(InputError, match="unknown 'maths', expected one of gsm8k, gsm8k_format, arithmetic"):
        check_answers([], [("maths", 1.0)])


def test_the_format_predicate_belongs_to_the_correctness_function():
    assert is_formatted("gsm8k", "#### 18") and not is_formatted("arithmetic", "#### 18")
    assert is_formatted("arithmetic", "18") and not is_formatted("gsm8k", "18")


def test_every_name_in_the_settings_is_known():
    names = get_args(RewardFunction.model_fields["name"].annotation)
    for name in names:
        (scored,) = score_rewards([make_sample("18")], [(name, 1.0)])
        assert scored.rewards is not None and set(scored.rewards) == {name}


def test_rewards_import_without_jax():
    root = Path(__file__).parents[2]
    program = "import sys, app.reward.weighing; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, cwd=root).returncode == 0
