"""The settings of each session of a run, from `sessions.jsonl`: a resumed run may continue under other settings."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from app.records.jsonl import read_jsonl_tolerant
from app.records.run_directory import RunDirectory
from settings.checks.resumed_settings import SettingChange, changed_settings
from settings.errors import InputError
from settings.loading.config_file import ConfigFile
from settings.loading.fields import FIELDS
from settings.loading.printing import from_yaml

log = logging.getLogger(__name__)


class SettingsPeriod(NamedTuple):
    """Settings, and the first step that was trained under them."""

    first_step: int
    file: ConfigFile
    settings: Mapping[str, tuple[Any, str]]
    """Dotted name -> (value, provenance)."""


@dataclass(frozen=True)
class SettingsHistory:
    """The settings of each step of a run."""

    periods: Sequence[SettingsPeriod]
    """By step, at least one, the last with the settings of the last session."""
    sessions: Sequence[Mapping[str, Any]]
    """The readable lines of `sessions.jsonl`."""
    gaps: Sequence[str]
    """What is unknown about earlier sessions, in words."""

    @classmethod
    def read(cls, run: RunDirectory) -> SettingsHistory:
        """Reads `settings.yaml` and, where that is damaged and for earlier sessions, `sessions.jsonl`.

        Raises:
            InputError: both are damaged, or another version of this program wrote them.
        """
        lines = [*read_jsonl_tolerant(run.sessions_path)] if run.sessions_path.is_file() else []
        sessions = [(number, record) for number, record in lines if not isinstance(record, InputError)]
        intact = {number: record for number, record in sessions if _is_intact(record)}
        periods: list[SettingsPeriod] = []
        for session in intact.values():
            first_step, content = session["after_step"] + 1, session["settings"].encode()
            # Steps after the checkpoint that this session continued from were trained again.
            periods = [period for period in periods if period.first_step < first_step]
            if not periods or periods[-1].file.content != content:
                period = _period(first_step, f"{run.settings_path} of step {first_step}", run, content)
                if not periods or changed_settings(periods[-1].settings, period.settings):
                    periods.append(period)
        last = _read_last(run, intact.get(lines[-1][0]) if lines else None)
        periods[-1:] = [last._replace(first_step=periods[-1].first_step if periods else 1)]
        damaged, gaps = [str(number) for number, _ in lines if number not in intact], list[str]()
        if damaged:
            gaps.append(f"sessions.jsonl has no valid settings in line {', '.join(damaged)}; others are taken instead")
        first = next(iter(intact.values()), None)
        # The first session of a replay may start from a checkpoint of another run.
        if first is not None and first["after_step"] and "checkpoint" not in first:
            gaps.append(f"sessions.jsonl has no settings before step {first['after_step'] + 1}; later ones are taken")
            periods[0] = periods[0]._replace(first_step=1)
        return cls(periods, [record for _, record in sessions], gaps)


def _read_last(run: RunDirectory, session: Mapping[str, Any] | None) -> SettingsPeriod:
    """Returns the settings of the last session, whose line is None if it is damaged."""
    path, saved = run.settings_path, None if session is None else session["settings"].encode()
    try:
        content = path.read_bytes()
    except OSError as error:
        content = b""
        if saved is None:
            raise InputError(
                f"{path} cannot be read ({error.strerror}), and sessions.jsonl beside it holds no settings either; "
                "restore one of them from a copy, or start another run.name"
            ) from error
    if saved not in (None, content):
        log.warning(
            "%s is lost or changed since the run's last start; its settings are taken from sessions.jsonl", path
        )
    return _period(1, str(path), run, saved or content)


def _period(first_step: int, name: str, run: RunDirectory, content: bytes) -> SettingsPeriod:
    settings = from_yaml(content, name=name)
    if unknown := [field for field in settings if field not in FIELDS]:
        more = f" and {len(unknown) - 1} more settings that do" if unknown[1:] else ", which does"
        raise InputError(
            f"{name}: {unknown[0]}{more} not exist here, so another version of grpo wrote this run; read it with that "
            "version, or start another run.name"
        )
    return SettingsPeriod(first_step, ConfigFile(name, run.path.name, content), settings)


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


def sign_session(session: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the line of a session with its digest."""
    return {**session, "sha256": hashlib.sha256(json.dumps(session).encode()).hexdigest()}


def _is_intact(session: Mapping[str, Any]) -> bool:
    """Returns whether a line of `sessions.jsonl` is as it was written."""
    return sign_session({k: v for k, v in session.items() if k != "sha256"}) == session
