"""Reads checkpoints on all hosts; all of them learn if files are damaged on any host."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from app.checkpoint.saved_arrays import CHECKSUM_MISMATCH, checksums, convert_dtypes
from app.distributed.collectives import any_host

Content = TypeVar("Content")

MAX_REASON_CHARS = 200
"""Maximum length of a library's error message as shown; messages of TensorStore have thousands of characters."""

NON_DAMAGE_PREFIXES = (
    "RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED",
    "PERMISSION_DENIED", "UNAUTHENTICATED", "INTERNAL", "UNIMPLEMENTED",
)  # fmt: skip
"""TensorStore also raises ValueError for errors with these prefixes, which do not mean damaged files."""


def open_reader(handler: ocp.CompositeCheckpointHandler) -> ocp.Checkpointer:
    """Opens a reader for this host alone: in a joint restore, hosts would wait forever for a host that cannot read."""
    alone = ocp.options.MultiprocessingOptions(primary_host=jax.process_index(), active_processes={jax.process_index()})
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def read_on_all_hosts(read: Callable[[], Content]) -> tuple[Content | None, str]:
    """Returns the result of `read` and "", or, if files are damaged on any host, None and a reason on all hosts."""
    content, reason = None, "another host cannot read it"
    try:
        content = read()
    except Exception as error:
        if not is_damage(error):
            raise
        silence_abandoned_work()
        reason = " ".join(str(error).split())[:MAX_REASON_CHARS] or type(error).__name__
    return (None, reason) if any_host(content is None) else (content, "")


def read_verified(read: Callable[[], Any], sums: Mapping[str, int], target: Any) -> tuple[Any, str]:
    """Returns the result of `read` with the dtypes of `target` and "", or None and a reason if the state is damaged.

    Args:
        sums: maps the path of each array in the checkpoint to its checksum.
    """
    state, reason = read_on_all_hosts(read)
    # Either every host has read the state, or none has.
    if state is not None:
        found = checksums(state)
        reason = "" if found == {name: sums.get(name) for name in found} else CHECKSUM_MISMATCH
    return (None, reason) if reason else (convert_dtypes(state, target), "")


def is_damage(error: Exception) -> bool:
    """Returns whether an error is caused by damaged files, not by memory, the network, a permission or a bug.

    If a good checkpoint is mistaken for a damaged one, it is renamed and its steps are trained again.
    """
    # Orbax asserts that its metadata match the arrays. It wraps any error during a read, even out of memory, in a bare
    # Exception.
    cause = error.__cause__ if type(error) is Exception else error
    return isinstance(cause, (ValueError, KeyError, FileNotFoundError, AssertionError)) and not str(cause).startswith(
        NON_DAMAGE_PREFIXES
    )


@functools.cache
def silence_abandoned_work() -> None:
    """Suppresses the tracebacks of Orbax's concurrent tasks when a read or write fails; the error itself is raised."""
    before, noise = sys.unraisablehook, ("Event loop is closed", "Encountered error while reading")
    sys.unraisablehook = lambda raised: None if str(raised.exc_value).startswith(noise) else before(raised)

    def without_traceback(record: logging.LogRecord) -> bool:
        record.exc_info = None
        return True

    logging.getLogger("absl").addFilter(without_traceback)
