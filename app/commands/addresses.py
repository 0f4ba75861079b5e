"""Bucket addresses in command options: a run in a bucket is fetched; nothing else is read or written there."""

from __future__ import annotations

import re
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from app.commands.command_support import print_notices, runs_alone
from app.records.run_directory import (
    Resume,
    RunDirectory,
    RunInUseError,
    is_address,
    local_folder,
    lock_run_directory,
    with_run_name,
)
from settings import InputError, Resolved
from settings.schema.section import COPYING, NO_ADDRESS

OF_CHECKPOINTS = ("--checkpoint", "--from-rollouts")
"""Options for which the checkpoints of a run are fetched."""
OUTPUTS = ("--out", "--timeline", "--picture", "--hlo")


def name_run(resolved: Resolved, resume: Resume) -> Resolved:
    """Like `with_run_name`, but also considers the runs in the bucket of `run.dir`.

    Raises:
        InputError: the runs cannot be listed, and there is only one host; with several, process 0 names the run.
    """
    run, names = resolved.settings.run, list[str]()
    if is_address(run.dir) and resolved.provenance["run.name"] == "derived":
        from app.tracking.bucket import Bucket

        with nullcontext() if runs_alone(resolved.settings.mesh) else suppress(InputError):
            names = Bucket(run.dir).run_names(f"{run.name}*")
    return with_run_name(resolved, resume, names)


def local_paths(option: str, value: Any) -> Any:
    """Returns an option's value; for the address of a run or of a part of it, the path of its fetched copy.

    Raises:
        InputError: there is no such run, or the option names an output.
    """
    if isinstance(value, list | tuple):
        return type(value)(local_paths(option, one) for one in value)
    # `Path` merges the two slashes.
    if isinstance(value, Path) and (match := re.fullmatch(r"([a-z][a-z0-9+.-]*):/+(.+)", str(value))):
        return _fetch(option, f"{match[1]}://{match[2]}")
    return value


def _fetch(option: str, address: str) -> Path:
    from app.tracking.bucket import EXTRAS, Bucket, fetch_run

    if option in OUTPUTS or address.partition("://")[0] not in EXTRAS:
        raise InputError(f"{option}: {NO_ADDRESS}, got {address}")
    # The run, or a path one or two levels below it: `<run>/checkpoints/<step>`.
    for depth in range(min(3, address.count("/") - 2)):
        bucket = Bucket(address.rsplit("/", depth)[0], option=option)
        if bucket.has_run:
            run = RunDirectory(local_folder(bucket.address))
            steps = () if option not in OF_CHECKPOINTS else None
            if named := re.fullmatch(r"checkpoints/(\d+)/?", address[len(bucket.address) + 1 :]):
                steps = (int(named[1]),)
            # Commands that fetch wait for each other. A run that is being trained in this folder is read as it is.
            others = lock_run_directory(RunDirectory(run.path.parent), waits=True)
            with others, suppress(RunInUseError), lock_run_directory(run):
                if line := fetch_run(bucket, run, steps=steps):
                    print_notices([f"{option}: {line}"])
            return local_folder(address)
    raise InputError(f"{option}: there is no run at {address}; only runs can be fetched ({COPYING})")
