"""A run keeps the commit of its hub model, wherever the branch it came from has moved since."""

from __future__ import annotations

import json
from pathlib import Path

from app.training.run_directory import RunDirectory
from app.whole_file import write_whole
from settings import Settings
from settings.errors import InputError
from settings.schema import Model


def pinned(settings: Settings, run: RunDirectory) -> Settings:
    """`model.revision` is the commit that this run started with, if it did so with the same model settings.

    Raises: InputError where the run's record cannot be read.
    """
    if not run.model.is_file():
        return settings
    record = _read(run.model)
    if _asked_for(settings.model) != (record.get("path"), record.get("revision")):
        return settings
    model = settings.model.model_copy(update={"revision": record.get("commit")})
    return settings.model_copy(update={"model": model})


def record_commit(run: RunDirectory, settings: Settings, commit: str | None) -> None:
    """Writes down what `pinned` reads; nothing for a model that is not from the hub."""
    if commit is None:
        return
    path, revision = _asked_for(settings.model)
    text = json.dumps({"path": path, "revision": revision, "commit": commit})
    write_whole(run.model, f"{text}\n".encode())


def _asked_for(model: Model) -> tuple[str, str | None]:
    return model.path, model.revision


def _read(path: Path) -> dict[str, str | None]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"--resume: {path} is not readable as JSON ({error}); start another run.name") from error
    if not isinstance(record, dict):
        raise InputError(f"--resume: {path} does not hold a JSON object; start another run.name")
    return record
