"""Pins a run's hub models to commits, so that the run does not change when their branches move."""

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
    """Names of the fields of a section that select a model."""

    path: str
    revision: str


class RequestedModel(NamedTuple):
    """Values of the `RevisionFields` of a section."""

    path: str | None
    revision: str | None


class PinnedCommit(NamedTuple):
    """A requested model and its resolved commit."""

    requested: RequestedModel
    commit: str


REVISION_FIELDS: Mapping[str, RevisionFields] = MappingProxyType(
    {
        "model": RevisionFields("path", "revision"),
        "critic": RevisionFields("path", "revision"),
        "reward": RevisionFields("model", "model_revision"),
    }
)
"""Fields by section. A critic without a path uses the policy's files, and so their commit."""


def pin_revisions(settings: Settings, run: RunDirectory) -> Settings:
    """Returns the settings with each revision replaced by the commit that the run used for the same request.

    Raises:
        InputError: the run's record of commits cannot be read.
    """
    if not run.model_path.is_file():
        return settings
    for section, known in _read_pins(run.model_path).items():
        if known.requested == _requested_model(settings, section):
            commit = {REVISION_FIELDS[section].revision: known.commit}
            settings = settings.model_copy(update={section: getattr(settings, section).model_copy(update=commit)})
    return settings


def record_commits(run: RunDirectory, settings: Settings, commits: Mapping[str, str | None]) -> None:
    """Writes the record of commits that `pin_revisions` reads.

    Args:
        commits: commits by section; None for models that are not from the hub, which are left out.
    """
    records = {
        section: {**_requested_model(settings, section)._asdict(), "commit": commit}
        for section, commit in commits.items()
        if commit is not None
    }
    # The policy's entry is at the top level.
    record = {**records.pop("model", {}), **records}
    if record:
        write_atomic(run.model_path, f"{json.dumps(record)}\n".encode())


def _requested_model(settings: Settings, section: str) -> RequestedModel:
    chosen, place = getattr(settings, section), REVISION_FIELDS[section]
    return RequestedModel(getattr(chosen, place.path), getattr(chosen, place.revision))


def _read_pins(path: Path) -> dict[str, PinnedCommit]:
    """Reads the pinned commits by section."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"--resume: {path} cannot be read as JSON ({error}); start another run.name") from error
    if not isinstance(record, dict):
        raise InputError(f"--resume: {path} does not hold a JSON object; start another run.name")
    records = {"model": record} | {section: record[section] for section in REVISION_FIELDS if section in record}
    return {
        section: PinnedCommit(RequestedModel(one.get("path"), one.get("revision")), one["commit"])
        for section, one in records.items()
        if isinstance(one, dict) and "commit" in one
    }
