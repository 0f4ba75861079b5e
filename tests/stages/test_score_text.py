"""Tests of `grpo score` on samples of other programs: ids alone, text alone, chats, and files of TRL and verl."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from app.records.jsonl import write_jsonl
from tests.program import digest_of, here, records_of, settings
from tests.tiny_directory import END, write_model, write_tokenizer

IDS = ("prompt_token_ids", "completion_token_ids")
CHAT = [{"role": "user", "content": "1+2=?"}]
RENDERED = "<|user|>1+2=?<|assistant|>"


def scored(model: Path, source: Path, *arguments: str | Path, role: str = "policy") -> list[dict[str, Any]]:
    """Scores a file; returns the lines of the output."""
    out = source.with_name(f"{source.name}.{role}.out")
    result = here(
        "score", *settings(f"model.path={model}"), "--input", source, "--out", out, "--role", role, *arguments
    )
    assert result.exit_code == 0, result.stderr
    return records_of(out)


def lines(folder: Path, *records: Mapping[str, Any]) -> Path:
    write_jsonl(folder / "in.jsonl", records)
    return folder / "in.jsonl"


def test_ids_alone_are_scored_as_the_samples_they_came_from(sampled: Path, tiny_model: Path, tmp_path: Path) -> None:
    samples = records_of(sampled)
    source = lines(tmp_path, *({name: one[name] for name in IDS} for one in samples))
    for before, after in zip(samples, scored(tiny_model, source), strict=True):
        assert after.keys() == {*IDS, "policy_logprobs"}
        np.testing.assert_allclose(after["policy_logprobs"], before["behavior_logprobs"], atol=1e-4)


def test_a_chat_gets_the_ids_of_a_rollout_and_a_string_its_own(tiny_model: Path, sampled: Path, tmp_path: Path) -> None:
    sample = records_of(sampled)[0]
    chat = [{"role": "user", "content": sample["prompt"]}]
    completion = [{"role": "assistant", "content": "3"}]
    of_chat, plain, rendered, ended = scored(
        tiny_model,
        lines(
            tmp_path,
            {"prompt": chat, "completion": completion, "note": None},
            {"prompt": "1+2=?", "completion": "3", "uid": 17, "answer": 3},
            {"prompt": RENDERED, "completion": "3"},
            {"prompt": CHAT, "completion": f"3{END}"},
        ),
    )
    assert of_chat["prompt_token_ids"] == sample["prompt_token_ids"]
    assert of_chat.keys() == {"prompt", "completion", "note", "policy_logprobs", *IDS}
    assert (of_chat["prompt"], of_chat["completion"]) == (chat, completion)
    # 2 is <|user|> and 3 <|assistant|>; neither is added to a string, nor 0, the end, to a completion.
    assert not {2, 3} & {*plain["prompt_token_ids"]} and len(plain["completion_token_ids"]) == 1
    assert (plain["uid"], plain["answer"]) == (17, 3)
    assert rendered["prompt_token_ids"] == ended["prompt_token_ids"] == [2, *plain["prompt_token_ids"], 3]
    assert ended["completion_token_ids"] == [*plain["completion_token_ids"], 0]
    assert ended["policy_logprobs"][:1] == pytest.approx(rendered["policy_logprobs"], abs=1e-5)
    assert plain["policy_logprobs"] != pytest.approx(rendered["policy_logprobs"], abs=1e-3)


def test_the_system_prompt_of_rollouts_comes_first_in_chats(tiny_model: Path, tmp_path: Path) -> None:
    source = lines(tmp_path, {"prompt": CHAT, "completion": "3"})
    (record,) = scored(tiny_model, source, *settings("data.system_prompt=1"))
    assert record["prompt_token_ids"][2:] == scored(tiny_model, source, "--overwrite")[0]["prompt_token_ids"]


def test_scored_text_chains_and_its_values_make_advantages(tiny_model: Path, tmp_path: Path) -> None:
    source = lines(tmp_path, {"prompt": CHAT, "completion": "3", "answer": "3"})
    (judged,) = scored(tiny_model, source, role="reward")
    assert judged == {**records_of(source)[0], "reward": 1.0, "rewards": {"arithmetic": 1.0}}
    (valued,) = scored(tiny_model, lines(tmp_path, judged), *settings("algorithm.name=ppo"), role="critic")
    assert valued.keys() == {*judged, *IDS, "values"}
    needed = {name: valued[name] for name in ("values", "reward")}
    result = here("gae", "--input", lines(tmp_path, needed), "--out", tmp_path / "gae.jsonl")
    assert result.exit_code == 0, result.stderr
    assert records_of(tmp_path / "gae.jsonl")[0].keys() == {"values", "reward", "advantages", "returns"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"answer": "3"}, "missing completion; a reward is of its text"),
        ({"completion": "3"}, "in.jsonl:1 has no answer"),
        ({"completion": "3", "answer": 3}, "answer: expected a string, got int 3"),
        ({"completion": [{"role": "user", "content": "3"}], "answer": "3"}, "completion: expected a string or a list"),
    ],
)
def test_a_reward_names_the_line_without_what_it_reads(tmp_path: Path, record: Any, message: str) -> None:
    source = lines(tmp_path, record)
    result = here("score", "--role", "reward", "--input", source, "--out", tmp_path / "out.jsonl")
    assert result.exit_code == 2 and f"{source}:1" in result.stderr and message in result.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_rewards_need_the_fields_that_their_functions_read(tmp_path: Path) -> None:
    (tmp_path / "plug.py").write_text("def f(prompt, completion): return 1")
    source = lines(tmp_path, {"completion": "3", "answer": "3"})
    for chosen, field in (
        (f"reward.functions=[{tmp_path / 'plug.py'}:f]", "prompt"),
        ("reward.overlong_buffer=2", IDS[1]),
    ):
        arguments = ("--input", source, "--out", tmp_path / "out.jsonl", *settings(chosen))
        result = here("score", "--role", "reward", *arguments)
        assert result.exit_code == 2 and f"{source}:1: missing {field}" in result.stderr


FOREIGN = {
    "uid": "g7-1",
    "group_id": "g7",
    "input": 3,
    "output": {"text": "3"},
    "prompt": [{"role": "user", "content": [{"type": "image"}]}],
    "rewards": [0.1],
    "reward": "good",
    "worker": 3,
    "segments": [],
    "advantages": "high",
    "values": 0,
    "loss": {"now": [1.0, None]},
}
"""Fields of another program that have our names or verl's, but mean something else."""


