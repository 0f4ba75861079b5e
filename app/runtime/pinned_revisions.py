"""Pins a run's hub models to commits, so that the run does not change when their branches move."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from app.records.atomic_write import write_atomic
from app.records.run_directory import RunDirectory
from settings import Settings
from settings.errors import InputError

MODEL_FIELDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"model": ("path", "revision"), "critic": ("path", "revision"), "reward": ("model", "model_revision")}
)
"""Section -> its fields that select a model and its revision. A critic without a path uses the policy's files, and so
their commit."""


def pin_revisions(settings: Settings, run: RunDirectory) -> Settings:
    """Returns the settings with each revision replaced by the commit that the run used for the same request.

    Raises:
        InputError: the run's record of commits cannot be read.
    """
    if not run.model_path.is_file():
        return settings
    for section, record in _read_pins(run.model_path).items():
        if (record.get("path"), record.get("revision")) == _requested_model(settings, section):
            commit = {MODEL_FIELDS[section][1]: record["commit"]}
            settings = settings.model_copy(update={section: getattr(settings, section).model_copy(update=commit)})
    return settings


def record_commits(run: RunDirectory, settings: Settings, commits: Mapping[str, str | None]) -> None:
    """Writes the record of commits that `pin_revisions` reads.

    Args:
        commits: commits by section; None for models that are not from the hub, which are left out.
    """
    records = {}
    for section, commit in commits.items():
        if commit is not None:
            path, revision = _requested_model(settings, section)
            records[section] = {"path": path, "revision": revision, "commit": commit}
    # The policy's entry is at the top level.
    record = {**records.pop("model", {}), **records}
    if record:
        write_atomic(run.model_path, f"{json.dumps(record)}\n".encode())


def _requested_model(settings: Settings, section: str) -> tuple[str | None, str | None]:
    path, revision = (getattr(getattr(settings, section), field) for field in MODEL_FIELDS[section])
    return path, revision


def _read_pins(path: Path) -> dict[str, dict[str, Any]]:
    """Reads path, revision and commit of each model, by section."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"--resume: {path} cannot be read as JSON ({error}); start another run.name") from error
    if not isinstance(record, dict):
        raise InputError(f"--resume: {path} does not hold a JSON object; start another run.name")
    records = {"model": record} | {section: record[section] for section in MODEL_FIELDS if section in record}
    return {section: one for section, one in records.items() if isinstance(one, dict) and "commit" in one}
