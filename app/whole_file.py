"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file; where that fails, or the program is killed, what was at `path` is still there."""
    with replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
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


def is_leftover(path: Path, *, of: Path) -> bool:
    """Whether a program that was killed left `path` while it was writing the file `of`."""
    return path.parent == of.parent and re.fullmatch(rf"\.{re.escape(of.name)}\.\d+\.partial", path.name) is not None
