"""Tests `grpo score` on samples of other programs: ids alone, text alone, chats, and files of TRL and verl."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from app.records.jsonl import write_jsonl
from app.records.sample import Sample
from app.runtime.model_spec import read_model_spec
from app.stages.sample_reader import SampleReader
from app.stages.sample_text import SampleEncoder
from settings import load
from settings.errors import InputError
from settings.schema.data import DataSettings
from tests.program import here, records_of, settings, succeeded
from tests.tiny_directory import END, write_model, write_tokenizer

IDS = ("prompt_token_ids", "completion_token_ids")
CHAT = [{"role": "user", "content": "1+2=?"}]
RENDERED = "<|user|>1+2=?<|assistant|>"


def scored(model: Path, source: Path, *arguments: str | Path, role: str = "policy") -> list[dict[str, Any]]:
    out = source.with_name(f"{source.name}.{role}.out")
    succeeded(
        here("score", *settings(f"model.path={model}"), "--input", source, "--out", out, "--role", role, *arguments)
    )
    return records_of(out)


def lines(folder: Path, *records: Mapping[str, Any]) -> Path:
    write_jsonl(folder / "in.jsonl", records)
    return folder / "in.jsonl"


def samples_of(model: Path, source: Path, *, system_prompt: str | None = None) -> list[Sample]:
    spec = read_model_spec(load(None, [f"model.path={model}"], {}).settings, generates=False)
    reader = SampleReader(
        source, spec.architecture, SampleEncoder(lambda: spec.tokenizer, DataSettings(system_prompt=system_prompt))
    )
    reader.check()
    return [one.sample for window in reader.windows(100) for one in window]


def test_chats_are_encoded_like_rollouts_and_strings_literally(tiny_model: Path, sampled: Path, tmp_path: Path) -> None:
    sample = records_of(sampled)[0]
    source = lines(
        tmp_path,
        {
            "prompt": [{"role": "user", "content": sample["prompt"]}],
            "completion": [{"role": "assistant", "content": "3"}],
        },
        {"prompt": "1+2=?", "completion": "3"},
        {"prompt": RENDERED, "completion": "3"},
        {"prompt": CHAT, "completion": f"3{END}"},
    )
    found = samples_of(tiny_model, source)
    of_chat, plain, rendered, ended = (one.prompt.token_ids.tolist() for one in found)
    completions = [one.completion_ids.tolist() for one in found]
    assert of_chat == sample["prompt_token_ids"]
    # 2 is <|user|> and 3 <|assistant|>; neither is added to a string, nor 0, the end, to a completion.
    assert not {2, 3} & {*plain} and len(completions[1]) == 1
    assert rendered == ended == [2, *plain, 3]
    assert completions == [completions[1]] * 3 + [[*completions[1], 0]]
    told = samples_of(tiny_model, source, system_prompt="1")[0].prompt.token_ids
    assert told[2:].tolist() == of_chat


def test_text_samples_can_be_scored_by_reward_and_critic_and_passed_to_gae(tiny_model: Path, tmp_path: Path) -> None:
    source = lines(tmp_path, {"prompt": CHAT, "completion": "3", "answer": "3"})
    (judged,) = scored(tiny_model, source, role="reward")
    assert judged == {**records_of(source)[0], "reward": 1.0, "rewards": {"arithmetic": 1.0}}
    (valued,) = scored(tiny_model, lines(tmp_path, judged), *settings("algorithm.name=ppo"), role="critic")
    assert valued.keys() == {*judged, *IDS, "values"}
    needed = {name: valued[name] for name in ("values", "reward")}
    succeeded(here("gae", "--input", lines(tmp_path, needed), "--out", tmp_path / "gae.jsonl"))
    assert records_of(tmp_path / "gae.jsonl")[0].keys() == {"values", "reward", "advantages", "returns"}


@pytest.mark.parametrize(
    ("record", "chosen", "message"),
    [
        ({"answer": "3"}, "run.seed=0", "missing completion (rewards grade its text)"),
        ({"completion": "3"}, "run.seed=0", "in.jsonl:1 has no answer"),
        ({"completion": "3", "answer": [3]}, "run.seed=0", "in.jsonl:1 has the answer '[3]', which is not a number"),
        ({"completion": CHAT, "answer": "3"}, "run.seed=0", "completion: expected a string or a list"),
        (
            {"completion": "3", "answer": "3"},
            "reward.functions=[{plug}:f]",
            "in.jsonl:1: missing prompt",
        ),
        (
            {"completion": "3", "answer": "3"},
            "reward.overlong_buffer=2",
            "in.jsonl:1: missing completion_token_ids",
        ),
    ],
)
def test_score_names_a_line_without_a_field_that_a_reward_needs(
    tmp_path: Path, record: Any, chosen: str, message: str
) -> None:
    plug = tmp_path / "plug.py"
    plug.write_text("def f(prompt, completion): return 1")
    source = lines(tmp_path, record)
    options = ("--input", source, "--out", tmp_path / "out.jsonl", *settings(chosen.format(plug=plug)))
    result = here("score", "--role", "reward", *options)
    assert result.exit_code == 2 and f"{source}:1" in result.stderr and message in result.stderr
    assert not (tmp_path / "out.jsonl").exists()


FOREIGN = {
    **{"uid": "g7-1", "group_id": "g7", "input": 3, "output": {"text": "3"}, "rewards": [0.1], "reward": "good"},
    **{"worker": 3, "segments": [], "advantages": "high", "values": 0, "loss": {"now": [1.0, None]}},
    "prompt": [{"role": "user", "content": [{"type": "image"}]}],
}
"""Fields of another program that have our names or verl's, but mean something else."""

