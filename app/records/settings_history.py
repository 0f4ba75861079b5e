"""The settings of each session of a run, from `sessions.jsonl`: a resumed run may continue under other settings."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from app.records.jsonl import read_jsonl_tolerant
from app.records.run_directory import RunDirectory
from app.records.text_format import format_count
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
    """Dotted name of each setting -> (value, provenance)."""


@dataclass(frozen=True)
class SettingsHistory:
    """The settings of each step of a run."""

    periods: Sequence[SettingsPeriod]
    """The periods in order of steps, at least one; the last one has the settings of the last session."""
    sessions: Sequence[Mapping[str, Any]]
    """The readable lines of `sessions.jsonl`."""
    gaps: Sequence[str]
    """Descriptions of what is unknown about earlier sessions."""

    @classmethod
    def read(cls, run: RunDirectory) -> SettingsHistory:
        """Reads the settings of all sessions; warns if `settings.yaml` differs from those of the last session.

        Raises:
            InputError: neither file has settings, they are damaged, or another version of this program wrote them.
        """
        sessions, damaged, is_last_read = list[Mapping[str, Any]](), list[str](), False
        periods: list[SettingsPeriod] = []
        for number, record in read_jsonl_tolerant(run.sessions_path) if run.sessions_path.is_file() else ():
            if not isinstance(record, InputError):
                sessions.append(record)
            match record:
                case {"after_step": int(after_step), "settings": str(text)}:
                    first_step, content = after_step + 1, text.encode()
                case _:
                    damaged.append(str(number))
                    is_last_read = False
                    continue
            is_last_read = True
            # Steps after the checkpoint from which this session continued were trained again.
            periods = [period for period in periods if period.first_step < first_step]
            if not periods or periods[-1].file.content != content:
                period = _period(first_step, f"{run.settings_path} of step {first_step}", run, content)
                if not periods or changed_settings(periods[-1].settings, period.settings):
                    periods.append(period)
        if run.settings_path.is_file():
            first_step = periods[-1].first_step if periods else 1
            stored = _period(first_step, str(run.settings_path), run, run.settings_path.read_bytes())
            if is_last_read and changed_settings(periods[-1].settings, stored.settings):
                _warn_of_changed_file(run.settings_path)
            else:
                periods[-1:] = [stored]
        if not periods:
            raise InputError(
                f"{run.settings_path} is missing, and sessions.jsonl next to it has no settings either; restore one "
                "of them from a copy, or use another run.name"
            )
        gap = f"sessions.jsonl has no valid settings in line {', '.join(damaged)}; other lines are used instead"
        return cls(periods, sessions, [gap] if damaged else [])

    def period_of(self, step: int) -> SettingsPeriod:
        """Returns the settings under which a step was trained; step 0 has those of step 1."""
        return next((period for period in reversed(self.periods) if period.first_step <= step), self.periods[0])

    @property
    def changes(self) -> list[tuple[int, SettingChange]]:
        """Each change of a setting, with the first step that it affects."""
        return [
            (after.first_step, change)
            for before, after in pairwise(self.periods)
            for change in changed_settings(before.settings, after.settings)
        ]


@functools.cache
def _warn_of_changed_file(path: Path) -> None:
    # Once, as a command may read the settings of a run several times.
    log.warning("%s was changed; its settings are taken from sessions.jsonl", path)


def _period(first_step: int, name: str, run: RunDirectory, content: bytes) -> SettingsPeriod:
    settings = from_yaml(content, name=name)
    if unknown := [field for field in settings if field not in FIELDS]:
        more = f" and {format_count(len(unknown) - 1, 'other setting')}" if unknown[1:] else ""
        raise InputError(
            f"{name} contains {unknown[0]}{more}, unknown to this version of grpo; use the version that wrote the run, "
            "or another run.name"
        )
    return SettingsPeriod(first_step, ConfigFile(name, run.path.name, content), settings)