def test_fields_that_nobody_reads_may_hold_anything(tiny_model: Path, tmp_path: Path) -> None:
    turns = [{"role": "assistant", "content": "3"}, {"role": "user", "content": "4"}]
    ids = {"prompt_token_ids": [2, 5], "completion_token_ids": [6]}
    answers = {"prompt": [*CHAT, {"role": "assistant", "content": "3"}]}
    policy = lines(tmp_path, FOREIGN | {"completion": turns} | ids, ids | answers)
    for before, after in zip(records_of(policy), scored(tiny_model, policy), strict=True):
        assert after == before | {"policy_logprobs": after["policy_logprobs"]}
    reward = lines(tmp_path, FOREIGN | {"completion": "3", "answer": "3", "loss_mask": "none", IDS[1]: "none"})
    (judged,) = scored(tiny_model, reward, role="reward")
    assert judged == records_of(reward)[0] | {"reward": 1.0, "rewards": {"arithmetic": 1.0}}


def test_nan_becomes_null(tiny_model: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"prompt": CHAT, "completion": "3", "note": [{"a": float("nan")}]}))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([json.loads(source.read_text())]), tmp_path / "in.parquet")
    assert [scored(tiny_model, path)[0]["note"] for path in (source, tmp_path / "in.parquet")] == [[{"a": None}]] * 2


def rewarded_by(folder: Path, function: str, source: Path, *arguments: str) -> list[dict[str, Any]]:
    (folder / "plug.py").write_text(function)
    chosen = settings(f"reward.functions=[{folder / 'plug.py'}:f]", *arguments)
    return scored(folder, source, *chosen, "--overwrite", role="reward")


