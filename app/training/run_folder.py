"""Gives all hosts access to the run directory of process 0."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import jax

from app.distributed.collectives import broadcast_bytes, error_barrier
from app.distributed.host_files import copy_from_process_0, sees_folder
from app.records.run_directory import Resume, RunDirectory, check_run_directory, is_address
from app.tracking.bucket import bucket_of, fetch_run
from app.tracking.run_mirror import RunMirror
from settings import Resolved
from settings.errors import InputError
from settings.schema.run import RunSettings

log = logging.getLogger(__name__)

RUN_FILES = ("settings.yaml", "sessions.jsonl", "model.json", "checkpoints/*/progress/*")
"""Files of a run that every host reads before the run continues."""


@dataclass(frozen=True)
class RunFolder:
    run: RunDirectory
    """The run directory of process 0; on a host that does not see it, a folder with copies of `RUN_FILES`."""
    is_seen_by_all: bool
    """Whether all hosts see the run directory; otherwise process 0 keeps all files."""
    mirror: RunMirror | None
    """Copies the run to its bucket once started; None without a bucket, and on all processes except process 0."""


@contextmanager
def take_run_directory(
    resolved: Resolved, resume: Resume, *, writes: bool = False
) -> Iterator[tuple[Resolved, RunFolder]]:
    """Yields the settings with the run name of process 0, and the run's directory.

    All hosts must enter the `with` block together.

    Args:
        writes: whether the run will be written: process 0 then takes the lease of the copy in a bucket, and fetches
            what the run directory lacks.

    Raises:
        InputError: the directory or bucket cannot be used, or another process or host is using the run.
    """
    own = RunDirectory.from_settings(resolved.settings.run)
    # A derived name depends on the runs that a host has; explicit names are compared later.
    shared = {"dir", "name"} if resolved.provenance["run.name"] == "derived" else {"dir"}
    sent = broadcast_bytes(resolved.settings.run.model_dump_json(include=shared).encode())
    settings = resolved.settings.model_copy(update={"run": resolved.settings.run.model_copy(update=json.loads(sent))})
    resolved, run = replace(resolved, settings=settings), RunDirectory.from_settings(settings.run)
    with ExitStack() as stack:
        with error_barrier():
            mirror = _open_mirror(settings.run, run, resume, stack, writes=writes) if jax.process_index() == 0 else None
        is_seen, is_seen_by_all = sees_folder(run.path)
        if is_seen_by_all:
            yield resolved, RunFolder(run, True, mirror)
            return
        # A bucket has all of the run, and after a change of process ids, another host still has a part.
        _check_other_hosts(None if is_seen or is_address(settings.run.dir) else own, run)
        path = stack.enter_context(copy_from_process_0(run.path, RUN_FILES))
        yield resolved, RunFolder(RunDirectory(path), False, mirror)


def _check_other_hosts(own: RunDirectory | None, run: RunDirectory) -> None:
    """Raises InputError on all hosts if a host that does not see the run directory has its own checkpoints."""
    with error_barrier():
        if own is not None and own.has_checkpoint:
            raise InputError(
                f"run.dir: this host has a run in {own.path} (newest checkpoint: {own.describe_newest_checkpoint()}), "
                f"but process 0 keeps the run in a folder that this host does not see, {run.path}; start process 0 on "
                "this host, copy the run to process 0, or choose another run.name"
            )


def _open_mirror(
    settings: RunSettings, run: RunDirectory, resume: Resume, stack: ExitStack, *, writes: bool
) -> RunMirror | None:
    """Checks the bucket of the run, if any; with `writes`, also opens its mirror and fetches missing files."""
    if not is_address(settings.dir):
        return None
    bucket = bucket_of(settings)
    bucket.check(resume, run)
    if not writes:
        return None
    check_run_directory(run, "auto")
    mirror = stack.enter_context(RunMirror(run, bucket))
    if resume != "never" and (line := fetch_run(bucket, run)):
        log.warning("%s", line)
    return mirror
