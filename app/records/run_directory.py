"""The directory of a run: its files, its lock, and the checks before a run starts there."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from app.records.atomic_write import is_partial_file, write_atomic
from app.records.file_lock import FileLockedError, lock_file
from settings import Resolved
from settings.errors import InputError
from settings.schema.run import RunSettings

Resume = Literal["auto", "never", "must"]
BEST_LINK = "best"
"""Name of the relative link to the best checkpoint, in the checkpoint folder."""
FETCHED = ".fetched"
"""Name of the folder in a run directory for files that are still being downloaded from a bucket."""


def step_of_samples(path: Path) -> int | None:
    """Returns the step of a run's sample file; None for any other file name."""
    match = re.fullmatch(r"step_(\d+)\.jsonl", path.name)
    return int(match[1]) if match else None


def is_address(place: str) -> bool:
    """Returns whether a `run.dir` is the address of a bucket rather than a folder."""
    return "://" in place


def local_folder(address: str) -> Path:
    """Returns the local folder for an address: `runs/gs/BUCKET/FOLDER` for `gs://BUCKET/FOLDER`."""
    scheme, _, place = address.partition("://")
    return Path("runs") / scheme / place


@dataclass(frozen=True)
class RunDirectory:
    """The paths of a run's files in `<run.dir>/<run.name>/`."""

    path: Path

    @classmethod
    def from_settings(cls, settings: RunSettings) -> RunDirectory:
        assert settings.name is not None, "null is replaced by a derived name"
        folder = local_folder(settings.dir) if is_address(settings.dir) else Path(settings.dir).expanduser()
        return cls(folder / settings.name)

    @property
    def settings_path(self) -> Path:
        return self.path / "settings.yaml"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def model_path(self) -> Path:
        """File with the Hugging Face commit of each model that the run uses."""
        return self.path / "model.json"

    @property
    def sessions_path(self) -> Path:
        return self.path / "sessions.jsonl"

    @property
    def checkpoints_dir(self) -> Path:
        return self.path / "checkpoints"

    @property
    def data_dir(self) -> Path:
        """Folder of the rows passed to `grpo.train`, each file in a folder named by a hash of its content."""
        return self.path / "data"

    @property
    def crash_dir(self) -> Path:
        """Folder for the stack traces of hosts that the watchdog has ended."""
        return self.path / "crash"

    @property
    def timeline_path(self) -> Path:
        return self.path / "timeline.html"

    def rollouts_path(self, step: int) -> Path:
        return self.path / "rollouts" / f"step_{step:06d}.jsonl"

    def evaluation_path(self, step: int) -> Path:
        return self.path / "eval" / f"step_{step:06d}.jsonl"

    @property
    def tensorboard_dir(self) -> Path:
        return self.path / "tensorboard"

    def profile_dir(self, step: int) -> Path:
        return self.path / "profile" / f"step_{step:06d}"

    def write_settings(self, resolved: Resolved) -> None:
        """Writes the resolved settings with their sources, atomically."""
        write_atomic(self.settings_path, resolved.to_yaml().encode("utf-8"))

    @property
    def has_settings(self) -> bool:
        """Whether a run wrote its settings here."""
        return self.settings_path.exists() or self.sessions_path.exists()

    @property
    def checkpoint_steps(self) -> list[int]:
        """The steps of the checkpoint folders, unsorted; their content is not checked."""
        children = self.checkpoints_dir.iterdir() if self.checkpoints_dir.is_dir() else ()
        return [int(child.name) for child in children if child.name.isdigit()]

    def describe_newest_checkpoint(self) -> str:
        """Returns the step of the newest checkpoint visible to this host, as text."""
        steps = self.checkpoint_steps
        return f"step {max(steps)}" if steps else "none"

    @property
    def has_checkpoint(self) -> bool:
        return bool(self.checkpoint_steps)

    @property
    def has_foreign_files(self) -> bool:
        """Whether the directory has no run, but other files than a run leaves if it ends during startup."""
        if self.has_settings or self.has_checkpoint or not self.path.is_dir():
            return False
        ours = {".lock", FETCHED, self.crash_dir.name, self.data_dir.name}
        if self.checkpoints_dir.is_dir() and not any(self.checkpoints_dir.iterdir()):
            ours.add(self.checkpoints_dir.name)
        return not all(
            child.name in ours or is_partial_file(child, target=self.sessions_path) for child in self.path.iterdir()
        )


