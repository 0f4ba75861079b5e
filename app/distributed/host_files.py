"""Copies files of folders that only process 0 may see to the other processes."""

from __future__ import annotations

import hashlib
import os
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

import jax

from app.distributed.collectives import any_host, broadcast_bytes, broadcast_json, error_barrier
from settings.errors import InputError

MAX_PIECE_BYTES = 1 << 26
"""Maximum number of bytes of a file that are sent and held in memory at once."""


def sees_folder(folder: Path) -> tuple[bool, bool]:
    """Returns whether this host sees process 0's folder, and whether all hosts do. The folder need not exist yet.

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
                        f"run.dir: cannot write to {parent}: {error.strerror}; choose another run.dir"
                    ) from error
        way = broadcast_json(os.path.relpath(probe, folder))
        is_seen = os.path.exists(os.path.normpath(folder / way))
        return is_seen, not any_host(not is_seen)
    finally:
        if is_process_0:
            with suppress(OSError):
                probe.unlink()


def all_hosts_have(folder: Path, patterns: Sequence[str]) -> bool:
    """Returns whether the matching files in `folder` are the same on all hosts; False if process 0 has none.

    All hosts must call it together.
    """
    digests = dict[str, str]()
    # Another host may have a folder of this name that it cannot read.
    with error_barrier(), nullcontext() if jax.process_index() == 0 else suppress(OSError):
        for name in _matching_files(folder, patterns):
            with (folder / name).open("rb") as file:
                digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    expected = broadcast_json(digests)
    return not any_host(not expected or digests != expected)


def _matching_files(folder: Path, patterns: Sequence[str]) -> list[str]:
    found = (path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file())
    return [path.relative_to(folder).as_posix() for path in found]


@contextmanager
def copy_from_process_0(folder: Path, patterns: Sequence[str], *, option: str = "run.dir") -> Iterator[Path]:
    """Returns a context manager that yields process 0's folder, or on other hosts a temporary copy of it.

    The copy has the same name and contains the files that match one of `patterns`. All hosts must enter together.

    Args:
        option: the setting or option that names the folder, for errors.

    Raises:
        InputError: a host cannot write the copies.
    """
    with ExitStack() as stack:
        with error_barrier(), _explain_failed_copy(option):
            if jax.process_index() != 0:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="grpo-"))) / folder.name
        copy_files(folder, patterns, option=option)
        yield folder


def copy_files(folder: Path, patterns: Sequence[str], *, option: str = "run.dir") -> None:
    """Copies the files of process 0's folder that match one of `patterns` into the folders of the other hosts."""
    sizes = dict[str, int]()
    with error_barrier():
        if jax.process_index() == 0:
            sizes = {name: (folder / name).stat().st_size for name in _matching_files(folder, patterns)}
    for name, size in broadcast_json(sizes).items():
        _copy_file(folder / name, size, option)


def _copy_file(path: Path, size: int, option: str) -> None:
    """Copies the first `size` bytes of a file of process 0 to this path on the other hosts."""
    is_process_0 = jax.process_index() == 0
    with ExitStack() as stack:
        with error_barrier(), _explain_failed_copy(option):
            if not is_process_0:
                path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("rb" if is_process_0 else "wb"))
        for start in range(0, size, MAX_PIECE_BYTES):
            piece = b""
            with error_barrier():
                if is_process_0:
                    piece = file.read(min(size - start, MAX_PIECE_BYTES))
            piece = broadcast_bytes(piece)
            with error_barrier(), _explain_failed_copy(option):
                if not is_process_0:
                    file.write(piece)
                    # A full disk is an error here, not when the file is closed.
                    file.flush()


@contextmanager
def _explain_failed_copy(option: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if jax.process_index() == 0:
            raise
        raise InputError(
            f"{option}: this host does not see the folder of process 0, and cannot copy its files: {error}; make the "
            "folder visible to all hosts, or set TMPDIR on this host to another folder"
        ) from error
