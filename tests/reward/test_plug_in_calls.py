"""Tests the styles, arguments and results of reward functions."""

import asyncio
import functools
import inspect
import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from app.plugins.loading import LoadError
from app.prompts.dataset import ANSWER_COLUMNS, PROMPT_COLUMNS
from app.records.sample_json import sample_from_record, sample_to_record
from app.records.typed_values import to_json
from app.reward.plugin import StepInfo
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
from app.reward.reward_functions import RewardFunctions
from settings.errors import InputError
from settings.schema.reward import PluginSettings, RewardSettings
from tests.program import REPOSITORY
from tests.reward.processes import WORKERS
from tests.reward.samples import (
    kinds_of,
    make_group,
    make_prompt,
    make_sample,
    score,
    score_by,
    values_of,
    write_plug_in,
)

pytestmark = WORKERS


async def numbers(completions: list[str]) -> list[int]:
    await asyncio.sleep(0)
    return [1 for _ in completions]


class Judge:
    def __call__(self, completion: str) -> int:
        return 1


@pytest.mark.parametrize(
    ("function", "values"),
    [
        (lambda completion, answer: completion == answer, [0.0, 1.0, 0.0]),
        (lambda solution_str, ground_truth: {"score": len(solution_str), "acc": 1}, [1.0, 2.0, 3.0]),
        (lambda completions, **kwargs: [len(c) + len(kwargs["answer"]) for c in completions], [4.0, 5.0, 6.0]),
        (lambda prompts, completion_ids: (sum(ids) for ids in completion_ids), [0.0, 1.0, 3.0]),
        (numbers, [1.0] * 3),
        (lambda completions: np.array([0.5, 1.5, 2.5], np.float32), [0.5, 1.5, 2.5]),
        (lambda completion: Fraction(len(completion), 2), [0.5, 1.0, 1.5]),
        (functools.partial(lambda completion, scale: scale, scale=2), [2.0] * 3),
        (Judge(), [1.0] * 3),
        (lambda completions, trainer_state: [trainer_state.global_step + trainer_state.max_steps] * 3, [13.0] * 3),
    ],
)
def test_reward_functions_of_every_style_are_called_with_their_arguments(
    function: Callable[..., Any], values: list[float]
) -> None:
    samples = [make_sample(text, make_prompt("ab")) for text in ("a", "ab", "abc")]
    scored = score_by(function, samples)
    assert (values_of(scored), scored.notices) == (values, ())


def test_a_reward_function_may_print_fork_and_read_stdin(tmp_path: Path) -> None:
    source = """
import os
async def printing(completion):
    print('{"outcomes": []}')
    return 1
def forking(completions):
    os.fork()
    return [1] * len(completions)
def reading(completion):
    try: return input()
    except EOFError: return 7
"""
    path = write_plug_in(tmp_path, source)
    scored = score([f"{path}:{name}" for name in ("printing", "forking", "reading")], make_group("a", "b"), workers=1)
    assert (values_of(scored), scored.notices) == ([9.0, 9.0], ())


def test_documented_reward_signatures_run_as_written(tmp_path: Path) -> None:
    _, signatures = (REPOSITORY / "sops/recipes/add_a_reward.md").read_text(encoding="utf-8").split("## Signatures")
    (block,) = re.findall(r"^```python\n(.*?)^```", signatures, flags=re.DOTALL | re.MULTILINE)
    path = write_plug_in(tmp_path, block)
    sample = make_sample("so 18", make_prompt("18"))
    (scored,) = score([f"{path}:{name}" for name in ("brevity", "score", "overlap")], [sample]).samples
    assert scored.rewards == {"brevity": 0.4, "score": 1.0, "overlap": 1.0}