def test_any_value_of_group_id_names_a_group(tmp_path: Path) -> None:
    texts = {"prompt": "1", "completion": "2"}
    ids = ("g7", 1, "g7", None, [1, 2], 1, None)
    source = lines(tmp_path, *(texts | {"group_id": name} for name in ids))
    function = "def f(completions, **kwargs): return [len(completions)] * len(completions)"
    records = rewarded_by(tmp_path, function, source, "reward.batch_size=1")
    assert [one["reward"] for one in records] == [2, 2, 2, 1, 1, 2, 1]
    assert [one["group_id"] for one in records] == [*ids]


def test_a_reference_of_verl_may_have_any_type(tmp_path: Path) -> None:
    dump = {"input": "1", "output": "3", "score": 0.0}
    source = lines(tmp_path, *({**dump, "gts": gts} for gts in (["3", "4"], {"3": 1}, "3", "4")))
    function = "def f(solution_str, ground_truth): return solution_str in ground_truth"
    assert [one["reward"] for one in rewarded_by(tmp_path, function, source)] == [1.0, 1.0, 1.0, 0.0]


def test_a_function_that_takes_token_ids_gets_those_of_every_sample(tmp_path: Path) -> None:
    text = {"prompt": "1", "completion": "2"}
    source = lines(tmp_path, text | {IDS[1]: [3, 4]}, text)
    (tmp_path / "plug.py").write_text("def f(completions, completion_ids): return [1] * len(completions)")
    chosen = settings(f"reward.functions=[{tmp_path / 'plug.py'}:f]")
    result = here("score", "--role", "reward", "--input", source, "--out", tmp_path / "out.jsonl", *chosen)
    assert result.exit_code == 2 and "cannot be filled: `completion_ids`" in result.stderr
    assert result.stderr.endswith(f"{source}:2 has no completion_token_ids\n")
    anything = "def f(completions, **kwargs): return ['completion_ids' in kwargs] * len(completions)"
    assert [one["reward"] for one in rewarded_by(tmp_path, anything, source)] == [0.0, 0.0]
    source = lines(tmp_path, text | {IDS[1]: [3, 4]})
    taking = "def f(completions, completion_ids): return [len(ids) for ids in completion_ids]"
    assert [one["reward"] for one in rewarded_by(tmp_path, taking, source)] == [2.0]


def test_only_text_needs_a_tokenizer_and_only_chats_a_template(tmp_path: Path) -> None:
    model, out = write_model(tmp_path / "model"), tmp_path / "out.jsonl"
    ids = {"prompt_token_ids": [2, 5], "completion_token_ids": [6], "completion": "whatever"}
    text, chat = {"prompt": "1", "completion": "2"}, {"prompt": CHAT, "completion": "2"}
    write_tokenizer(model, chat_template=None)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    assert len(scored(model, lines(tmp_path, text))) == 1
    arguments = ("score", *settings(f"model.path={model}"), "--input", tmp_path / "in.jsonl", "--out", out)
    lines(tmp_path, text, chat)
    before = digest_of(tmp_path)
    result = here(*arguments)
    assert result.exit_code == 2
    assert "in.jsonl:2: prompt is a chat, but the tokenizer of model.path has no chat template; rend" in result.stderr
    assert digest_of(tmp_path) == before
    (model / "tokenizer.json").unlink()
    result = here(*arguments)
    assert result.exit_code == 2
    assert "in.jsonl:1: prompt is text, but model.path has no tokenizer for it; add the token ids" in result.stderr
    assert len(scored(model, lines(tmp_path, ids), "--overwrite")) == 1


def test_completions_that_trl_logs_are_scored(tiny_model: Path, tmp_path: Path) -> None:
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
    as_lines = scored(tiny_model, lines(tmp_path, *texts))
    assert [one["policy_logprobs"] for one in records] == [one["policy_logprobs"] for one in as_lines]


