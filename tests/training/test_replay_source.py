"""Tests of the values that a replay takes from the samples' run, and of its report."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from app.records.run_directory import RunDirectory
from app.records.sample import DROPPED_PREFIX, Sample
from app.training.inputs import read_training_inputs
from app.training.replay import Replay, ReplayRequest, find_model_run
from settings import load
from settings.errors import InputError
from tests.program import records_of
from tests.replays import looked, rewrite, step_file, write
from tests.training.test_async_training import UNJUDGED


def samples_of(replay: Replay, step: int) -> list[Sample]:
    return [sample for group in replay.load_groups(step) for sample in group]


def had(source: Path, *overrides: str) -> None:
    """Changes the run as if it had had these settings."""
    file = source / "settings.yaml"
    file.write_text(load(str(file), overrides, {}).to_yaml())


def test_a_file_of_a_run_that_lost_its_last_line_is_refused(source: Path) -> None:
    file = step_file(source, 2)
    write(file, records_of(file)[:-1])
    with pytest.raises(InputError, match=r"step_000002.jsonl is incomplete: it holds a group of 3 samples, .* drew 4"):
        looked(source)


def test_a_reward_model_of_the_hub_is_what_the_run_had(source: Path) -> None:
    had(source, "reward.model=owner/judge")
    pin = {"path": "owner/judge", "commit": "c" * 40}
    (source / "model.json").write_text(json.dumps({"reward": pin}))
    assert looked(source).uses_saved_rewards
    moved = looked(source, "reward.model=owner/judge@main")
    assert not moved.uses_saved_rewards
    assert "rewards: computed again, reward.* differs from that of the samples' run" in moved.report


def test_limits_of_plug_ins_leave_saved_rewards_as_they_are(source: Path) -> None:
    assert looked(source, "plugins.workers=2", "plugins.timeout_s=20", "plugins.memory_mib=512").uses_saved_rewards
    assert not looked(source, "plugins.env_vars=[HOME]").uses_saved_rewards


def test_what_a_filter_had_left_out_of_the_loss_is_left_to_the_filter_of_the_replay(source: Path) -> None:
    def left_out(record: dict[str, Any]) -> None:
        if record["group_id"] < 2:
            record["loss_mask"] = [False] * len(record["completion_token_ids"])
        if record["group_id"] == 1:
            record["finish_reason"] = f"{DROPPED_PREFIX}nonfinite"

    file = rewrite(step_file(source, 1), left_out)
    of_run = samples_of(looked(source, "algorithm.filter=none"), 1)
    assert [sample.mask.any() for sample in of_run] == [sample.group_id != 1 for sample in of_run]
    # In another file somebody has masked them.
    loose = Path(shutil.copy(file, source.with_name("samples.jsonl")))
    of_file = samples_of(looked(source, at=loose), 1)
    assert [sample.mask.any() for sample in of_file] == [sample.group_id > 1 for sample in of_file]


def test_a_file_beside_a_run_s_settings_is_no_file_of_the_run(source: Path) -> None:
    beside = Path(shutil.copy(step_file(source, 1), source / "gae.jsonl"))
    chain = looked(source, at=beside)
    assert (chain.uses_saved_rewards, chain.uses_saved_advantages, chain.source_run) == (True, True, None)
    for own in (source, source / "rollouts", step_file(source, 1)):
        of_run = looked(source, at=own)
        assert (of_run.uses_saved_advantages, of_run.source_run) == (False, RunDirectory(source.resolve()))


def test_hosts_that_would_take_other_things_of_the_same_samples_do_not_agree(source: Path, finished: Path) -> None:
    def fingerprints(at: Path, checkpoint: int | None = None) -> dict[str, str]:
        settings = load(str(source / "settings.yaml"), ["run.name=again", "run.steps=9", *UNJUDGED], {}).settings
        request = ReplayRequest(at, None if checkpoint is None else finished / "checkpoints" / str(checkpoint))
        return read_training_inputs(settings, request).fingerprints

    def differing(one: dict[str, str], other: dict[str, str]) -> Sequence[str]:
        assert one.keys() == other.keys()
        return [name for name in one if one[name] != other[name]]

    of_run, file = fingerprints(source), step_file(source, 3)
    elsewhere = Path(shutil.copytree(source / "rollouts", source.with_name("elsewhere")))
    assert differing(of_run, fingerprints(elsewhere)) == ["the fields taken from the samples"]
    state = "the checkpoint of --checkpoint"
    assert differing(fingerprints(file, 2), fingerprints(file, 4)) == ["the samples of --from-rollouts", state]
    assert of_run[state] == "none" != fingerprints(source, 2)[state]


def test_models_are_those_of_the_samples_run_or_else_of_the_checkpoint_s(
    source: Path, finished: Path, loose: Path
) -> None:
    start = finished / "checkpoints" / "2"
    assert find_model_run(ReplayRequest(source, start)) == RunDirectory(source.resolve())
    assert find_model_run(ReplayRequest(loose, start)) == RunDirectory(finished.resolve())
    assert find_model_run(ReplayRequest(loose)) is None
