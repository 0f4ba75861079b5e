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
from settings.schema.model import split_revision

MODEL_FIELDS: Mapping[str, str] = MappingProxyType(
    {"model": "path", "reference": "source", "critic": "path", "reward": "model"}
)
"""Maps a section of the settings to the field that selects its model; a critic without a path uses `model.path`."""


def pin_revisions(settings: Settings, run: RunDirectory) -> Settings:
    """Returns the settings with hub models pinned to the commits that the run has recorded for them.

    Raises:
        InputError: the file with the run's commits cannot be read.
    """
    if not run.model_path.is_file():
        return settings
    for section, record in _read_pins(run.model_path).items():
        chosen, field = getattr(settings, section), MODEL_FIELDS[section]
        if (path := getattr(chosen, field)) is not None and path == record.get("path"):
            source = f"{split_revision(path)[0]}@{record['commit']}"
            pinned = {"path": source, "revision": None} if section == "reference" else {field: source}
            settings = settings.model_copy(update={section: chosen.model_copy(update=pinned)})
    return settings


def record_commits(run: RunDirectory, settings: Settings, commits: Mapping[str, str | None]) -> None:
    """Writes the file of commits that `pin_revisions` reads.

    Args:
        commits: the commit of the model in each section of the settings; None for models that are not from the hub.
    """
    records = {
        section: {"path": getattr(getattr(settings, section), MODEL_FIELDS[section]), "commit": commit}
        for section, commit in commits.items()
        if commit is not None
    }
    # The policy's entry is at the top level.
    record = {**records.pop("model", {}), **records}
    if record:
        write_atomic(run.model_path, f"{json.dumps(record)}\n".encode())


def _read_pins(path: Path) -> dict[str, dict[str, Any]]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"--resume: {path} cannot be read as JSON ({error}); restore it, or use another run.name"
        ) from error
    if not isinstance(record, dict):
        raise InputError(f"--resume: {path} does not contain a JSON object; restore it, or use another run.name")
    records = {"model": record} | {section: record[section] for section in MODEL_FIELDS if section in record}
    return {section: one for section, one in records.items() if isinstance(one, dict) and "commit" in one}
