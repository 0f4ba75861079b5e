"""Gives commands local paths: fetches runs from buckets, and copies the inputs of process 0 to other hosts."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from app.commands.command_support import (
    RUN_SUBFOLDERS,
    inherit_run_settings,
    print_notices,
    require_input,
    runs_alone,
    show_progress,
)
from app.records.run_directory import (
    Resume,
    RunDirectory,
    RunInUseError,
    is_address,
    local_folder,
    lock_run_directory,
    with_run_name,
)
from settings import InputError, Resolved, load
from settings.checks.commands import check_hosts
from settings.schema.section import COPYING, NO_ADDRESS

OF_CHECKPOINTS = ("--from-rollouts", "--checkpoint")
"""Options for which the checkpoints of a run are fetched; other options need only its other files. Without `--config`,
the first of these options that is given names the run whose settings are used."""
INPUTS = (*OF_CHECKPOINTS, "--input", "--prompts")
"""Options whose files only process 0 needs."""
COMMANDS_OF_ALL_HOSTS = ("train", "rollout", "evaluate", "score")
SMALL_RUN_FILES = ("settings.yaml", "sessions.jsonl", "model.json")
OUTPUTS = ("--out", "--timeline", "--picture", "--hlo")


def name_run(resolved: Resolved, resume: Resume) -> Resolved:
    """Returns the settings with the run's name, as `with_run_name` does, but also considers the runs in a bucket.

    Raises:
        InputError: the runs in the bucket of `run.dir` cannot be listed. With several hosts, this is no error yet,
            because process 0 names the run after they have joined.
    """
    run, names = resolved.settings.run, list[str]()
    if is_address(run.dir) and resolved.provenance["run.name"] == "derived":
        from app.tracking.bucket import Bucket, BucketUnreachableError

        is_alone = runs_alone(resolved.settings.mesh)
        with nullcontext() if is_alone else suppress(InputError, BucketUnreachableError):
            names = Bucket(run.dir).run_names(f"{run.name}*")
    return with_run_name(resolved, resume, names)


@contextmanager
def local_inputs(command: str, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the values of a command's options, with paths on this host in place of addresses.

    A command that uses several hosts joins them here, so that any later error ends all of them. Only process 0 needs
    the inputs: other hosts get copies, without the arrays of checkpoints, unless they have the same files.

    Raises:
        InputError: an address does not name a run, or is given for an output; an input does not exist; or the hosts
            cannot join.
    """
    if not _joins_hosts(command, options):
        yield {option: local_paths(option, value) for option, value in options.items()}
        return
    with ExitStack() as stack:

        def local(option: str, value: Any) -> Any:
            if option not in INPUTS or value is None:
                return local_paths(option, value)
            if isinstance(value, list | tuple):
                return [local(option, one) for one in value]
            return stack.enter_context(_input_of_process_0(option, value))

        from app.distributed.collectives import error_barrier

        values = {option: local(option, value) for option, value in options.items()}
        with error_barrier():
            _load(values)
        yield values


def _joins_hosts(command: str, options: Mapping[str, Any]) -> bool:
    """Joins the other hosts if there are any and the command uses them; returns whether it has joined them."""
    if command not in COMMANDS_OF_ALL_HOSTS or options.get("--print-config") or options.get("--compare"):
        return False
    # Without them, `train` joins the other hosts after its checks of settings.
    if command == "train" and not any(options.get(option) for option in INPUTS):
        return False
    try:
        check_hosts(resolved := _load(options, is_early=True))
    except InputError:  # The command raises it again.
        return False
    mesh = resolved.settings.mesh
    if runs_alone(mesh):
        return False
    show_progress(f"grpo {command}: loading JAX, looking for other hosts")
    from app.mesh import jax_startup

    compiles = bool(options.get("--compile"))
    return jax_startup.expects_other_hosts(mesh) and jax_startup.join_other_hosts(mesh, compiles=compiles)


