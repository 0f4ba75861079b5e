"""Tests of the settings of a run by step, read from sessions.jsonl and settings.yaml."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.records.run_directory import RunDirectory
from app.records.settings_history import SettingsHistory
from settings import InputError, load


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run of two sessions under other settings, the second of which began after step 3."""
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    resolved = [load(None, [f"optimizer.learning_rate={rate}"], {}) for rate in (0.1, 0.2)]
    lines = [{"after_step": step, "settings": one.to_yaml()} for step, one in zip((0, 3), resolved, strict=True)]
    _write_lines(run, lines)
    run.write_settings(resolved[-1])
    return run


def _lines(run: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.sessions_path.read_text().splitlines()]


def _write_lines(run: RunDirectory, lines: list[dict[str, Any]]) -> None:
    run.sessions_path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _rates(history: SettingsHistory) -> dict[int, float]:
    return {period.first_step: period.settings["optimizer.learning_rate"][0] for period in history.periods}


def test_steps_have_the_settings_of_their_session(run: RunDirectory) -> None:
    history = SettingsHistory.read(run)
    assert _rates(history) == {1: 0.1, 4: 0.2} and history.gaps == []
    assert history.periods[-1].file.name == str(run.settings_path)


def test_steps_trained_again_have_the_later_settings(run: RunDirectory) -> None:
    resolved = load(None, ["optimizer.learning_rate=0.3"], {})
    _write_lines(run, [*_lines(run), {"after_step": 2, "settings": resolved.to_yaml()}])
    run.write_settings(resolved)
    assert _rates(SettingsHistory.read(run)) == {1: 0.1, 3: 0.3}


def test_lines_without_settings_are_named_as_gaps(run: RunDirectory) -> None:
    first, second = _lines(run)
    for lines, rates in (
        ([first, {**second, "after_step": "3"}], {1: 0.2}),
        ([first, {"after_step": 2}, second], {1: 0.1, 4: 0.2}),
    ):
        _write_lines(run, lines)
        history = SettingsHistory.read(run)
        assert _rates(history) == rates
        assert history.gaps == ["sessions.jsonl has no valid settings in line 2; others are taken instead"]


def test_changed_and_lost_settings_are_taken_from_the_last_session(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    text = run.settings_path.read_text()
    run.settings_path.write_text(text.replace("learning_rate: 0.2", "learning_rate: 0.5"))
    assert _rates(SettingsHistory.read(run)) == {1: 0.1, 4: 0.2}
    assert f"{run.settings_path} was changed" in caplog.text
    run.settings_path.unlink()
    assert _rates(SettingsHistory.read(run)) == {1: 0.1, 4: 0.2}
    run.sessions_path.unlink()
    with pytest.raises(InputError, match=r"sessions\.jsonl beside it holds no settings either"):
        SettingsHistory.read(run)


@pytest.mark.parametrize("has_sessions", [True, False])
def test_a_run_of_another_version_is_refused_and_unchanged(run: RunDirectory, has_sessions: bool) -> None:
    text = load(None, [], {}).to_yaml().replace("rollout:\n", "rollout:\n  decode_layout: gathered  # default\n")
    run.settings_path.write_text(text)
    _write_lines(run, [{"after_step": 0, "settings": text}] if has_sessions else [])
    before = run.settings_path.read_bytes(), run.sessions_path.read_bytes()
    with pytest.raises(InputError, match=r"rollout\.decode_layout, which does not exist here, so another version"):
        SettingsHistory.read(run)
    assert (run.settings_path.read_bytes(), run.sessions_path.read_bytes()) == before
