"""The settings of each session of a run, from `sessions.jsonl`: a resumed run may continue under other settings."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from app.records.atomic_write import write_atomic
from app.records.jsonl import read_jsonl_tolerant
from app.records.run_directory import RunDirectory
from settings import Resolved
from settings.checks.resumed_settings import SettingChange, changed_settings
from settings.errors import InputError
from settings.loading.printing import from_yaml

log = logging.getLogger(__name__)

SavedSettings = Mapping[str, tuple[Any, str]]
"""Dotted name -> (value, provenance)."""


class SettingsPeriod(NamedTuple):
    """Settings, and the first step that was trained under them."""

    first_step: int
    settings: SavedSettings


def settings_fields(resolved: Resolved) -> dict[str, str]:
    """Returns the fields of a session's line that hold its settings."""
    text = resolved.to_yaml()
    return {"settings": text, "settings_sha256": _digest(text.encode())}


def read_settings(run: RunDirectory, *, restore: bool = False) -> SavedSettings:
    """Reads the settings of a run's last session, from `settings.yaml` or, if that is damaged, from `sessions.jsonl`.

    Args:
        restore: write a damaged `settings.yaml` again.

    Raises:
        InputError: both are damaged, or `settings.yaml` is and the run is one of an older version.
    """
    path = run.settings_path
    try:
        content, problem = path.read_bytes(), ""
    except OSError as error:
        content, problem = None, f"cannot be read ({error.strerror})"
    last = _sessions(run)[-1:]
    if last and content is not None and _digest(content) != last[0]["settings_sha256"]:
        problem = "is not what the run's last start wrote"
    if not last and content is None:
        raise InputError(
            f"{path} {problem}, and {run.sessions_path.name} beside it holds no settings either; restore one of them "
            "from a copy, or start another run.name"
        )
    if problem and last:
        log.warning("%s %s; its settings are taken from %s", path, problem, run.sessions_path.name)
        content = last[0]["settings"].encode()
        if restore:
            write_atomic(path, content)
    assert content is not None
    return from_yaml(content, name=str(path))


def settings_periods(run: RunDirectory) -> list[SettingsPeriod]:
    """Returns the settings of a run by step; those of an older version count for all its steps."""
    periods: list[SettingsPeriod] = []
    for session in _sessions(run):
        first_step = session["after_step"] + 1
        # Steps after the checkpoint that this session continued from were trained again.
        periods = [period for period in periods if period.first_step < first_step]
        settings = from_yaml(session["settings"].encode(), name=str(run.sessions_path))
        if not periods or changed_settings(periods[-1].settings, settings):
            periods.append(SettingsPeriod(first_step, settings))
    return periods or [SettingsPeriod(1, read_settings(run))]


def settings_at(periods: Sequence[SettingsPeriod], step: int) -> SavedSettings:
    """Returns the settings under which a step was trained; those of the first step also for step 0."""
    return next((period for period in reversed(periods) if period.first_step <= step), periods[0]).settings


def changes_by_step(periods: Sequence[SettingsPeriod]) -> list[tuple[int, SettingChange]]:
    """Returns each change of a setting with the first step after it."""
    return [
        (after.first_step, change)
        for before, after in pairwise(periods)
        for change in changed_settings(before.settings, after.settings)
    ]


def _sessions(run: RunDirectory) -> list[Mapping[str, Any]]:
    """Returns the sessions whose settings are intact, in order."""
    if not run.sessions_path.is_file():
        return []
    records = (record for _, record in read_jsonl_tolerant(run.sessions_path) if not isinstance(record, InputError))
    return [
        record
        for record in records
        if type(record.get("after_step")) is int
        and isinstance(text := record.get("settings"), str)
        and record.get("settings_sha256") == _digest(text.encode())
    ]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
