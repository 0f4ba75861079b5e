"""The settings of each session of a run, from `sessions.jsonl`: a resumed run may continue under other settings."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from app.records.jsonl import read_jsonl_tolerant
from app.records.run_directory import RunDirectory
from settings import Resolved
from settings.checks.resumed_settings import SettingChange, changed_settings
from settings.errors import InputError
from settings.loading.config_file import ConfigFile
from settings.loading.printing import from_yaml

log = logging.getLogger(__name__)

SavedSettings = Mapping[str, tuple[Any, str]]
"""Dotted name -> (value, provenance)."""


class SettingsPeriod(NamedTuple):
    """Settings, and the first step that was trained under them."""

    first_step: int
    file: ConfigFile
    settings: SavedSettings


def settings_fields(resolved: Resolved) -> dict[str, str]:
    """Returns the fields of a session's line that hold its settings."""
    text = resolved.to_yaml()
    return {"settings": text, "settings_sha256": _digest(text.encode())}


def read_settings(run: RunDirectory) -> SettingsPeriod:
    """Reads the settings of a run's last session, from `settings.yaml` or, if that is damaged, from `sessions.jsonl`.

    Raises:
        InputError: both are damaged, or `settings.yaml` is and the run is one of an older version.
    """
    path = run.settings_path
    try:
        content, problem = path.read_bytes(), ""
    except OSError as error:
        content, problem = None, f"cannot be read ({error.strerror})"
    last = next(reversed(_sessions(run)), None)
    if last is not None and content is not None and _digest(content) != last["settings_sha256"]:
        problem = "is not what the run's last start wrote"
    if last is None and content is None:
        raise InputError(
            f"{path} {problem}, and {run.sessions_path.name} beside it holds no settings either; restore one of them "
            "from a copy, or start another run.name"
        )
    if problem and last is not None:
        log.warning("%s %s; its settings are taken from %s", path, problem, run.sessions_path.name)
        content = last["settings"].encode()
    assert content is not None
    return _period(last["after_step"] + 1 if last else 1, str(path), run, content)


def settings_periods(run: RunDirectory) -> list[SettingsPeriod]:
    """Returns the settings of a run by step; those of an older version count for all its steps."""
    periods: list[SettingsPeriod] = []
    for session in filter(None, _sessions(run)):
        first_step = session["after_step"] + 1
        # Steps after the checkpoint that this session continued from were trained again.
        periods = [period for period in periods if period.first_step < first_step]
        name = f"{run.settings_path} of step {first_step}"
        period = _period(first_step, name, run, session["settings"].encode())
        if not periods or changed_settings(periods[-1].settings, period.settings):
            periods.append(period)
    return periods or [read_settings(run)]


def _period(first_step: int, name: str, run: RunDirectory, content: bytes) -> SettingsPeriod:
    return SettingsPeriod(first_step, ConfigFile(name, run.path.name, content), from_yaml(content, name=name))


def decisive_periods(periods: Sequence[SettingsPeriod]) -> list[SettingsPeriod]:
    """Returns the periods between changes of what the run learns; others are joined, under their last settings."""
    joined = [*periods[:1]]
    for before, after in pairwise(periods):
        changes = changed_settings(before.settings, after.settings)
        if any(change.is_decisive or change.name == "run.steps" for change in changes):
            joined.append(after)
        else:
            joined[-1] = after._replace(first_step=joined[-1].first_step)
    return joined


def period_of(periods: Sequence[SettingsPeriod], step: int) -> SettingsPeriod:
    """Returns the settings under which a step was trained; those of the first step also for step 0."""
    return next((period for period in reversed(periods) if period.first_step <= step), periods[0])


def changes_by_step(periods: Sequence[SettingsPeriod]) -> list[tuple[int, SettingChange]]:
    """Returns each change of a setting with the first step after it."""
    return [
        (after.first_step, change)
        for before, after in pairwise(periods)
        for change in changed_settings(before.settings, after.settings)
    ]


def _sessions(run: RunDirectory) -> list[Mapping[str, Any] | None]:
    """Returns the sessions in order; None in place of one that is damaged or was written by an older version."""
    if not run.sessions_path.is_file():
        return []
    return [
        record if not isinstance(record, InputError) and _is_intact(record) else None
        for _, record in read_jsonl_tolerant(run.sessions_path)
    ]


def _is_intact(session: Mapping[str, Any]) -> bool:
    text = session.get("settings")
    is_signed = isinstance(text, str) and session.get("settings_sha256") == _digest(text.encode())
    return is_signed and type(session.get("after_step")) is int


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
