"""Tests the checks of the chat template, the reward functions and the gradients."""

from contextlib import closing
from pathlib import Path

import jax
import numpy as np
import pytest

from app.model.io.model_files import open_model
from app.preflight.check_results import CheckRecorder
from app.preflight.gradient_check import check_gradients
from app.preflight.model_checks import check_chat_template, check_reward_functions
from app.prompts.tokenizer import Tokenizer, load_tokenizer
from app.records.sample import Prompt
from app.runtime.inputs import read_policy
from app.runtime.reward_trial import NO_ANSWERS, make_trial_samples
from app.runtime.scoring import ScoringSession
from app.training.setup import open_session
from settings import Settings, load
from tests.tiny_directory import TEMPLATE, write_model, write_tokenizer

MESSAGES = [{"role": "user", "content": "1+1=?"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model_checks") / "model")


def tokenizer_with(directory: Path, template: str = TEMPLATE) -> Tokenizer:
    write_tokenizer(directory, chat_template=template)
    return load_tokenizer(open_model(str(directory)))


def make_prompt(tokenizer: Tokenizer, uid: str = "p", answer: object = "12") -> Prompt:
    return Prompt(uid, np.asarray(tokenizer.chat_ids(MESSAGES), np.int32), "1+1=?", answer)


def test_check_warns_about_a_template_that_does_not_start_the_assistants_turn(directory: Path) -> None:
    tokenizer = tokenizer_with(directory, TEMPLATE.replace("add_generation_prompt", "false"))
    recorder = CheckRecorder()
    check_chat_template(recorder, Settings(), tokenizer, make_prompt(tokenizer), [])
    (result,) = recorder.results
    assert result.verdict == "warn" and "<|user|>1+1=?" in result.found
    assert result.found.startswith("the template does not start the assistant's turn; ")


def test_reward_check_gives_the_first_answered_prompt_right_and_wrong_answers(directory: Path) -> None:
    tokenizer = tokenizer_with(directory)
    answers = (None, "2", "2", "3", "4", "5", "6")
    prompts = [make_prompt(tokenizer, str(number), answer) for number, answer in enumerate(answers)]
    right, *others = make_trial_samples(tokenizer, prompts)
    assert (right.prompt.uid, right.completion) == ("1", "2")
    assert right.completion_ids.tolist() == [*tokenizer.encode("2"), 0]
    assert [(other.prompt.uid, other.completion) for other in others] == [("1", "3"), ("1", "4"), ("1", "5")]
    for numbers in ([None], [7, 7]):
        prompts = [make_prompt(tokenizer, "p", answer) for answer in numbers]
        *_, one, other = [sample.completion for sample in make_trial_samples(tokenizer, prompts)]
        assert (one, other) == NO_ANSWERS


def test_check_warns_about_a_reward_that_does_not_distinguish_answers(directory: Path) -> None:
    tokenizer, recorder = tokenizer_with(directory), CheckRecorder()
    prompts = [make_prompt(tokenizer, answer, answer) for answer in ("4", "4.0")]
    settings = load(None, [], {}).settings
    check_reward_functions(recorder, settings, make_trial_samples(tokenizer, prompts), prompts, ())
    (result,) = recorder.results
    assert result.verdict == "warn" and "check data.answer_column, and whether arithmetic fits" in result.advice
    assert result.found == "arithmetic: 1 for the reference answer, 1 for others"


def test_gradients_are_checked_in_every_micro_batch_shape(directory: Path) -> None:
    short = ["data.max_prompt_length=16", "rollout.max_new_tokens=8", "algorithm.max_tokens_per_device=128"]
    settings = load(None, [f"model.path={directory}", "mesh.shape=2,2,2", *short], {}).settings
    recorder, scoring = CheckRecorder(), ScoringSession.open(settings, read_policy(settings), None, trains=True)
    session, learning = open_session(scoring, None)
    with closing(session):
        params = scoring.load_params()
        check_gradients(recorder, session, learning, params)
        check_gradients(recorder, session, learning, jax.tree.map(lambda x: x * np.nan, params))
    finite, broken = recorder.results
    assert (finite.verdict, broken.verdict) == ("ok", "fail"), finite
    assert finite.found.count("(") > 2
    assert "NaN or infinity for blocks.attention_norm.scale in rows of (" in broken.found
