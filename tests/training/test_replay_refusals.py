"""Tests of input that a replay refuses before any device work."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from app.checkpoint.train_progress import ProgressRecord, progress_path
from settings.errors import InputError
from tests.program import digest_of, here, records_of
from tests.replays import assert_refused, looked, replay, rewrite, step_file, train_on, write
from tests.tiny_directory import write_model, write_tokenizer


def spoilt(name: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda record: record.update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoilt("completion_token_ids", [99]), r"--from-rollouts: .*:1: .*token 99, but the vocabulary"),
        (
            spoilt("completion", "other"),
            r":1: completion_token_ids read '.*' with the .*, and completion is 'other'",
        ),
        (lambda r: r.pop("behavior_logprobs"), r":1: missing behavior_logprobs"),
        (spoilt("group_id", 0), r":5: group_id 0 has samples of prompts .+ and .+; give their groups different"),
        (spoilt("prompt_token_ids", [1] * 17), r"has 17 tokens, more than data\.max_prompt_length = 16"),
        (lambda r: r.update(answer=None, reward=None), r"--from-rollouts: .*no answer"),
    ],
    ids=["vocabulary", "text", "logprobs", "groups", "length", "answer"],
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


def test_groups_that_are_too_many_or_too_large_are_refused(loose: Path, config: Path) -> None:
    many = train_on(loose, config, "rollout.prompts_per_step=2")
    message = r"holds 4 groups, and a step has rollout\.prompts_per_step = 2; set .* to 4"
    assert_refused(many, message, config.parent / "runs")
    few = train_on(loose, config, "rollout.group_size=3")
    assert_refused(few, r"a group of 4 samples, more than rollout\.group_size = 3; set it to 4", config.parent / "runs")


def asked_twice(path: Path) -> Path:
    """Returns the groups with the first group again in place of the second."""
    records = records_of(path)
    again = [{**record, "group_id": 1} for record in records if record["group_id"] == 0]
    return write(path, [*(record for record in records if record["group_id"] != 1), *again])


def test_two_groups_of_a_prompt_are_refused_but_where_a_run_has_drawn_them(loose: Path, source: Path) -> None:
    message = r"samples\.jsonl:13: group_id 0 and group_id 1 both have samples of prompt \S+, .*; join them under one"
    with pytest.raises(InputError, match=message):
        looked(source, at=asked_twice(loose))
    asked_twice(step_file(source, 1))
    assert len(looked(source).load_groups(1)) == 4


def test_groups_that_hosts_cannot_share_out_are_refused(
    loose: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    message = "holds 4 groups, and a step has rollout.prompts_per_step = 4 on each of 2 hosts; set .* to 2"
    with pytest.raises(InputError, match=message):
        looked(source, at=loose)
    write(loose, [record for record in records_of(loose) if record["group_id"] != 2])
    with pytest.raises(InputError, match="2 hosts cannot share them evenly"):
        looked(source, at=loose)


def no_file(source: Path) -> Path:
    return Path(os.devnull)


def folder_in_place_of_a_file(source: Path) -> Path:
    step_file(source, 2).unlink()
    step_file(source, 2).mkdir()
    return source


def link_to_nothing(source: Path) -> Path:
    step_file(source, 2).unlink()
    step_file(source, 2).symlink_to("nowhere")
    return source


def nothing_saved(source: Path) -> Path:
    shutil.rmtree(source / "rollouts")
    return source


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (no_file, r"/dev/null is neither a file nor a folder; give a file of samples"),
        (folder_in_place_of_a_file, r"step_000002\.jsonl: cannot be read: Is a directory"),
        (link_to_nothing, r"step_000002\.jsonl: cannot be read: No such file or directory"),
        (nothing_saved, r"holds no step_<number>\.jsonl \(a run under logging\.save_rollouts: false writes none\)"),
    ],
)
def test_files_that_are_none_of_samples_are_refused(source: Path, change: Callable[[Path], Path], message: str) -> None:
    with pytest.raises(InputError, match=f"^--from-rollouts: .*{message}"):
        looked(source, at=change(source))


@pytest.mark.parametrize("new", [None, "longer"])
def test_a_file_that_changes_while_the_run_goes_on_is_named(source: Path, new: str | None) -> None:
    replay, file = looked(source), step_file(source, 2)
    content = file.read_text()
    file.unlink()
    if new is not None:
        file.write_text(content + content)
    assert len(replay.load_groups(1)) == 4
    with pytest.raises(InputError, match=r"--from-rollouts: .*step_000002\.jsonl has changed since the run began"):
        replay.load_groups(2)


def test_a_critic_of_another_model_than_the_checkpoint_s_is_refused(
    source: Path, loose: Path, finished: Path, tmp_path: Path
) -> None:
    start = Path(shutil.copytree(finished / "checkpoints" / "2", tmp_path / "other" / "checkpoints" / "2"))
    saved = ProgressRecord.read(start)
    fingerprints = {**saved.progress.fingerprints, "the critic": "another"}
    changed = replace(saved, progress=replace(saved.progress, fingerprints=fingerprints))
    progress_path(start).write_text(json.dumps(changed.to_json()))
    with pytest.raises(InputError, match=r"--checkpoint: .* holds a critic that was trained from another model"):
        looked(source, "algorithm.estimator=gae", at=loose, checkpoint=start)
    assert looked(source, at=loose, checkpoint=start).initial_checkpoint is not None


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
    assert_refused(
        replay(source, none), "has no samples of step 3; lower run.steps to end before it, or start behind it", none
    )
    for step in (1, 2):
        step_file(source, step).unlink()
    assert_refused(replay(source, none), r"no samples of step 1; .*with --checkpoint after step 3", none)
    start = ["--checkpoint", uninterrupted / "checkpoints" / "12"]
    assert_refused(
        replay(source, none, options=start), r"is after step 12, and no step follows: .* run\.steps is 12", none
    )
    late = replay(source, none, "run.steps=14", options=start)
    assert_refused(late, "ends with step 12, and run.steps is 14", none)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert_refused(replay(empty, none), r"--from-rollouts: no settings\.yaml of a run was found in", none)
    of_run = ["--config", uninterrupted / "settings.yaml"]
    assert_refused(replay(empty, none, options=of_run), r"holds no step_<number>\.jsonl", none)


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
    assert_refused(alone, "--checkpoint needs --from-rollouts; to continue a run, use --resume", none)


def test_a_run_is_not_replayed_into_its_own_folder(finished: Path) -> None:
    before = digest_of(finished)
    result = replay(finished, finished.parent, f"run.name={finished.name}", options=["--resume", "auto"])
    assert result.exit_code == 2
    assert "is what --from-rollouts would replay; choose another run.name" in result.stderr
    assert digest_of(finished) == before