OF_VERL = {"input": "1+2=?", "output": "3", "gts": "3", "score": 1.0, "step": 7, "acc": True}


def test_unknown_fields_of_other_programs_are_kept(tiny_model: Path, sampled: Path, tmp_path: Path) -> None:
    turns = [{"role": "assistant", "content": "3"}, {"role": "user", "content": "4"}]
    ids = [{name: one[name] for name in IDS} for one in records_of(sampled)]
    answers = {"prompt": [*CHAT, {"role": "assistant", "content": "3"}]}
    dumps = OF_VERL, {**OF_VERL, "output": "4", "gts": None, "answer": "3"}
    chat = {"prompt": CHAT, "completion": [{"role": "assistant", "content": "3"}], "note": None, "uid": 17, "answer": 3}
    source = lines(tmp_path, FOREIGN | {"completion": turns} | ids[0], ids[1] | answers, *ids[2:], chat, *dumps)
    records = scored(tiny_model, source)
    for before, after in zip(records_of(source), records, strict=True):
        assert after.keys() == {*before, *IDS, "policy_logprobs"} and after == after | before
    for after, sample in zip(records, records_of(sampled), strict=False):
        np.testing.assert_allclose(after["policy_logprobs"], sample["behavior_logprobs"], atol=1e-4)
    # An output can be scored again: its ids do not replace the text.
    judged = scored(tiny_model, lines(tmp_path, *dumps), role="reward")
    assert [one["reward"] for one in judged] == [1.0, 0.0]
    again = scored(tiny_model, lines(tmp_path, *records[-2:]), "--overwrite", role="reward")
    assert again == [one | rewarded for one, rewarded in zip(records[-2:], judged, strict=True)]
    reward = lines(tmp_path, FOREIGN | {"completion": "3", "answer": "3", "loss_mask": "none", IDS[1]: "none"})
    (only,) = scored(tiny_model, reward, "--overwrite", role="reward")
    assert only == records_of(reward)[0] | {"reward": 1.0, "rewards": {"arithmetic": 1.0}}


def rewarded_by(folder: Path, function: str, source: Path, *arguments: str) -> list[dict[str, Any]]:
    (folder / "plug.py").write_text(function)
    chosen = settings(f"reward.functions=[{folder / 'plug.py'}:f]", *arguments)
    return scored(folder, source, *chosen, "--overwrite", role="reward")


