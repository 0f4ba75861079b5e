"""Atomic writes of files and folders."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def write_atomic(path: Path, content: bytes) -> None:
    """Writes a file; if that fails or the program is killed, the old file stays at `path`."""
    with open_atomic(path) as file:
        file.write(content)


@contextmanager
def open_atomic(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file with a temporary name in the same folder, and renames it to `path` if the block does not raise.

    The file is first synced to the disk; otherwise, a power failure could leave an empty file with the new name.
    """
    # A random number, because hosts may write the same file in a shared folder, and in containers with the same process
    # id.
    partial = path.with_name(f".{path.name}.{int.from_bytes(os.urandom(8))}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def create_folder_atomic(path: Path) -> Iterator[Path]:
    """Creates a folder with a temporary name next to `path`, and renames it to `path` if the block does not raise.

    Its files and their names are first synced to the disk. If the block raises, the folder is deleted.

    Raises:
        OSError: `path` exists.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    # A killed program may have had the same process id; in a container it is always the same.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        for written in (*partial.iterdir(), partial):
            _fsync(written)
        # A rename would replace an empty folder.
        if os.path.lexists(path):
            raise FileExistsError(f"{path} was created in the meantime; give another path")
        partial.rename(path)
        _fsync(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fsync(path: Path) -> None:
    """Syncs a file's content, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_partial_file(path: Path, *, target: Path) -> bool:
    """Returns whether `path` is the temporary file of a killed program that was writing `target`."""
    return (
        path.parent == target.parent
        and re.fullmatch(rf"\.{re.escape(target.name)}\.\d+\.partial", path.name) is not None
    )


def remove_partial_files(target: Path) -> None:
    """Removes the temporary files that killed processes left behind while they wrote `target`."""
    for path in target.absolute().parent.iterdir():
        if is_partial_file(path, target=target.absolute()):
            # Hosts that share a folder may remove the files at the same time.
            path.unlink(missing_ok=True)