def test_a_parquet_row_that_cannot_be_used_is_named(tiny_model: Path, tmp_path: Path) -> None:
    arguments = (*settings(f"model.path={tiny_model}"), "--out", tmp_path / "out.jsonl")
    for column, message in (
        ({"completion": ["1", None]}, "row 1: missing completion_token_ids or completion"),
        ({"completion": ["1", "2"], "raw": [b"", b""]}, "row 0: cannot be written as JSON"),
    ):
        pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1", "2"], **column}), tmp_path / "in.parquet")
        result = here("score", *arguments, "--input", tmp_path / "in.parquet")
        assert result.exit_code == 2 and f"in.parquet {message}" in result.stderr


def test_rollouts_that_verl_dumps_are_scored_and_rewarded(tiny_model: Path, tmp_path: Path) -> None:
    dump = {"input": "1+2=?", "output": "3", "gts": "3", "score": 1.0, "step": 7, "acc": True}
    source = lines(tmp_path, dump, {**dump, "output": "4", "gts": None, "answer": "3"})
    records = scored(tiny_model, source)
    assert records[0] | dump == records[0]
    assert records[0].keys() == {*dump, *IDS, "policy_logprobs"}
    judged = scored(tiny_model, source, role="reward")
    assert [one["reward"] for one in judged] == [1.0, 0.0]
    # Scores chain: ids do not take the place of the text.
    again = scored(tiny_model, lines(tmp_path, *records), "--overwrite", role="reward")
    assert again == [scored | rewarded for scored, rewarded in zip(records, judged, strict=True)]


def test_several_checkpoints_share_programs_and_have_a_file_each(finished: Path, tmp_path: Path) -> None:
    source = finished / "rollouts" / "step_000003.jsonl"
    options = [["--checkpoint", finished / "checkpoints" / step] for step in ("2", "4")]
    arguments = ("score", "--input", source, "--json", "--out")
    both = here(*arguments, tmp_path / "{run}-{step}.jsonl", *options[0], *options[1])
    assert both.exit_code == 0, both.stderr
    first, second = json.loads(both.stdout)
    assert [first["written to"], second["written to"]] == [str(tmp_path / f"{finished.name}-{s}.jsonl") for s in "24"]
    assert first["shapes compiled"] == second["shapes compiled"] and second["compilations"] == 0
    for step, option in zip("24", options, strict=True):
        alone = here(*arguments, tmp_path / f"alone-{step}.jsonl", *option)
        assert json.loads(alone.stdout)["written to"].endswith(f"alone-{step}.jsonl")
        assert records_of(tmp_path / f"alone-{step}.jsonl") == records_of(tmp_path / f"{finished.name}-{step}.jsonl")
    before = digest_of(tmp_path)
    for out, repeated, message in (
        ("out.jsonl", "4", "out.jsonl would hold the scores of two checkpoints"),
        ("new-{step}.jsonl", "2", "new-2.jsonl would hold the scores of two checkpoints"),
        ("{run}-{step}.jsonl", "4", "exists already"),
    ):
        result = here(*arguments, tmp_path / out, *options[0], "--checkpoint", finished / "checkpoints" / repeated)
        assert result.exit_code == 2 and message in result.stderr
        assert digest_of(tmp_path) == before
    twice = here(*arguments, tmp_path / "{index}.jsonl", *options[0], *options[0])
    assert records_of(tmp_path / "0.jsonl") == records_of(tmp_path / "1.jsonl"), twice.stderr
    before = digest_of(tmp_path)
    for role in ("policy", "reward"):
        result = here(*arguments, tmp_path / "{step}.jsonl", "--role", role)
        assert result.exit_code == 2 and "--out: {step} stands for that of a checkpoint, but the" in result.stderr
        assert digest_of(tmp_path) == before
    source = tmp_path / f"{finished.name}-4.jsonl"
    onto_itself = ("--input", source, "--out", tmp_path / "{run}-{step}.jsonl", "--overwrite")
    result = here("score", *onto_itself, *options[0], *options[1])
    assert result.exit_code == 2 and "--input and --out both name" in result.stderr
    assert digest_of(tmp_path) == before