def _load(options: Mapping[str, Any], *, is_early: bool = False) -> Resolved:
    """Loads the settings of a command.

    Args:
        is_early: whether the run whose settings replace a missing `--config` may not be on this host yet.
    """
    base, given = options.get("--config"), {option: options.get(option) for option in OF_CHECKPOINTS}
    runs = {option: next(iter(value), None) if isinstance(value, list) else value for option, value in given.items()}
    with suppress(InputError) if is_early else nullcontext():
        base = inherit_run_settings(base, runs, is_quiet=True)
    return load(base, options.get("--set") or [], os.environ)


@contextmanager
def _input_of_process_0(option: str, path: Path) -> Iterator[Path]:
    """Yields the path of an input on process 0; on other hosts, the path of their own identical files or of copies."""
    from app.distributed.collectives import broadcast_json, error_barrier, is_process_0
    from app.distributed.host_files import all_hosts_have, copy_from_process_0

    found = None
    with error_barrier():
        if is_process_0():
            path = local_paths(option, path)
            if option != "--prompts":  # It may also name a data set or several files.
                require_input(option, path)
            root, place, patterns = _files_of(option, path.expanduser().resolve())
            found = root.name, place.as_posix(), patterns
        elif address := _address_in(path):
            path = local_folder(address)
        own = path.expanduser().resolve()
    name, place, patterns = broadcast_json(found)
    root = own.parents[len(Path(place).parts) - 1] if Path(place).parts else own
    if not patterns or all_hosts_have(root, patterns):
        yield path if is_process_0() or not patterns else root / place
        return
    with copy_from_process_0(root if is_process_0() else Path(name), patterns, option=option) as copy:
        yield path if is_process_0() else copy / place


def _files_of(option: str, path: Path) -> tuple[Path, Path, list[str]]:
    """Returns the folder of an input, the input's path relative to it, and glob patterns of the files to read.

    If the input may belong to a run, the folder is the run directory.
    """
    above = next((folder for folder in (path, path.parent) if folder.name in RUN_SUBFOLDERS), None)
    root = above.parent if above else path if path.is_dir() else path.parent
    place = path.relative_to(root)
    patterns = [glob.escape(str(place))] if path.is_file() else []
    if option == "--from-rollouts" and path.is_dir():
        patterns = [f"{glob.escape(str(place))}/step_*.jsonl", "rollouts/step_*.jsonl"]
    if option == "--checkpoint":
        patterns = ["checkpoints/*/progress/*", "progress/*"]
    return root, place, [*patterns, *(SMALL_RUN_FILES if option in OF_CHECKPOINTS else ())]


def local_paths(option: str, value: Any) -> Any:
    """Returns an option's value, in which bucket addresses of runs or their files become paths of fetched copies.

    Raises:
        InputError: there is no such run, or the option names an output.
    """
    if isinstance(value, list | tuple):
        return type(value)(local_paths(option, one) for one in value)
    return _fetch(option, address) if (address := _address_in(value)) else value


def _address_in(value: Any) -> str | None:
    """Returns the bucket address in an option's value; None if it has none."""
    # `Path` merges the two slashes.
    match = re.fullmatch(r"([a-z][a-z0-9+.-]*):/+(.+)", str(value)) if isinstance(value, Path) else None
    return match and f"{match[1]}://{match[2]}"


def _fetch(option: str, address: str) -> Path:
    from app.tracking.bucket import EXTRAS, Bucket, fetch_run

    if option in OUTPUTS:
        raise InputError(f"{option}: {NO_ADDRESS}, got {address}; {COPYING}")
    if address.partition("://")[0] not in EXTRAS:
        raise InputError(
            f"{option}: expected a local path, or a run at gs:// or s3://, got {address}; download it first"
        )
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
    raise InputError(
        f"{option}: there is no run at {address}, and only runs are fetched; correct the address, or {COPYING}"
    )
