"""Tests of the chat template's check: it opens the answer, and its end token ends a completion."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from app.model.io.model_files import open_model
from app.preflight import model_checks
from app.preflight.check_results import CheckRecorder, CheckResult
from app.preflight.model_checks import (
    check_chat_template,
    check_reward_functions,
    make_test_samples,
)
from app.prompts.tokenizer import Tokenizer, load_tokenizer
from app.records.sample import Prompt
from settings import InputError, Settings, load
from tests.tiny_directory import TEMPLATE, write_model, write_tokenizer

ENDING = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<|assistant|>{{ message.content }}<|end|>"
    "{% else %}<|user|>{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
USERS_ALONE = (
    "{% for message in messages %}{% if message.role != 'user' %}{{ raise_exception('users alone') }}{% endif %}"
    "<|user|>{{ message.content }}{% endfor %}"
)
MESSAGES = [{"role": "user", "content": "1+1=?"}]
SLOW_IMPORT = "import time\ntime.sleep(600)\ndef judge(completion): return 1.0\n"
SLOW_CALL = "import time\ndef judge(completion): time.sleep(600)\n"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("trial") / "model")


def tokenizer_with(directory: Path, template: str) -> Tokenizer:
    write_tokenizer(directory, chat_template=template)
    return load_tokenizer(open_model(str(directory)))


def prompt_of(tokenizer: Tokenizer, uid: str = "p", answer: str | None = "12") -> Prompt:
    return Prompt(uid, np.asarray(tokenizer.chat_ids(MESSAGES), np.int32), "1+1=?", answer)


def template_result(tokenizer: Tokenizer) -> CheckResult:
    recorder = CheckRecorder()
    check_chat_template(recorder, Settings(), tokenizer, prompt_of(tokenizer))
    (result,) = recorder.results
    return result


@pytest.mark.parametrize(
    ("template", "verdict", "found"),
    [
        (ENDING, "ok", "it ends an answer with '<|end|>'"),
        (
            ENDING.replace("<|end|>", "<|unknown|>"),
            "warn",
            "with '<|unknown|>', but a completion ends",
        ),
        (TEMPLATE, "ok", "it does not mark the end of an answer"),
        (USERS_ALONE, "ok", "it does not mark the end of an answer"),
        (TEMPLATE.replace("add_generation_prompt", "false"), "warn", "it does not open the assistant's turn"),
    ],
    ids=["ends", "ends with another token", "does not end", "refuses the assistant", "does not open"],
)
def test_a_template_opens_the_assistants_turn_and_ends_it_like_a_completion(
    directory: Path, template: str, verdict: str, found: str
) -> None:
    if template == USERS_ALONE:
        template = USERS_ALONE + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    result = template_result(tokenizer_with(directory, template))
    assert result.verdict == verdict and found in result.found and "<|user|>1+1=?" in result.found


def test_the_first_prompt_with_an_answer_is_answered_rightly_and_wrongly(directory: Path) -> None:
    tokenizer = tokenizer_with(directory, TEMPLATE)
    answers = (None, "2", "2", "3", "4", "5", "6")
    prompts = [prompt_of(tokenizer, str(number), answer) for number, answer in enumerate(answers)]
    right, *others = make_test_samples(tokenizer, prompts)
    assert (right.prompt.uid, right.completion) == ("1", "2")
    assert right.completion_ids.tolist() == [*tokenizer.encode("2"), 0]
    assert [(other.prompt.uid, other.completion) for other in others] == [("1", "3"), ("1", "4"), ("1", "5")]
    (alone,) = make_test_samples(tokenizer, prompts[:1])
    assert alone.completion == "I do not know."


def reward_found(directory: Path, function: Path, *overrides: str) -> CheckResult:
    tokenizer, look = tokenizer_with(directory, TEMPLATE), CheckRecorder()
    prompts = [prompt_of(tokenizer)]
    chosen = load(None, [f"reward.functions=['{function}:judge']", *overrides], {}).settings
    check_reward_functions(look, chosen, make_test_samples(tokenizer, prompts), prompts, ())
    (finding,) = look.results
    return finding


@pytest.mark.parametrize(
    ("text", "limit", "told"),
    [
        (SLOW_IMPORT, "MAX_IMPORT_S", "reward.load_timeout_s = 60 s"),
        (SLOW_CALL, "MAX_CALL_S", "reward.timeout_s = 10 s"),
    ],
    ids=["import", "call"],
)
def test_a_reward_function_that_is_slower_than_a_look_is_given_up_and_told(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, limit: str, told: str
) -> None:
    (tmp_path / "plug.py").write_text(text)
    monkeypatch.setattr(model_checks, limit, 0.5)
    finding = reward_found(directory, tmp_path / "plug.py")
    assert (finding.verdict, finding.exit_code) == ("warn", 0)
    assert "took more than 0.5 s" in finding.found and told in finding.advice


def test_a_reward_function_that_a_run_does_not_wait_for_fails(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "slow_call.py").write_text(SLOW_CALL)
    finding = reward_found(directory, tmp_path / "slow_call.py", "reward.timeout_s=0.5")
    assert (finding.verdict, finding.exit_code) == ("fail", 1)
    (tmp_path / "slow_import.py").write_text(SLOW_IMPORT)
    with pytest.raises(InputError, match=r"while it was imported, it took more than 0\.5 s"):
        reward_found(directory, tmp_path / "slow_import.py", "reward.load_timeout_s=0.5")
