"""A file that one process at a time has."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

from settings.errors import InputError


def open_locked(path: Path, *, command: str) -> IO[bytes]:
    """Opened for appending; until it is closed, whoever else asks for it is refused.

    Args:
        of: the work it belongs to, for errors: `rollout`.

    Raises:
        InputError: another process has it, or it cannot be written or locked. It speaks of `--out`, which is beside it.
    """
    while True:
        try:
            file = path.open("ab")
        except OSError as error:
            raise InputError(f"--out: {path} cannot be written: {error.strerror}; give another --out") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise InputError(
                f"--out: another process is at this {command} ({path}); wait for it, or give another --out"
            ) from None
        except OSError as error:
            file.close()
            raise InputError(
                f"--out: {path} cannot be locked: {error.strerror}; give an --out on another disk"
            ) from error
        if _is_same_file(file, path):
            return file
        # Whoever had it has finished and removed it in between.
        file.close()


def _is_same_file(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
