"""What a replay refuses before any device work."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_directory import write_model, write_tokenizer
from tests.training.program import digest_of, here
from tests.training.replays import assert_refused, replay, rewrite, step_file, train_on


def spoilt(name: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda record: record.update({name: value})


def without_its_end(record: dict[str, Any]) -> None:
    """As where answers end with another token."""
    if record["finish_reason"] == "stop":
        for name in ("completion_token_ids", "behavior_logprobs", "advantages"):
            record[name] = record[name][:-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoilt("completion_token_ids", [99]), r"--from-rollouts: .*:1: .*token 99, and the vocabulary"),
        (
            spoilt("completion", "other"),
            r":1: completion_token_ids read '.*' with the .*, and completion is 'other'",
        ),
        (lambda r: r.pop("behavior_logprobs"), r":1: missing behavior_logprobs"),
        (spoilt("group_id", 0), r":5: group_id 0 has samples of prompts .+ and .+; number groups apart"),
        (
            without_its_end,
            r"\d+ samples have finish_reason `stop`, and none of them ends with a token that ends an answer",
        ),
        (spoilt("prompt_token_ids", [1] * 17), r"has 17 tokens, more than data\.max_prompt_length = 16"),
        (lambda r: r.update(answer=None, reward=None), r"--from-rollouts: .*no answer"),
    ],
    ids=["vocabulary", "text", "logprobs", "groups", "ends", "length", "answer"],
)
def test_samples_that_cannot_be_learned_from_are_refused(
    loose: Path, config: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    def both(record: dict[str, Any]) -> None:
        change(record)
        for name in ("completion_token_ids", "prompt_token_ids"):
            if name == "completion_token_ids" and record[name] == [99]:
                record["behavior_logprobs"] = [-1.0]
                record.pop("advantages")

    assert_refused(train_on(rewrite(loose, both), config), message, config.parent / "runs")


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "holds no samples"), ("no json\n", "samples.jsonl:1: not JSON"), (None, "does not exist")],
    ids=["empty", "text", "absent"],
)
def test_a_file_without_samples_is_refused(loose: Path, config: Path, content: str | None, message: str) -> None:
    loose.unlink() if content is None else loose.write_text(content)
    assert_refused(train_on(loose, config), f"--from-rollouts: .*{message}", config.parent / "runs")


def test_a_sample_that_is_there_twice_is_refused(loose: Path, config: Path) -> None:
    first, *others = loose.read_text().splitlines(keepends=True)
    loose.write_text("".join([first, *others[:3], first, *others[3:]]))
    message = r"samples\.jsonl:5: group_id 0 has sample_index 0 twice; number its samples apart"
    assert_refused(train_on(loose, config), message, config.parent / "runs")


def test_groups_that_are_too_many_or_too_large_are_refused(loose: Path, config: Path) -> None:
    many = train_on(loose, config, "rollout.prompts_per_step=2")
    message = r"holds 4 groups, and a step has rollout\.prompts_per_step = 2; set .* to 4"
    assert_refused(many, message, config.parent / "runs")
    few = train_on(loose, config, "rollout.group_size=3")
    assert_refused(few, r"a group of 4 samples, more than rollout\.group_size = 3; set it to 4", config.parent / "runs")


def test_samples_of_another_tokenizer_are_refused(finished: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other")
    rules = json.loads((other / "tokenizer.json").read_text())
    words = rules["model"]["vocab"]
    words["1"], words["2"] = words["2"], words["1"]
    (other / "tokenizer.json").write_text(json.dumps(rules))
    result = replay(finished, tmp_path / "runs", f"model.path={other}")
    assert_refused(result, "were they sampled with another tokenizer", tmp_path / "runs")


def test_steps_that_are_missing_are_told_with_the_way_out(uninterrupted: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(uninterrupted / "rollouts", source / "rollouts")
    shutil.copy(uninterrupted / "settings.yaml", source)
    step_file(source, 3).unlink()
    none = tmp_path / "runs"
    assert_refused(replay(source, none), "has no samples of step 3; lower run.steps to end before it\n", none)
    falling = replay(source, none, "optimizer.schedule=cosine")
    assert_refused(falling, r"to end before it \(optimizer\.schedule: cosine then falls faster\)", none)
    for step in (1, 2):
        step_file(source, step).unlink()
    assert_refused(replay(source, none), r"no samples of step 1; its first step is 4: start with --checkpoint", none)
    start = ["--checkpoint", uninterrupted / "checkpoints" / "12"]
    assert_refused(replay(source, none, options=start), r"run\.steps: 12, so no step follows step 12", none)
    late = replay(source, none, "run.steps=14", options=start)
    assert_refused(late, "ends with step 12, and --checkpoint is after step 12", none)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert_refused(replay(empty, none), r"holds no step_<number>\.jsonl", none)


def test_a_checkpoint_of_something_else_is_refused(
    finished: Path, uninterrupted: Path, config: Path, loose: Path, tmp_path: Path
) -> None:
    start, none = ["--checkpoint", finished / "checkpoints" / "2"], config.parent / "runs"
    other = write_model(tmp_path / "seed1", seed=1)
    message = r"--checkpoint: .* was trained from another model"
    assert_refused(train_on(loose, config, f"model.path={other}", options=start), message, none)
    write_tokenizer(write_model(tmp_path / "template"), chat_template="{{ messages[-1].content }}<|assistant|>")
    template = f"model.path={tmp_path / 'template'}"
    assert_refused(train_on(loose, config, template, options=start), "from another tokenizer", none)
    alone = here("train", "--config", config, *start)
    assert_refused(alone, "--checkpoint goes with --from-rollouts; a run is continued with --resume", none)


def test_a_run_is_not_replayed_into_its_own_folder(finished: Path) -> None:
    before = digest_of(finished)
    result = replay(finished, finished.parent, f"run.name={finished.name}", options=["--resume", "auto"])
    assert result.exit_code == 2
    assert "is what --from-rollouts would replay; choose another run.name" in result.stderr
    assert digest_of(finished) == before
