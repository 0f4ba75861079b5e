"""A run of a hub model goes on with the commit it started with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.policy.weight_files import open_model
from tests.local_hub import LocalHub, serve, use_hub
from tests.tiny_directory import write_model
from tests.training.program import train_here

ID = "owner/tiny"


@pytest.fixture
def started(config: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run of two steps, whose model's branch has moved to other weights since; the hub and the first commit."""
    with serve() as hub:
        use_hub(monkeypatch, hub.url, tmp_path / "cache")
        first = hub.commit(ID, tiny_model)
        result = train_here(config, f"model.path={ID}", "run.steps=2", "eval.every_steps=0")
        assert result.exit_code == 0, result.stderr
        hub.commit(ID, write_model(tmp_path / "moved", seed=1))
        assert open_model(ID).commit != first
        yield hub, first


def resumed(config: Path, *overrides: str):
    return train_here(config, f"model.path={ID}", "run.steps=3", "eval.every_steps=0", *overrides, resume="auto")


def test_a_run_goes_on_with_its_commit_when_the_branch_has_moved(started: tuple[LocalHub, str], config: Path) -> None:
    _, first = started
    record = config.parent / "runs" / "tiny" / "model.json"
    assert json.loads(record.read_text()) == {"path": ID, "revision": None, "commit": first}
    result = resumed(config)
    assert result.exit_code == 0, result.stderr
    assert "continuing after step 2 of 3" in result.stderr
    assert json.loads(record.read_text())["commit"] == first


def test_another_revision_that_is_asked_for_is_a_changed_model(started: tuple[LocalHub, str], config: Path) -> None:
    result = resumed(config, "model.revision=main")
    assert result.exit_code == 2
    assert "error: --resume: model changed since this run was started" in result.stderr
    assert "(of a hub id: the old revision)" in result.stderr


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_record_of_the_commit_is_named(started: tuple[LocalHub, str], config: Path, text: str) -> None:
    (config.parent / "runs" / "tiny" / "model.json").write_text(text)
    result = resumed(config)
    assert result.exit_code == 2
    assert "model.json" in result.stderr and "start another run.name" in result.stderr
