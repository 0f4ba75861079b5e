"""Tests that a run of a hub model keeps the commit with which it started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.model.io.model_files import open_model
from app.records.run_directory import Resume, RunDirectory
from app.runtime.pinned_revisions import pin_revisions, record_commits
from app.training.inputs import read_training_inputs
from settings import InputError, load
from tests.local_hub import serve, use_hub
from tests.program import train_here
from tests.tiny_directory import write_model, write_reward_model

ID = "owner/tiny"


def train(config: Path, *overrides: str, path: str = ID, resume: Resume = "auto"):
    return train_here(config, f"model.path={path}", "eval.every_steps=0", *overrides, resume=resume)


def test_a_run_goes_on_with_its_commit_when_the_branch_has_moved(
    config: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = config.parent / "runs" / "tiny" / "model.json"
    with serve() as hub:
        use_hub(monkeypatch, hub.url, tmp_path / "cache")
        first = hub.commit(ID, tiny_model)
        result = train(config, "run.steps=1")
        assert result.exit_code == 0, result.stderr
        hub.commit(ID, write_model(tmp_path / "moved", seed=1))
        assert open_model(ID).commit != first
        assert json.loads(record.read_text()) == {"path": ID, "commit": first}
        # Another revision that is asked for is a changed model.
        result = train(config, "run.steps=2", path=f"{ID}@main")
        assert result.exit_code == 2
        assert "error: --resume: model changed since this run was started" in result.stderr
        assert "(the old revision of a hub model, " in result.stderr
        result = train(config, "run.steps=2")
    assert result.exit_code == 0, result.stderr
    assert "continuing after step 1 of 2" in result.stderr
    assert json.loads(record.read_text())["commit"] == first


def test_critic_and_reward_model_keep_their_commits_too(
    config: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = {"model": "owner/policy", "critic": "owner/critic", "reward": "owner/judge"}
    chosen = [f"model.path={ids['model']}", f"critic.path={ids['critic']}", f"reward.model={ids['reward']}"]
    with serve() as hub:
        use_hub(monkeypatch, hub.url, tmp_path / "cache")
        judges = [write_reward_model(tmp_path / f"judge{seed}", seed=seed) for seed in (7, 8)]
        moved = write_model(tmp_path / "moved", seed=1)
        first = {section: hub.commit(ids[section], tiny_model) for section in ("model", "critic")}
        first["reward"] = hub.commit(ids["reward"], judges[0])
        settings = load(str(config), ["algorithm.name=ppo", *chosen], {}).settings
        run = RunDirectory(tmp_path)
        record_commits(run, settings, read_training_inputs(settings).model_commits)
        hub.commit(ids["model"], moved)
        hub.commit(ids["critic"], moved)
        hub.commit(ids["reward"], judges[1])
        assert read_training_inputs(pin_revisions(settings, run)).model_commits == first
        # Those who ask for another revision get it, and of the others the commit they had.
        other = load(str(config), ["algorithm.name=ppo", *chosen], {"GRPO__CRITIC__PATH": "owner/critic@main"}).settings
        commits = read_training_inputs(pin_revisions(other, run)).model_commits
        assert commits["critic"] != first["critic"] and commits["reward"] == first["reward"]


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_record_of_the_commit_is_named(config: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(InputError, match=r"--resume: .*model\.json .*start another run\.name"):
        pin_revisions(load(str(config), [], {}).settings, RunDirectory(tmp_path))
