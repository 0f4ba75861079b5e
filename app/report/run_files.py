"""Reads a run directory: the report uses nothing but these files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.records.jsonl import read_jsonl_tolerant
from app.report.metrics_history import History, MetricsRecord, training_steps
from settings.errors import InputError
from settings.loading.fields import FIELDS
from settings.loading.printing import from_yaml

SAMPLE_FILE_PATTERN = re.compile(r"step_(\d+)\.jsonl")


@dataclass(frozen=True, slots=True)
class NonDefaultSetting:
    """A setting whose value is not the default."""

    name: str
    value: Any
    default: Any
    """None also for a name that this version does not know."""
    origin: str


@dataclass(frozen=True)
class RunFiles:
    """The files of a run, except for its samples, which are read as needed."""

    path: Path
    history: History
    settings: Mapping[str, tuple[Any, str]]
    """Dotted name -> (value, provenance)."""
    sessions: Sequence[MetricsRecord]
    """One record per start of the program; see `app.tracking.run_log`."""
    rollouts: Mapping[int, Path]
    evaluations: Mapping[int, Path]
    """Sample files by step."""

    @classmethod
    def read(cls, path: Path) -> RunFiles:
        """Raises InputError if `path` is not a run or has no training step yet, or if its metrics are damaged."""
        if not path.is_dir():
            state = "is a file" if path.exists() else "does not exist"
            raise InputError(f"{path} {state}; expected a run directory, which `grpo train` creates in run.dir")
        settings, metrics = path / "settings.yaml", path / "metrics.jsonl"
        if not settings.is_file():
            raise InputError(f"{path} holds no settings.yaml, so it is not a run directory{_list_runs_in(path)}")
        history = _read_metrics(metrics) if metrics.is_file() else []
        if not training_steps(history):
            raise InputError(f"{path} has no finished training step yet, so there is nothing to report")
        return cls(
            path,
            history,
            _read_settings(settings),
            _read_sessions(path / "sessions.jsonl"),
            sample_files(path / "rollouts"),
            sample_files(path / "eval"),
        )

    def setting(self, name: str) -> Any:
        """Returns the value of a setting; None if the run did not know it."""
        return self.settings.get(name, (None, ""))[0]

    def non_default_settings(self) -> list[NonDefaultSetting]:
        """Returns the settings that were set or derived to another value than the default."""
        chosen = []
        for name, (value, origin) in self.settings.items():
            default = _to_json_value(FIELDS[name].default) if name in FIELDS else None
            if origin != "default" and value != default:
                chosen.append(NonDefaultSetting(name, value, default, origin))
        return chosen


def _to_json_value(value: Any) -> Any:
    """Returns a value as `settings.yaml` has it."""
    if isinstance(value, tuple | list):
        return [_to_json_value(item) for item in value]
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


def _read_metrics(path: Path) -> list[MetricsRecord]:
    """Reads every complete line. A last line without its end is being written, or was when the run was killed."""
    lines = list(read_jsonl_tolerant(path))
    if lines and isinstance(lines[-1][1], InputError) and not _ends_with_newline(path):
        lines.pop()
    history: list[MetricsRecord] = []
    for line, record in lines:
        if isinstance(record, InputError):
            raise InputError(f"{record}; fix or delete that line")
        if type(record.get("step")) is not int:
            raise InputError(f"{path}:{line}: expected an integer `step`, got {record.get('step')!r:.40}")
        history.append(record)
    return history


def _ends_with_newline(path: Path) -> bool:
    return path.read_bytes()[-1:] == b"\n"


def _read_settings(path: Path) -> Mapping[str, tuple[Any, str]]:
    try:
        return from_yaml(path.read_bytes(), name=str(path))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error


def _read_sessions(path: Path) -> list[MetricsRecord]:
    """Reads the sessions, none for a run of an older version; damaged lines are skipped."""
    if not path.is_file():
        return []
    return [record for _, record in read_jsonl_tolerant(path) if not isinstance(record, InputError)]


def sample_files(folder: Path) -> dict[int, Path]:
    """Returns the files of samples by step, oldest first."""
    if not folder.is_dir():
        return {}
    files = {int(match[1]): path for path in folder.iterdir() if (match := SAMPLE_FILE_PATTERN.fullmatch(path.name))}
    return dict(sorted(files.items()))


def _list_runs_in(path: Path) -> str:
    runs = sorted(child.name for child in path.iterdir() if (child / "settings.yaml").is_file())
    return f"; it holds the runs {', '.join(runs[:5])}{', ...' if len(runs) > 5 else ''}" if runs else ""
