"""Folders that only process 0 may see, and copies of their small files for the other processes."""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import jax
import numpy as np

from app.distributed.collectives import broadcast_bytes, error_barrier, max_over_hosts
from settings.errors import InputError


def sees_folder(folder: Path) -> tuple[bool, bool]:
    """Returns whether this host, and whether all hosts, see the same folder as process 0, which may not exist yet.

    Process 0 writes a probe file and removes it again. All hosts must call it together with the same path; a relative
    path is relative to each host's working directory.

    Raises:
        InputError: process 0 cannot write there.
    """
    if jax.process_count() == 1:
        return True, True
    is_process_0, probe, folder = jax.process_index() == 0, Path(), folder.absolute()
    try:
        with error_barrier():
            if is_process_0:
                parent = next(parent for parent in folder.parents if parent.is_dir())
                probe = parent / f".grpo-{uuid.uuid4().hex}"
                try:
                    probe.touch(exist_ok=False)
                except OSError as error:
                    raise InputError(
                        f"run.dir: cannot write to {parent}: {error.strerror}; choose another folder"
                    ) from error
        way = broadcast_bytes(os.path.relpath(probe, folder).encode()).decode()
        is_seen = os.path.exists(os.path.normpath(folder / way))
        return is_seen, not max_over_hosts(np.asarray(not is_seen))
    finally:
        if is_process_0:
            with suppress(OSError):
                probe.unlink()


@contextmanager
def copy_from_process_0(folder: Path, patterns: Sequence[str]) -> Iterator[Path]:
    """Yields a folder of process 0; on other hosts, a temporary folder with copies of its matching files.

    All hosts must enter the block together.

    Raises:
        InputError: a host cannot write the copies.
    """
    is_process_0, names = jax.process_index() == 0, list[str]()
    with ExitStack() as stack:
        with error_barrier(), _explain_failed_copy():
            if is_process_0:
                found = (path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file())
                names = [path.relative_to(folder).as_posix() for path in found]
            else:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="grpo-")))
        for name in json.loads(broadcast_bytes(json.dumps(names).encode())):
            content = b""
            with error_barrier():
                if is_process_0:
                    content = (folder / name).read_bytes()
            content = broadcast_bytes(content)
            with error_barrier(), _explain_failed_copy():
                if not is_process_0:
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name).write_bytes(content)
        yield folder


@contextmanager
def _explain_failed_copy() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if jax.process_index() == 0:
            raise
        raise InputError(
            f"run.dir: this host does not see the folder of process 0, and cannot copy its small files: {error}; set "
            "TMPDIR to a folder with some space"
        ) from error
