"""Locks on files that only one process at a time may write."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO


class FileLockedError(Exception):
    """Another process holds the lock."""


def lock_file(path: Path, *, waits: bool = False) -> IO[bytes]:
    """Opens a file for appending and locks it until the file is closed.

    Args:
        waits: whether to wait until no other process holds the lock.

    Raises:
        FileLockedError: another process holds the lock, and `waits` is False.
        OSError: the file cannot be written or locked.
    """
    while True:
        file = path.open("ab")
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            except BlockingIOError:
                raise FileLockedError from None
            # The process that held the lock may have removed the file in the meantime.
            if os.fstat(file.fileno()).st_nlink:
                return file
        except (OSError, FileLockedError):
            file.close()
            raise
        file.close()