@pytest.mark.parametrize(
    ("source", "function", "message"),
    [
        ("class f:\n    def __init__(self, completion): ...", "plug.py:f", "expected a function, got a class"),
        ("import os\n1 / 0", "plug:f", "importing plug failed: ZeroDivisionError: division by zero (plug.py:2)"),
        (
            "def f(completion, mood): return 1",
            "plug.py:f",
            "cannot be filled: `mood`; remove or rename them. A",
        ),
        ("import math\nf = math.hypot", "plug.py:f", "its signature cannot be read"),
    ],
)
def test_an_unusable_reward_function_is_an_input_error_and_closes_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, function: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_plug_in(tmp_path, source)
    write_plug_in(tmp_path, "def good(completion): return 1", "good.py")
    with pytest.raises(InputError) as caught:
        score(["good.py:good", function], make_group("a"))
    assert str(caught.value).startswith(f"reward.functions: {function}: ")
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "__pycache__").exists()


def test_only_batch_functions_may_abstain() -> None:
    scored = score_by(lambda completions: [1, None], make_group("a", "b"))
    assert [s.rewards for s in scored.samples] == [{"f": 1.0}, {}]
    assert scored.num_abstained == 1
    scored = score_by(lambda completion: None, make_group("a"))
    assert kinds_of(scored) == ["value"] and "returned None, expected a number" in scored.notices[0]


TYPED = {
    **{"target": 16, "numbers": [3, 5, 8], "parity": True, "aliases": ["Ada", "A. L."], "due": None},
    **{"at": datetime(2025, 1, 1, 12, tzinfo=UTC), "day": date(2025, 1, 1), "price": Decimal("1.50")},
    **{"lasts": timedelta(hours=1), "clock": time(9, 30), "raw": b"\xff", "id": UUID(int=7), "top": float("inf")},
}


def test_reward_functions_get_answers_and_columns_of_any_type_unchanged() -> None:
    values = to_json(TYPED)
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    row = make_prompt(values, row=values, other={"python_type": "decimal.Decimal", "value": "many"})
    sample = sample_from_record(sample_to_record(make_sample("a", row)), where="f:1")
    seen: list[Any] = []
    score_by(lambda completions, answer, row, other: seen.append((answer, row, other)), [sample])
    assert seen == [([TYPED], [TYPED], [{"python_type": "decimal.Decimal", "value": "many"}])]


def test_extra_reward_metrics_come_from_returned_dicts_and_log_metric() -> None:
    def trl(completions: list[str], log_metric: Any) -> list[int]:
        log_metric("seen", len(completions))
        return [0] * len(completions)

    def verl(solution_str: str) -> dict[Any, Any]:
        return {"score": 1, "acc": solution_str == "b", "why": "so", "bad name!": 1, "nan": float("nan")}

    samples = [*make_group("a", "b"), *make_group("b", group=1)]
    assert score_by(verl, samples).function_counts["f"].extras == {"acc": (2.0, 3)}
    # The calls have two samples and one; each sample counts the value of its call.
    assert score_by(trl, samples, batch_size=2).function_counts["f"].extras == {"seen": (5.0, 3)}


def test_values_of_log_extra_are_kept_with_their_samples() -> None:
    def trl(completions: list[str], log_extra: Any) -> list[int | None]:
        log_extra("found it", [np.float32(0.5), None, float("nan")][: len(completions)])
        log_extra("words", ({"a": 1}, "b", True)[: len(completions)])
        return [1, None, 0][: len(completions)]

    samples = [*make_group("a", "b"), *make_group("b", group=1)]
    scored = score_by(trl, samples)
    assert [sample.extra["log_extra"] for sample in scored.samples] == [
        {"found it": 0.5, "words": "{'a': 1}"},
        {"found it": None, "words": "b"},
        {"found it": "nan", "words": True},
    ]
    again = score_by(lambda completion: 1, scored.samples)
    assert not any("log_extra" in sample.extra for sample in again.samples)
    wrong = score_by(lambda completions, log_extra: log_extra("n", [1, 2]) or [1] * len(completions), samples)
    assert (
        kinds_of(wrong) == [None, None, "value"] and "logged 2 values of 'n', expected one for each" in wrong.notices[0]
    )


