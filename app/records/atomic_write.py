"""Files and folders that are written whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def write_atomic(path: Path, content: bytes) -> None:
    """Writes a file; where that fails, or the program is killed, what was at `path` is still there."""
    with open_atomic(path) as file:
        file.write(content)


@contextmanager
def open_atomic(path: Path) -> Iterator[IO[bytes]]:
    """A file with a temporary name in the same folder, renamed to `path` when the block has ended without an error.

    Its content is on the disk by then: else a power failure could leave the new name with nothing in it.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
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
    """A folder with a temporary name beside `path`, renamed to it when the block has ended without an error.

    Its files and their names are on the disk by then; where the block fails, nothing of it stays.

    Raises:
        OSError: `path` exists.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    # A program that was killed may have had this number, in a container always the same one.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        for written in (*partial.iterdir(), partial):
            _fsync(written)
        # Not over an empty folder, which a rename would replace.
        if os.path.lexists(path):
            raise FileExistsError(f"{path} has come into being meanwhile")
        partial.rename(path)
        _fsync(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fsync(path: Path) -> None:
    """A file's content, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_partial_file(path: Path, *, target: Path) -> bool:
    """Whether a program that was killed left `path` while it was writing the file `of`."""
    return (
        path.parent == target.parent
        and re.fullmatch(rf"\.{re.escape(target.name)}\.\d+\.partial", path.name) is not None
    )
