"""Tests training on saved samples of runs and of chained files, under other settings, and with unusable files."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from app.checkpoint.train_progress import ProgressRecord, progress_path
from app.records.jsonl import write_jsonl
from app.records.run_directory import RunDirectory
from app.records.sample import DROPPED_PREFIX
from app.records.shared_rows import share_rows
from app.training.inputs import read_training_inputs
from app.training.replay import StartRequest, find_model_run
from settings import load
from settings.errors import InputError
from tests.program import (
    UNJUDGED,
    assert_same_state,
    digest_of,
    here,
    metrics_of,
    records_of,
    run_of,
    saved_state,
    settings,
    succeeded,
    train_here,
)
from tests.replays import (
    assert_refused,
    assert_same_steps,
    lines_of,
    looked,
    replay,
    replayed,
    rewrite,
    step_file,
    steps_of,
    train_on,
)
from tests.run_fixtures import NO_REPORT, PPO, SCHEDULED, write_config
from tests.tiny_directory import write_model, write_tokenizer

DAPO = ("algorithm.name=dapo", "algorithm.max_rounds=3", "reward.overlong_buffer=2", "run.steps=2", *UNJUDGED)
OF_THE_LEFT_OUT = {
    *("rollout/num_rounds", "rollout/surplus_group_count"),
    *("reward/filtered_group_fraction", "reward/sampled_mean"),
    *("data/num_tokens", "data/total_tokens"),
}
"""The metrics that count groups dropped by a filter; no file contains those groups."""


def test_a_run_is_replayed_bit_for_bit_under_its_own_settings(finished: Path, tmp_path: Path) -> None:
    result = succeeded(replay(finished, tmp_path))
    again = tmp_path / "tiny-replay"
    assert_same_steps(again, finished, steps=range(1, 5))
    assert lines_of(again) == lines_of(finished)
    assert not any("data/epoch" in line for line in metrics_of(again))
    assert f"--from-rollouts: steps 1 to 4 on the samples of {finished}; nothing is generated" in result.stderr
    assert "\nrewards: taken from the samples\nadvantages: computed again\n" in result.stderr
    assert all(line["perf/rollout/segments"] == 0 for line in metrics_of(again)[1:])
    (session,) = records_of(again / "sessions.jsonl")
    assert (session["from_rollouts"], session["after_step"]) == (str(finished), 0)
    assert "checkpoint" not in session
    # A stopped replay can be resumed, but only with the same samples.
    shutil.rmtree(again / "checkpoints" / "4")
    must = ["--resume", "must"]
    result = succeeded(replay(finished, tmp_path, options=must))
    assert "continuing after step 2 of 4" in result.stderr
    assert_same_steps(again, finished, steps=range(1, 5))
    before = digest_of(again)
    for options, overrides in ((must, ("run.steps=3",)), ([*must, "--config", again / "settings.yaml"], ())):
        where = finished if overrides else step_file(finished, 1)
        result = replay(where, tmp_path, *overrides, options=options)
        assert result.exit_code == 2
        assert "the samples of --from-rollouts changed since this run was started" in result.stderr
    assert digest_of(again) == before


def test_a_run_whose_settings_changed_is_replayed_only_in_parts(source: Path, finished: Path) -> None:
    (session,) = records_of(finished / "sessions.jsonl")
    later = load(str(source / "settings.yaml"), ["algorithm.name=dr_grpo", "optimizer.learning_rate=0.01"], {})
    (source / "settings.yaml").write_text(later.to_yaml())
    write_jsonl(source / "sessions.jsonl", [session, {**session, "after_step": 2, "settings": later.to_yaml()}])
    changed = r"the settings of .* changed at step 3 \(algorithm\.name was 'grpo' and is now 'dr_grpo'\)"
    check_refused(source, changed)
    rest = looked(source, checkpoint=finished / "checkpoints" / "2")
    first = looked(source, at=step_file(source, 1))
    assert (len(rest.load_groups(3)), len(first.load_groups(1))) == (4, 4)
    # Rewards and advantages of the first part follow the settings of that part.
    assert not first.uses_saved_advantages and rest.uses_saved_rewards


def test_replay_continues_from_a_checkpoint_bit_for_bit(uninterrupted: Path, tmp_path: Path) -> None:
    start = uninterrupted / "checkpoints" / "6"
    run = replayed(uninterrupted / "rollouts", tmp_path, "run.steps=9", options=["--checkpoint", start])
    assert [line["step"] for line in metrics_of(run)] == [7, 8, 9]
    assert_same_steps(run, uninterrupted, steps=range(7, 10))
    (session,) = records_of(run / "sessions.jsonl")
    assert (session["after_step"], session["checkpoint"]) == (6, str(start))


def test_a_step_is_replayed_under_another_algorithm(uninterrupted: Path, tmp_path: Path) -> None:
    options = ["--checkpoint", uninterrupted / "checkpoints" / "6"]
    other = ("algorithm.name=rloo", "eval.every_steps=0")
    run = replayed(step_file(uninterrupted, 7), tmp_path, *other, options=options)
    (line,) = metrics_of(run)
    expected = steps_of(uninterrupted)[7]
    assert line["step"] == 7
    assert line["reward/mean"] == expected["reward/mean"] and line["policy/entropy"] is not None
    records = records_of(step_file(run, 7))
    for record, before in zip(records, records_of(step_file(uninterrupted, 7)), strict=True):
        # Before the first update, the policy equals that of the run at this step.
        assert record["policy_logprobs"] == before["policy_logprobs"]
    for group in range(4):
        siblings = [record for record in records if record["group_id"] == group]
        rewards, policy, reference = (
            np.array([np.sum(record[name]) for record in siblings])
            for name in ("reward", "policy_logprobs", "reference_logprobs")
        )
        # The KL penalty is subtracted from the reward, and a sample is compared with the others of its group.
        penalised = rewards - 0.05 * (policy - reference)
        assert np.abs(rewards - penalised).max() > 1e-4
        advantages = (penalised - penalised.mean()) * 4 / 3
        np.testing.assert_allclose([record["advantages"][0] for record in siblings], advantages, atol=1e-5)


@pytest.mark.slow
def test_a_filtered_run_that_generated_ahead_is_replayed_to_the_same_weights(config, calls_of_generation):
    succeeded(train_here(config, *DAPO, *SCHEDULED, "rollout.max_staleness=1"))
    run = run_of(config)
    again = replayed(run, config.parent / "again")
    assert_same_state(again, run, step=2)
    for step, line in steps_of(run).items():
        assert line.keys() == steps_of(again)[step].keys()
        assert {name for name in line if steps_of(again)[step][name] != line[name]} <= OF_THE_LEFT_OUT
    first, last = (int(line["rollout/num_rounds"]) for line in steps_of(run).values())
    assert max(first, last) > 1
    # One round is pending during a step and two before its first round; the last step requests only rounds it may use.
    ahead = ["collect", "collect", "submit"]
    again = ["collect", *ahead[1:] * (first - 1), "publish", "submit", *[*ahead, "collect"][: (1, 3, 4)[last - 1]]]
    assert calls_of_generation == ["submit", "submit", *again, "publish"]


def test_a_replay_reuses_rewards_and_advantages_of_a_chained_file(loose: Path, config: Path) -> None:
    def by_hand(record: dict[str, Any]) -> None:
        record |= {"reward": float(record["sample_index"]), "step": 9}
        record["advantages"] = [0.25] * len(record["completion_token_ids"])

    # The evaluations of a replay generate without the schedule of the rollout workers.
    workers = ("rollout.scheduler=sync", "rollout.workers.fast.slots=16", "rollout.workers.heavy.count=0")
    result = succeeded(train_on(rewrite(loose, by_hand), config, *workers, "eval.every_steps=1"))
    assert "advantages and returns: taken from the samples" in result.stderr
    run = run_of(config)
    _, line = metrics_of(run)
    assert (line["reward/mean"], line["advantage/mean"], line["advantage/std"]) == (1.5, 0.25, 0.0)
    records = records_of(step_file(run, 1))
    assert {tuple(r["advantages"]) for r in records} <= {(0.25,) * n for n in range(1, 5)}
    assert {r["step"] for r in records} == {1}


def test_a_replay_computes_missing_sample_fields_like_training(loose: Path, config: Path, finished: Path) -> None:
    def drawn_only(record: dict[str, Any]) -> None:
        for name in ("reward", "rewards", "advantages", "policy_logprobs"):
            record.pop(name, None)

    result = succeeded(train_on(rewrite(loose, drawn_only), config, "run.steps=1"))
    assert "rewards: computed again, not every sample has one\nadvantages: computed again\n" in result.stderr
    run = run_of(config)
    line, expected = (
        {name: value for name, value in steps_of(one)[1].items() if not name.startswith("eval/")}
        for one in (run, finished)
    )
    assert line == expected
    assert step_file(run, 1).read_bytes() == step_file(finished, 1).read_bytes()


def test_rewards_without_parts_are_recomputed_if_the_algorithm_compares_parts(loose: Path, source: Path) -> None:
    each = "algorithm.reward_normalization=each_first"
    assert looked(source, each, at=loose).uses_saved_rewards
    rewrite(loose, lambda record: record.pop("rewards"))
    assert looked(source, at=loose).uses_saved_rewards
    assert not looked(source, each, at=loose).uses_saved_rewards


CHAINED = ("data.shuffle=false", "critic.warmup_steps=0", "run.steps=1")
"""Settings with which the first step uses the first prompts of the data and updates the policy."""


@pytest.mark.slow
def test_stages_chained_by_files_equal_a_step_of_train(tmp_path: Path, tiny_model: Path) -> None:
    config = write_config(tmp_path, PPO + NO_REPORT, tiny_model)
    succeeded(train_here(config, *CHAINED))
    whole, chosen = tmp_path / "runs" / "ppo", ["--config", config, *settings(*CHAINED)]
    files: Iterator[Path] = (tmp_path / f"{number}.jsonl" for number in range(10))

    def run(command: str, *options: str | Path) -> Path:
        out = next(files)
        succeeded(here(command, *options, *chosen, "--out", out))
        return out

    path = run("rollout", "--limit", "8")
    for role in ("reward", "policy", "reference", "critic"):
        path = run("score", "--role", role, "--input", path)
    path = run("gae", "--input", path)
    result = succeeded(here("train", "--from-rollouts", path, *chosen, *settings("run.name=chained")))
    assert "rewards: taken from the samples\nadvantages and returns: taken from the samples" in result.stderr
    chained = whole.with_name("chained")
    state, expected = saved_state(chained, 1), saved_state(whole, 1)
    # A file is scored with other array shapes than a step, so the last bits are rounded differently.
    for name in expected:
        np.testing.assert_allclose(state[name], expected[name], rtol=1e-4, atol=1e-6, err_msg=name)
    line, wanted = steps_of(chained)[1], steps_of(whole)[1]
    assert line.keys() == wanted.keys()
    # The advantages in the file are already whitened.
    for name in {name for name in wanted if wanted[name] is not None} - {"advantage/mean", "advantage/std"}:
        assert line[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-5), name


def check_refused(source: Path, message: str, *overrides: str, at: Path | None = None) -> None:
    with pytest.raises(InputError, match=message):
        looked(source, *overrides, at=at)


def setting(name: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda record: record.update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (setting("prompt_token_ids", [99]), r"^--from-rollouts: .*:1: .*token 99, but the vocabulary"),
        (setting("completion", "other"), r":1: completion_token_ids decode to '.*' .*, but completion is 'other'"),
        (lambda r: r.pop("behavior_logprobs"), r":1: missing behavior_logprobs"),
        (setting("group_id", 0), r":5: group_id 0 has samples of prompts .+ and .+; give them different"),
        (setting("prompt_token_ids", [1] * 17), r"has 17 tokens, more than data\.max_prompt_length = 16"),
        (lambda r: r.update(answer=None, reward=None), r"^--from-rollouts: .*no answer"),
    ],
    ids=["vocabulary", "text", "logprobs", "groups", "length", "answer"],
)
def test_a_replay_refuses_an_unusable_sample(loose, source, change, message):
    check_refused(source, message, at=rewrite(loose, change))


def test_a_replay_refuses_an_unusable_file_or_checkpoint_before_any_output(loose, config, finished, tmp_path):
    runs, start = config.parent / "runs", ["--checkpoint", finished / "checkpoints" / "2"]
    other = f"model.path={write_model(tmp_path / 'seed1', seed=1)}"
    message = r"--checkpoint: .* was trained from another model"
    assert_refused(train_on(loose, config, other, options=start), message, runs)
    write_tokenizer(write_model(tmp_path / "template"), chat_template="{{ messages[-1].content }}<|assistant|>")
    template = f"model.path={tmp_path / 'template'}"
    assert_refused(train_on(loose, config, template, options=start), "from another tokenizer", runs)
    for content, message in (
        ("", "contains no samples"),
        ("no json\n", "samples.jsonl:1: not JSON"),
        (None, "no such file"),
    ):
        loose.unlink() if content is None else loose.write_text(content)
        assert_refused(train_on(loose, config), f"--from-rollouts: .*{message}", runs)
    before = digest_of(finished)
    result = replay(finished, finished.parent, f"run.name={finished.name}", options=["--resume", "auto"])
    assert result.exit_code == 2
    assert "is the run that --from-rollouts would replay; choose another run.name" in result.stderr
    assert digest_of(finished) == before


def asked_twice(path: Path) -> Path:
    """Replaces the second group of the file by a copy of the first one, and returns the file."""
    records = records_of(path)
    again = [{**record, "group_id": 1} for record in records if record["group_id"] == 0]
    write_jsonl(path, [*(record for record in records if record["group_id"] != 1), *again])
    return path


def test_a_replay_refuses_groups_that_do_not_fill_a_step(
    loose: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = r"contains 4 groups, but a step has rollout\.prompts_per_step = 2; set .* to 4"
    check_refused(source, many, "rollout.prompts_per_step=2", at=loose)
    large = r"a group of 4 samples, more than rollout\.group_size = 3; set it to 4"
    check_refused(source, large, "rollout.group_size=3", at=loose)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_count", lambda: 2)
        message = "contains 4 groups, but a step has rollout.prompts_per_step = 4 on each of 2 hosts; set .* to 2"
        check_refused(source, message, at=loose)
        write_jsonl(loose, [record for record in records_of(loose) if record["group_id"] != 2])
        check_refused(source, "use a number of hosts that divides", at=loose)
    file = Path(shutil.copy(step_file(source, 1), loose))
    message = r"samples\.jsonl:13: group_id 0 and group_id 1 both have samples of prompt \S+, .*; join them under one"
    check_refused(source, message, at=asked_twice(file))
    # A file that belongs to a run may repeat a prompt, because a run may do so.
    asked_twice(step_file(source, 1))
    assert len(looked(source).load_groups(1)) == 4
    write_jsonl(step_file(source, 2), records_of(step_file(source, 2))[:-1])
    check_refused(source, r"step_000002.jsonl is incomplete: a group has 3 of the 4 samples per prompt")


def test_a_replay_refuses_a_path_without_sample_files(source: Path) -> None:
    option = "^--from-rollouts: .*"
    message = f"{option}/dev/null is neither a file nor a folder; give a file of samples"
    check_refused(source, message, at=Path(os.devnull))
    step_file(source, 2).unlink()
    step_file(source, 2).mkdir()
    check_refused(source, rf"{option}step_000002\.jsonl: cannot be read: Is a directory")
    shutil.rmtree(source / "rollouts")
    message = r"contains no step_<number>\.jsonl \(with logging\.save_rollouts: false none are written\)"
    check_refused(source, f"{option}{message}")


@pytest.mark.parametrize("new", [None, "longer"])
def test_a_replay_refuses_a_file_that_changes_during_the_run(source: Path, new: str | None) -> None:
    replay, file = looked(source), step_file(source, 2)
    content = file.read_text()
    file.unlink()
    if new is not None:
        file.write_text(content + content)
    assert len(replay.load_groups(1)) == 4
    with pytest.raises(InputError, match=r"--from-rollouts: .*step_000002\.jsonl has changed since the run began"):
        replay.load_groups(2)


def test_a_replay_refuses_a_critic_of_another_model_than_the_checkpoint(source, loose, finished, tmp_path):
    start = Path(shutil.copytree(finished / "checkpoints" / "2", tmp_path / "other" / "checkpoints" / "2"))
    saved = ProgressRecord.read(start)
    fingerprints = {**saved.progress.fingerprints, "the critic": "another"}
    changed = replace(saved, progress=replace(saved.progress, fingerprints=fingerprints))
    progress_path(start).write_text(json.dumps(changed.to_json()))
    with pytest.raises(InputError, match=r"--checkpoint: the critic of .* was trained from another model"):
        looked(source, "algorithm.estimator=gae", at=loose, checkpoint=start)
    assert looked(source, at=loose, checkpoint=start).files


def test_a_replay_names_missing_steps_and_a_way_out(uninterrupted: Path, tmp_path: Path) -> None:
    source, none = tmp_path / "source", tmp_path / "runs"
    shutil.copytree(uninterrupted / "rollouts", source / "rollouts")
    shutil.copy(uninterrupted / "settings.yaml", source)
    step_file(source, 3).unlink()
    check_refused(source, "has no samples of step 3; lower run.steps to end before it, or start after it")
    for step in (1, 2):
        step_file(source, step).unlink()
    check_refused(source, r"no samples of step 1; .*with a --checkpoint of step 3")
    start = ["--checkpoint", uninterrupted / "checkpoints" / "12"]
    ended = r"no samples to replay after step 12 of --checkpoint: .* run\.steps is 12"
    assert_refused(replay(source, none, options=start), ended, none)
    late = replay(source, none, "run.steps=14", options=start)
    assert_refused(late, "ends with step 12, and run.steps is 14", none)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert_refused(replay(empty, none), r"--from-rollouts: no settings\.yaml of a run was found in", none)


def test_a_replay_reuses_rewards_if_the_run_had_the_same_reward_settings(source: Path) -> None:
    assert looked(source, "plugins.workers=2", "plugins.timeout_s=20", "plugins.memory_mib=512").uses_saved_rewards
    file = step_file(source, 1)
    rewrite(file, lambda record: record.update(columns={"tests": "x" * 300}))
    write_jsonl(file, share_rows(records_of(file)))
    again = looked(source, "plugins.env_vars=[HOME]")
    assert not again.uses_saved_rewards and "row_of" in file.read_text()
    assert {sample.prompt.extra["tests"] for group in again.load_groups(1) for sample in group} == {"x" * 300}
    # A model from the hub is loaded at the commit that the run used.
    file = source / "settings.yaml"
    file.write_text(load(str(file), ["reward.model=owner/judge"], {}).to_yaml())
    pin = {"path": "owner/judge", "commit": "c" * 40}
    (source / "model.json").write_text(json.dumps({"reward": pin}))
    assert looked(source).uses_saved_rewards
    moved = looked(source, "reward.model=owner/judge@main")
    assert not moved.uses_saved_rewards
    assert "rewards: computed again, reward.* differs from that of the samples' run" in moved.report


def test_groups_masked_by_the_filter_of_the_run_return_to_the_loss_of_a_replay(source: Path) -> None:
    def left_out(record: dict[str, Any]) -> None:
        if record["group_id"] < 2:
            record["loss_mask"] = [False] * len(record["completion_token_ids"])
        if record["group_id"] == 1:
            record["finish_reason"] = f"{DROPPED_PREFIX}nonfinite"

    file = rewrite(step_file(source, 1), left_out)
    loose = Path(shutil.copy(file, source.with_name("samples.jsonl")))
    # In a file outside a run, a user has masked the samples.
    for at, in_loss in ((source, [0, 2, 3]), (loose, [2, 3])):
        groups = looked(source, "algorithm.filter=none", at=at).load_groups(1)
        assert [group[0].group_id for group in groups if all(sample.mask.any() for sample in group)] == in_loss


def test_only_files_in_its_rollouts_folder_belong_to_a_run(source: Path, finished: Path, loose: Path) -> None:
    beside = Path(shutil.copy(step_file(source, 1), source / "gae.jsonl"))
    chain = looked(source, at=beside)
    assert (chain.uses_saved_rewards, chain.uses_saved_advantages, chain.source_run) == (True, True, None)
    for own in (source, source / "rollouts", step_file(source, 1)):
        of_run = looked(source, at=own)
        assert (of_run.uses_saved_advantages, of_run.source_run) == (False, RunDirectory(source.resolve()))
    # The models come from the run of the samples or from the run of the checkpoint.
    start = finished / "checkpoints" / "2"
    assert find_model_run(StartRequest(source, start)) == RunDirectory(source.resolve())
    assert find_model_run(StartRequest(loose, start)) == RunDirectory(finished.resolve())
    assert find_model_run(StartRequest(loose)) is None


def test_fingerprints_of_a_replay_depend_on_samples_fields_and_checkpoint(source: Path, finished: Path) -> None:
    def fingerprints(at: Path, checkpoint: int | None = None) -> dict[str, str]:
        settings = load(str(source / "settings.yaml"), ["run.name=again", "run.steps=9", *UNJUDGED], {}).settings
        request = StartRequest(at, None if checkpoint is None else finished / "checkpoints" / str(checkpoint))
        return read_training_inputs(settings, request).fingerprints

    def differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
        return [name for name in one | other if one.get(name) != other.get(name)]

    of_run, file = fingerprints(source), step_file(source, 3)
    elsewhere = Path(shutil.copytree(source / "rollouts", source.with_name("elsewhere")))
    assert differing(of_run, fingerprints(elsewhere)) == ["the fields taken from the samples"]
    state = "the checkpoint of --checkpoint"
    assert differing(fingerprints(file, 2), fingerprints(file, 4)) == ["the samples of --from-rollouts", state]
    assert differing(of_run, fingerprints(source, 2)) == ["the samples of --from-rollouts", state]