def test_reward_batches_contain_whole_groups() -> None:
    def sizes(samples: list[Any], batch_size: int) -> list[float | None]:
        return values_of(
            score_by(lambda completions: [len(completions)] * len(completions), samples, batch_size=batch_size)
        )

    samples = [sample for group in range(4) for sample in make_group("a", "b", "c", group=group)]
    assert sizes(samples, 7) == [6.0] * 12
    assert sizes(samples, 1) == [3.0] * 12
    assert sizes(samples[::-1] + samples[:1], 9) == [9.0] * 9 + [4.0] * 4


def test_reward_functions_get_completions_unchanged_and_results_keep_sample_order(tmp_path: Path) -> None:
    source = "import time\ndef f(completion):\n    time.sleep(0.1 / (1 + len(completion)))\n    return len(completion)"
    texts = ["\x00\n\r\u2028\ud800\U0001f600", "x" * MAX_CHARACTERS, *("x" * length for length in range(20))]
    scored = score([f"{write_plug_in(tmp_path, source)}:f"], make_group(*texts), workers=4)
    assert values_of(scored) == [float(len(text)) for text in texts]


def test_held_out_samples_have_the_columns_of_their_own_data_set(tmp_path: Path) -> None:
    source = (
        "def f(solution_str, data_source, **kwargs):\n"
        "    return {'score': len(data_source), 'trained': 'level' in kwargs, 'asked': kwargs.get('topic') == 'sums'}"
    )
    training = [make_sample("a", make_prompt(level=1))]
    lost = replace(make_sample(""), finish_reason="dropped:non-finite logits")
    held_out = [make_sample("a", make_prompt(topic="sums")), lost]
    settings = RewardSettings.model_validate({"functions": [f"{write_plug_in(tmp_path, source)}:f"]})
    of_training = DataColumns.from_rows([s.prompt for s in training], source="train.jsonl")
    of_held_out = DataColumns.from_rows([s.prompt for s in held_out], source="test")
    with RewardFunctions(settings, PluginSettings(), of_training, of_held_out) as rewards:
        scored, judged = rewards.compute_rewards(training, StepInfo()), rewards.grade_held_out(held_out, StepInfo())
    assert (values_of(scored), scored.function_counts["f"].extras) == ([11.0], {"trained": (1.0, 1), "asked": (0.0, 1)})
    assert judged.function_counts["f"].extras == {"trained": (0.0, 1), "asked": (1.0, 1)}
    # A held-out sample that could not be generated counts as wrong.
    assert [(s.rewards, s.reward) for s in judged.samples] == [({"f": 4.0}, 4.0), ({"f": 0.0}, None)]


COLUMNS = DataColumns.from_rows([make_prompt(level=1, source="?")], source="train.jsonl")
TRAINER = "trainer_state log_metric log_extra"
ALL_COLUMNS = "answer ground_truth solution level"
BARE = DataColumns.from_rows([make_prompt(None)], source="train.jsonl")


def signature_of(function: Callable[..., Any], columns: DataColumns = COLUMNS) -> PlugInSignature:
    parameters = inspect.signature(function).parameters.values()
    return read_signature([Parameter(p.name, p.kind.name, p.default is not p.empty) for p in parameters], columns)


def test_names_of_prompt_and_answer_parameters_equal_the_data_set_column_names() -> None:
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
        (lambda data_source, solution_str, ground_truth, extra_info=None: 0, "verl",
         "data_source solution_str ground_truth extra_info"),
        (lambda prompt, completion, solution, level, scale=2.0: 0, "by name", "prompt completion solution level"),
        (lambda **kwargs: 0, "batch", f"prompts completions completion_ids {TRAINER} {ALL_COLUMNS}"),
        (lambda completion, **kwargs: 0, "by name", f"prompt completion completion_ids {ALL_COLUMNS}"),
        (lambda solution_str, **kwargs: 0, "verl", f"data_source solution_str extra_info {ALL_COLUMNS}"),
    ],
)  # fmt: skip
def test_the_signature_of_a_reward_function_determines_its_style_and_arguments(
    function: Callable[..., Any], style: str, arguments: str
) -> None:
    signature = signature_of(function)
    assert (signature.style, sorted(signature.arguments)) == (style, sorted(arguments.split()))


