"""Reads the files of a run directory that its report needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from app.records.jsonl import read_jsonl_tolerant
from app.records.run_directory import RunDirectory, step_of_samples
from app.records.settings_history import SettingsHistory
from app.records.text_format import format_ranges
from app.report.metrics_history import History, MetricsRecord, training_steps
from settings.errors import InputError
from settings.loading.fields import FIELDS


class NonDefaultSetting(NamedTuple):
    """A setting whose value is not the default."""

    name: str
    value: Any
    default: Any
    origin: str


@dataclass(frozen=True)
class RunFiles:
    """The contents of a run's files, and the paths of its sample files."""

    path: Path
    history: History
    settings_history: SettingsHistory
    rollouts: Mapping[int, Path]
    evaluations: Mapping[int, Path]
    """`rollouts` and `evaluations` map steps to files of samples."""

    @classmethod
    def read(cls, path: Path) -> RunFiles:
        """Reads the files of a run; raises InputError if it has no training step yet or its metrics are damaged."""
        if not path.is_dir():
            state = "is a file" if path.exists() else "does not exist"
            raise InputError(f"{path} {state}; expected a run directory, which `grpo train` creates in run.dir")
        run = RunDirectory(path)
        if not run.has_settings:
            runs = sorted(child.name for child in path.iterdir() if (child / "settings.yaml").is_file())
            found = f"a run in it, such as {runs[0]}" if runs else "a run directory"
            raise InputError(f"{path} contains no settings.yaml, so it is not a run directory; give {found}")
        settings_history = SettingsHistory.read(run)
        history = _read_metrics(run.metrics_path) if run.metrics_path.is_file() else []
        if not training_steps(history):
            raise InputError(f"{path} has no finished training step yet; run grpo report after the first one")
        return cls(path, history, settings_history, sample_files(path / "rollouts"), sample_files(path / "eval"))

    @property
    def has_timeline(self) -> bool:
        return RunDirectory(self.path).timeline_path.is_file()

    def setting(self, name: str) -> Any:
        """Returns a setting's value in the last session of the run; None if that session has no such setting."""
        return self.settings_history.periods[-1].settings.get(name, (None, ""))[0]

    @property
    def gaps(self) -> list[str]:
        """Descriptions of what is missing in the files of the run."""
        recorded = {record["step"] for record in training_steps(self.history)}
        missing = {*range(self.settings_history.periods[0].first_step, max(recorded) + 1)} - recorded
        steps = f"step{'s' * (len(missing) > 1)} {format_ranges(missing)}"
        return [*([f"metrics.jsonl has no line for {steps}"] if missing else []), *self.settings_history.gaps]

    def non_default_settings(self) -> list[NonDefaultSetting]:
        """Returns the settings whose values differ from the defaults."""
        chosen = []
        for name, (value, origin) in self.settings_history.periods[-1].settings.items():
            default = _to_json_value(FIELDS[name].default)
            if origin != "default" and value != default:
                chosen.append(NonDefaultSetting(name, value, default, origin))
        return chosen


def _to_json_value(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_to_json_value(item) for item in value]
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


def _read_metrics(path: Path) -> list[MetricsRecord]:
    """Returns the lines of `metrics.jsonl`, except a last one that a running or killed process left incomplete."""
    lines = list(read_jsonl_tolerant(path))
    if lines and isinstance(lines[-1][1], InputError) and not path.read_bytes().endswith(b"\n"):
        lines.pop()
    history: list[MetricsRecord] = []
    for line, record in lines:
        if isinstance(record, InputError):
            raise record
        if type(record.get("step")) is not int:
            raise InputError(
                f"{path}:{line}: expected an integer `step`, got {record.get('step')!r:.40}; correct or remove the line"
            )
        history.append(record)
    return history


def sample_files(folder: Path) -> dict[int, Path]:
    """Maps each step to its file of samples, in the order of the steps."""
    if not folder.is_dir():
        return {}
    files = {step: path for path in folder.iterdir() if (step := step_of_samples(path)) is not None}
    return dict(sorted(files.items()))
