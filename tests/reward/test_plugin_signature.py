from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from app.plugins.loading import LoadError
from app.prompts.dataset import ANSWER_COLUMNS, PROMPT_COLUMNS
from app.reward.plugin_signature import (
    ANSWER_NAMES,
    MAX_CHARACTERS,
    PROMPT_NAMES,
    DataColumns,
    Parameter,
    PlugInSignature,
    build_arguments,
    read_signature,
)
from tests.reward.samples import make_prompt, make_sample

COLUMNS = DataColumns.from_rows([make_prompt(level=1, source="?")], source="train.jsonl")
BARE = DataColumns.from_rows([make_prompt(None)], source="train.jsonl")


def signature_of(function: Callable[..., Any], columns: DataColumns = COLUMNS) -> PlugInSignature:
    parameters = inspect.signature(function).parameters.values()
    return read_signature([Parameter(p.name, p.kind.name, p.default is not p.empty) for p in parameters], columns)


def test_prompt_and_answer_have_the_names_that_data_sets_use() -> None:
    assert {"prompt", *PROMPT_NAMES} == set(PROMPT_COLUMNS)
    assert set(ANSWER_NAMES) == {name for name in ANSWER_COLUMNS if name.isidentifier()}


@pytest.mark.parametrize(
    ("function", "style", "arguments"),
    [
        (lambda completions: 0, "batch", "completions"),
        (lambda prompts, completions, level: 0, "batch", "prompts completions level"),
        (lambda completion_ids: 0, "batch", "completion_ids"),
        (lambda completions, *, answer: 0, "batch", "completions answer"),
        (lambda completions, trainer_state, log_metric=None: 0, "batch", "completions trainer_state log_metric"),
        (lambda completions, log_extra=None: 0, "batch", "completions"),
        (lambda data_source, solution_str, ground_truth, extra_info=None: 0, "verl",
         "data_source solution_str ground_truth extra_info"),
        (lambda solution_str: 0, "verl", "solution_str"),
        (lambda completion: 0, "by name", "completion"),
        (lambda completion, completion_ids: 0, "by name", "completion completion_ids"),
        (lambda prompt, completion, solution, level, scale=2.0: 0, "by name", "prompt completion solution level"),
        (lambda question, completion: 0, "by name", "question completion"),
    ],
)  # fmt: skip
def test_a_signature_has_a_style(function: Callable[..., Any], style: str, arguments: str) -> None:
    signature = signature_of(function)
    assert (signature.style, " ".join(signature.arguments)) == (style, arguments)


def test_whoever_takes_everything_gets_everything() -> None:
    batch = signature_of(lambda **kwargs: 0)
    assert batch.style == "batch"
    assert set(batch.arguments) == {
        *("prompts", "completions", "completion_ids", "level", "trainer_state", "log_metric"),
        *("answer", "ground_truth", "solution"),
    }
    by_name = signature_of(lambda completion, **kwargs: 0)
    assert by_name.style == "by name"
    assert set(by_name.arguments) == {
        *("prompt", "completion", "completion_ids", "level"),
        *("answer", "ground_truth", "solution"),
    }
    verl = signature_of(lambda solution_str, **kwargs: 0)
    assert verl.style == "verl"
    assert set(verl.arguments) == {
        *("data_source", "solution_str", "ground_truth", "extra_info", "level"),
        *("answer", "solution"),
    }


@pytest.mark.parametrize(
    ("function", "columns", "message"),
    [
        (
            lambda completion, tokens, mood: 0,
            COLUMNS,
            "has parameters that cannot be filled: `tokens`, `mood`. A function takes",
        ),
        (lambda completion, answer: 0, BARE, "cannot be filled: `answer`"),
        (lambda completions, log_extra: 0, COLUMNS, "cannot be filled: `log_extra`"),
        (lambda completions, environments: 0, COLUMNS, "cannot be filled: `environments`"),
        (lambda completions, completion: 0, COLUMNS, "cannot be filled: `completion`"),
        (lambda completion, trainer_state: 0, COLUMNS, "cannot be filled: `trainer_state`"),
        (lambda: 0, COLUMNS, "has no parameter that a sample can fill"),
        (lambda *args: 0, COLUMNS, "has no parameter that a sample can fill"),
        (lambda scale=1.0: 0, COLUMNS, "has no parameter that a sample can fill"),
        (lambda completion, /: 0, COLUMNS, "takes `completion` by position only"),
    ],
)
def test_a_signature_that_cannot_be_filled_is_refused_by_name(
    function: Callable[..., Any], columns: DataColumns, message: str
) -> None:
    with pytest.raises(LoadError) as caught:
        signature_of(function, columns)
    assert message in str(caught.value)
    if "position" not in message:
        data = "`answer`, `level`" if columns is COLUMNS else "none"
        assert str(caught.value).endswith(f"these data columns: {data}")


def given(function: Callable[..., Any], *samples: Any, columns: DataColumns = COLUMNS) -> Any:
    return build_arguments(signature_of(function, columns), samples, columns)


def test_a_batch_is_lists_in_the_order_of_the_samples() -> None:
    samples = [make_sample("ab", make_prompt("1", level=1)), make_sample("c", make_prompt("2"))]
    arguments = given(lambda prompts, completions, completion_ids, answer, level, trainer_state: 0, *samples)
    assert arguments == {
        "prompts": ["?", "?"],
        "completions": ["ab", "c"],
        "completion_ids": [[0, 1], [0]],
        "answer": ["1", "2"],
        "level": [1, None],
    }


def test_a_chat_gets_messages_and_a_text_gets_text() -> None:
    chat = [{"role": "user", "content": "hi"}]
    samples = [make_sample("ab", make_prompt(source=chat)), make_sample("c")]
    assert given(lambda prompts, completions: 0, *samples) == {
        "prompts": [chat, "?"],
        "completions": [[{"role": "assistant", "content": "ab"}], "c"],
    }
    assert given(lambda prompt, completion: 0, samples[0]) == {"prompt": chat, "completion": "ab"}


def test_verl_gets_its_four() -> None:
    def verl(data_source, solution_str, ground_truth, extra_info=None): ...

    assert given(verl, make_sample("so 3", make_prompt("3"))) == {
        "data_source": "train.jsonl",
        "solution_str": "so 3",
        "ground_truth": "3",
        "extra_info": {},
    }
    row = make_prompt("3", data_source="gsm8k", extra_info={"index": 7})
    arguments = given(verl, make_sample("so 3", row), columns=DataColumns.from_rows([row], source="x"))
    assert (arguments["data_source"], arguments["extra_info"]) == ("gsm8k", {"index": 7})


def test_a_column_of_the_data_comes_before_another_name_of_the_answer() -> None:
    row = make_prompt("3", solution="one step at a time", question="which?")
    columns = DataColumns.from_rows([row], source="x", answer_column="final")
    arguments = given(
        lambda completion, solution, answer, final, question, problem: 0, make_sample("", row), columns=columns
    )
    assert arguments == {
        "completion": "",
        "solution": "one step at a time",
        "answer": "3",
        "final": "3",
        "question": "which?",
        "problem": "?",
    }


def test_of_a_long_completion_the_end_is_given() -> None:
    end = "ef" * (MAX_CHARACTERS // 2)
    sample = make_sample("abcd" + end)
    for function in (lambda completion: 0, lambda completions: 0, lambda solution_str: 0):
        (value,) = given(function, sample).values()
        assert value in (end, [end])
