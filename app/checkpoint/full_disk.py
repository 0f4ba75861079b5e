"""A full disk: one error that says what could not be written, what is saved, and how to continue."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from app.records.run_directory import RunDirectory
from app.records.text_format import format_bytes

FULL_DISK = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT)))
"""Error messages of the operating system and of TensorStore for a full disk or quota."""


class DiskFullError(OSError):
    """A file of a run could not be written, because the disk is full."""


@contextmanager
def explain_full_disk(run: RunDirectory, shapes: Any) -> Iterator[None]:
    """Returns a context manager that raises DiskFullError if its block fails because the disk is full.

    Args:
        shapes: shapes of the arrays in a checkpoint, used to estimate its size for the message.
    """
    try:
        yield
    # Every exception, because Orbax raises TensorStore's errors as ValueError or wraps them in a bare Exception.
    except Exception as error:
        if not any(text in f"{error} {error.__cause__}" for text in FULL_DISK):
            raise
        file = getattr(error, "filename", None) or ("a file" if isinstance(error, OSError) else "a checkpoint")
        needed = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(shapes))
        saved = (
            f"checkpoint {max(run.checkpoint_steps)} is complete" if run.has_checkpoint else "there is no checkpoint"
        )
        raise DiskFullError(
            f"no space is left to write {file}: a checkpoint takes about {format_bytes(needed)}, and "
            f"{format_bytes(shutil.disk_usage(run.path).free)} are free on the disk of {run.path}; {saved}. Free "
            "some space, or lower checkpoint.keep, and continue with --resume auto"
        ) from error