def with_run_name(resolved: Resolved, resume: Resume, names: Iterable[str] = ()) -> Resolved:
    """Returns the settings with the name of the run to start or, if a run may be resumed, of the newest run.

    Only a name that was not set explicitly changes: a second run of `quickstart-seed0` is `quickstart-seed0-2`.

    Args:
        names: runs in other places, such as a bucket.
    """
    if resolved.provenance["run.name"] != "derived":
        return resolved
    settings, path = resolved.settings, RunDirectory.from_settings(resolved.settings.run).path
    pattern = re.compile(rf"{re.escape(path.name)}(?:-([2-9]|[1-9]\d+))?")
    found = [(RunDirectory(child), pattern.fullmatch(child.name)) for child in path.parent.glob(f"{path.name}*/")]
    # A resumed run may have died before its first file.
    is_resumed = resume != "never"
    taken = [match for run, match in found if is_resumed or run.has_settings or run.has_checkpoint]
    numbers = [int(match[1] or 1) for match in (*taken, *map(pattern.fullmatch, names)) if match]
    number = max(numbers, default=0) + (not is_resumed)
    if number <= 1:
        return resolved
    run = settings.run.model_copy(update={"name": f"{path.name}-{number}"})
    return dataclasses.replace(resolved, settings=settings.model_copy(update={"run": run}))


def check_run_directory(run: RunDirectory, resume: Resume, *, is_mirrored: bool = False) -> None:
    """Checks that a run may start here; writes nothing.

    Args:
        is_mirrored: whether the run has a copy in a bucket, where `Bucket.check` looks for its checkpoint.

    Raises:
        InputError: there is a run but `resume` is `never`, there is no checkpoint but `resume` is `must`, there are
            other files, or the directory is not readable and writable.
    """
    try:
        _check_content(run, resume, is_mirrored=is_mirrored)
        parent = next(p for p in (run.path, *run.path.parents) if p.exists())
    except OSError as error:
        raise InputError(f"run.dir: cannot read {run.path}: {error.strerror}; choose another run.dir") from error
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"run.dir: {parent} is not a directory that this user may write to; choose another run.dir")


def _check_content(run: RunDirectory, resume: Resume, *, is_mirrored: bool) -> None:
    if run.path.exists() and not run.path.is_dir():
        raise InputError(f"run.dir / run.name: {run.path} is a file; choose another run.name")
    if resume == "never" and (run.has_settings or run.has_checkpoint):
        way = "continue it" if run.has_checkpoint else "start it over, as it has no checkpoint,"
        raise InputError(
            f"run.name: {run.path} already holds a run; choose another run.name, or {way} with --resume auto"
        )
    if resume == "must" and not (run.has_checkpoint or is_mirrored):
        raise InputError(f"--resume must: {run.path} has no checkpoint; use --resume auto to start there")
    # The link to the best checkpoint is the run's own.
    children = [*run.path.iterdir(), *run.checkpoints_dir.glob("[0-9]*")] if run.path.is_dir() else []
    for path in children:
        if path.is_symlink():
            raise InputError(
                f"run.dir / run.name: {path} is a symbolic link, but a run writes only into its own directory; "
                "replace the link by its target, or choose another run.name"
            )
        if path.is_dir() and path.suffix in (".yaml", ".jsonl", ".json"):
            raise InputError(f"run.dir / run.name: {path} is a folder instead of a file; choose another run.name")
    if run.has_foreign_files:
        raise InputError(f"run.name: {run.path} exists and is not a run directory; choose another run.name")


class RunInUseError(InputError):
    """Another process has locked the directory of a run."""


def lock_run_directory(run: RunDirectory, *, waits: bool = False) -> IO[bytes]:
    """Creates the directory and locks it until the returned file is closed.

    Args:
        waits: whether to wait until no other process has locked it.

    Raises:
        RunInUseError: another process has locked it, and `waits` is False.
        InputError: the directory cannot be created or written to.
    """
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        return lock_file(run.path / ".lock", waits=waits)
    except FileLockedError:
        raise RunInUseError(
            f"run.name: another process is running in {run.path}; wait for it, or choose another run.name"
        ) from None
    except OSError as error:
        raise InputError(f"run.dir: cannot write to {run.path}: {error.strerror}; choose another run.dir") from error