def test_any_value_of_group_id_identifies_a_group(tmp_path: Path) -> None:
    texts = {"prompt": "1", "completion": "2"}
    ids = ("g7", 1, "g7", None, [1, 2], 1, None)
    source = lines(tmp_path, *(texts | {"group_id": name} for name in ids))
    function = "def f(completions, **kwargs): return [len(completions)] * len(completions)"
    records = rewarded_by(tmp_path, function, source, "reward.batch_size=1")
    assert [one["reward"] for one in records] == [2, 2, 2, 1, 1, 2, 1]
    assert [one["group_id"] for one in records] == [*ids]


def test_a_reward_function_with_token_ids_needs_them_in_every_sample(tmp_path: Path) -> None:
    text = {"prompt": "1", "completion": "2"}
    taking = "def f(completions, completion_ids): return [len(ids) for ids in completion_ids]"
    source = lines(tmp_path, text | {IDS[1]: [3, 4]})
    assert [one["reward"] for one in rewarded_by(tmp_path, taking, source)] == [2.0]
    source = lines(tmp_path, text | {IDS[1]: [3, 4]}, text)
    chosen = settings(f"reward.functions=[{tmp_path / 'plug.py'}:f]")
    result = here("score", "--role", "reward", "--input", source, "--out", tmp_path / "out.jsonl", *chosen)
    assert result.exit_code == 2 and "cannot be filled: `completion_ids`" in result.stderr
    assert result.stderr.endswith(f"{source}:2 has no completion_token_ids\n")
    anything = "def f(completions, **kwargs): return ['completion_ids' in kwargs] * len(completions)"
    assert [one["reward"] for one in rewarded_by(tmp_path, anything, source)] == [0.0, 0.0]


def test_only_text_needs_a_tokenizer_and_only_chats_a_template(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    ids = {"prompt_token_ids": [2, 5], "completion_token_ids": [6], "completion": "whatever"}
    text, chat = {"prompt": "1", "completion": "2"}, {"prompt": CHAT, "completion": "2"}
    write_tokenizer(model, chat_template=None)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    assert len(samples_of(model, lines(tmp_path, text))) == 1
    without_template = r"in.jsonl:2: prompt is a chat, but the tokenizer of model.path has no chat template; rend"
    with pytest.raises(InputError, match=without_template):
        samples_of(model, lines(tmp_path, text, chat))
    (model / "tokenizer.json").unlink()
    without_tokenizer = (
        r"in.jsonl:1: prompt is text, but the tokenizer of model.path cannot encode it: .*, or add the token ids"
    )
    with pytest.raises(InputError, match=without_tokenizer):
        samples_of(model, lines(tmp_path, text))
    assert len(samples_of(model, lines(tmp_path, ids))) == 1


def test_parquet_files_of_trl_are_scored(tiny_model: Path, tmp_path: Path) -> None:
    logged = {
        "step": [1, 1],
        "prompt": [RENDERED, "1+2=?"],
        "completion": ["3", "4"],
        "accuracy_reward": [1.0, float("nan")],
        "advantage": [0.5, -0.5],
    }
    source = tmp_path / "completions_00001.parquet"
    pyarrow.parquet.write_table(pyarrow.table(logged), source)
    records = scored(tiny_model, source)
    assert [one["accuracy_reward"] for one in records] == [1.0, None]
    assert [one.keys() - {*IDS, "policy_logprobs"} for one in records] == [{*logged}] * 2
    texts = [{"prompt": p, "completion": c} for p, c in zip(logged["prompt"], logged["completion"], strict=True)]
    for record, sample in zip(records, samples_of(tiny_model, lines(tmp_path, *texts)), strict=True):
        assert record["prompt_token_ids"] == sample.prompt.token_ids.tolist()
        assert record["completion_token_ids"] == sample.completion_ids.tolist()
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1", "2"], "completion": ["1", None]}), source)
    with pytest.raises(InputError, match=f"{source.name} row 1: missing completion_token_ids or completion"):
        samples_of(tiny_model, source)
