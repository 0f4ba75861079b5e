"""A run keeps the commits of its hub models, wherever the branches they came from have moved since."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from app.records.atomic_write import write_atomic
from app.records.run_directory import RunDirectory
from settings import Settings
from settings.errors import InputError


class RevisionFields(NamedTuple):
    """The fields of a section that say which model is asked for."""

    path: str
    revision: str


class RequestedModel(NamedTuple):
    """What those fields said."""

    path: str | None
    revision: str | None


class PinnedCommit(NamedTuple):
    """The commit that was found for it."""

    requested: RequestedModel
    commit: str


REVISION_FIELDS: Mapping[str, RevisionFields] = MappingProxyType(
    {
        "model": RevisionFields("path", "revision"),
        "critic": RevisionFields("path", "revision"),
        "reward": RevisionFields("model", "model_revision"),
    }
)
"""By section. A critic without a path starts from the policy's files, and so from their commit."""


def pin_revisions(settings: Settings, run: RunDirectory) -> Settings:
    """The revision of each model is the commit that this run started with, where it did so with the same settings.

    Raises: InputError where the run's record cannot be read.
    """
    if not run.model_path.is_file():
        return settings
    for section, known in _read_pins(run.model_path).items():
        if known.requested == _requested_model(settings, section):
            commit = {REVISION_FIELDS[section].revision: known.commit}
            settings = settings.model_copy(update={section: getattr(settings, section).model_copy(update=commit)})
    return settings


def record_commits(run: RunDirectory, settings: Settings, commits: Mapping[str, str | None]) -> None:
    """Writes down what `pinned` reads; nothing of models that are not from the hub.

    Args:
        commits: by section; None where the model is not from the hub.
    """
    records = {
        section: {**_requested_model(settings, section)._asdict(), "commit": commit}
        for section, commit in commits.items()
        if commit is not None
    }
    # The policy's own stands at the top.
    record = {**records.pop("model", {}), **records}
    if record:
        write_atomic(run.model_path, f"{json.dumps(record)}\n".encode())


def _requested_model(settings: Settings, section: str) -> RequestedModel:
    chosen, place = getattr(settings, section), REVISION_FIELDS[section]
    return RequestedModel(getattr(chosen, place.path), getattr(chosen, place.revision))


def _read_pins(path: Path) -> dict[str, PinnedCommit]:
    """By section."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"--resume: {path} is not readable as JSON ({error}); start another run.name") from error
    if not isinstance(record, dict):
        raise InputError(f"--resume: {path} does not hold a JSON object; start another run.name")
    records = {"model": record} | {section: record[section] for section in REVISION_FIELDS if section in record}
    return {
        section: PinnedCommit(RequestedModel(one.get("path"), one.get("revision")), one["commit"])
        for section, one in records.items()
        if isinstance(one, dict) and "commit" in one
    }