@pytest.mark.parametrize(
    ("function", "columns", "message"),
    [
        (
            lambda completion, tokens, mood: 0,
            COLUMNS,
            "cannot be filled: `tokens`, `mood`; remove or",
        ),
        (lambda completion, answer: 0, BARE, "cannot be filled: `answer`"),
        (lambda completions, completion: 0, COLUMNS, "cannot be filled: `completion`"),
        (lambda completion, trainer_state: 0, COLUMNS, "cannot be filled: `trainer_state`"),
        (lambda *args: 0, COLUMNS, "has no parameter that a sample can fill"),
        (lambda completion, /: 0, COLUMNS, "cannot be passed by name: `completion`"),
    ],
)
def test_a_reward_signature_that_cannot_be_filled_is_refused(function, columns, message):
    with pytest.raises(LoadError) as caught:
        signature_of(function, columns)
    assert message in str(caught.value)
    if "passed by name" not in message:
        data = "`answer`, `level`" if columns is COLUMNS else "none"
        assert str(caught.value).endswith(f"these data columns: {data}")


def given(function: Callable[..., Any], *samples: Any, columns: DataColumns = COLUMNS) -> Any:
    return build_arguments(signature_of(function, columns), samples, columns)


def test_batch_arguments_are_lists_and_each_completion_has_the_format_of_its_prompt() -> None:
    chat = [{"role": "user", "content": "hi"}]
    samples = [make_sample("ab", make_prompt("1", source=chat, level=1)), make_sample("c", make_prompt("2"))]
    assert given(lambda prompts, completions, completion_ids, answer, level, trainer_state: 0, *samples) == {
        "prompts": [chat, "?"],
        "completions": [[{"role": "assistant", "content": "ab"}], "c"],
        **{"completion_ids": [[0, 1], [0]], "answer": ["1", "2"], "level": [1, None]},
    }
    assert given(lambda prompt, completion: 0, samples[0]) == {"prompt": chat, "completion": "ab"}


def test_verl_reward_functions_get_the_four_arguments_of_verl() -> None:
    def verl(data_source, solution_str, ground_truth, extra_info=None): ...

    assert given(verl, make_sample("so 3", make_prompt("3"))) == {
        **{"data_source": "train.jsonl", "solution_str": "so 3", "ground_truth": "3", "extra_info": {}}
    }
    row = make_prompt("3", data_source="gsm8k", extra_info={"index": 7})
    arguments = given(verl, make_sample("so 3", row), columns=DataColumns.from_rows([row], source="x"))
    assert (arguments["data_source"], arguments["extra_info"]) == ("gsm8k", {"index": 7})


def test_a_data_column_overrides_an_alternative_name_of_the_answer() -> None:
    row = make_prompt("3", solution="one step at a time", question="which?")
    columns = DataColumns.from_rows([row], source="x", answer_column="final")
    arguments = given(
        lambda completion, solution, answer, final, question, problem: 0, make_sample("", row), columns=columns
    )
    assert {**arguments, "completion": "c"} == {
        **{"completion": "c", "solution": "one step at a time", "question": "which?", "problem": "?"},
        **{"answer": "3", "final": "3"},
    }


def test_reward_functions_get_the_end_of_a_long_completion() -> None:
    end = "ef" * (MAX_CHARACTERS // 2)
    sample = make_sample("abcd" + end)
    for function in (lambda completion: 0, lambda completions: 0, lambda solution_str: 0):
        (value,) = given(function, sample).values()
        assert value in (end, [end])
