"""Reads checkpoints on all hosts; all of them learn if files are damaged on any host."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from app.checkpoint.array_pieces import broadcast_in_pieces
from app.checkpoint.saved_arrays import array_path, checksums, convert_dtypes, saved_metadata, with_saved_dtypes
from app.distributed.collectives import any_host, broadcast_json

Content = TypeVar("Content")

MAX_REASON_CHARS = 200
"""Maximum length of a library's error message as shown; messages of TensorStore have thousands of characters."""

NON_DAMAGE_PREFIXES = (
    "RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED",
    "PERMISSION_DENIED", "UNAUTHENTICATED", "INTERNAL", "UNIMPLEMENTED",
)  # fmt: skip
"""TensorStore also raises ValueError for errors with these prefixes, which do not mean damaged files."""


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


def read_verified(folder: Path, sums: Mapping[str, int], target: Any, *, is_seen_by_all: bool) -> tuple[Any, str]:
    """Returns a state, or a part of one, of a checkpoint and "", or None and a reason if it is damaged.

    All hosts must call it together.

    Args:
        sums: maps the path of each array in the checkpoint to its checksum.
        target: shapes, dtypes and shardings of the result; the checkpoint may have other dtypes.
        is_seen_by_all: whether all hosts have the arrays; otherwise, process 0 has them.
    """
    read = _read if is_seen_by_all else _read_from_process_0
    state, reason = read_on_all_hosts(functools.partial(read, folder, target))
    # Either every host has read the state, or none has.
    if state is not None:
        found = checksums(state)
        is_same = found == {name: sums.get(name) for name in found}
        reason = "" if is_same else "the checksums of its arrays do not match the saved ones"
    return (None, reason) if reason else (convert_dtypes(state, target), "")


def _read(folder: Path, target: Any) -> Any:
    """Reads this host's part of a state, or of a part of one, with its saved dtypes."""
    saved = with_saved_dtypes(folder, target)
    types = ocp.checkpoint_utils.construct_restore_args(saved)
    return _restore(folder, item=saved, restore_args=types, partial_restore=True)


def _restore(folder: Path, **arguments: Any) -> Any:
    """Restores a tree on this host alone: in a joint restore, hosts would wait forever for a host that cannot read."""
    alone = ocp.options.MultiprocessingOptions(primary_host=jax.process_index(), active_processes={jax.process_index()})
    handler = ocp.CompositeCheckpointHandler(state=ocp.PyTreeCheckpointHandler())
    with closing(ocp.Checkpointer(handler, multiprocessing_options=alone)) as reader:
        return reader.restore(folder, args=ocp.args.Composite(state=ocp.args.PyTreeRestore(**arguments)))["state"]


def _read_from_process_0(folder: Path, target: Any) -> Any:
    """Reads a state, or a part of one, with its saved dtypes; only process 0 needs to have the checkpoint.

    Host memory holds one whole array at a time. All hosts must call it together.

    Raises:
        ValueError: an array cannot be read.
    """
    saved, reason = read_on_all_hosts(lambda: with_saved_dtypes(folder, target) if jax.process_index() == 0 else target)
    if saved is None:
        raise ValueError(reason)
    types = broadcast_json([x.dtype.name for x in jax.tree.leaves(saved)])
    arrays, structure = jax.tree.flatten_with_path(target)
    restored = []
    for (keys, x), dtype in zip(arrays, types, strict=True):
        like = jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
        whole, reason = read_on_all_hosts(functools.partial(_read_array, folder, array_path(keys), like))
        if whole is None:
            raise ValueError(reason)
        broadcast_in_pieces(whole)
        restored.append(jax.make_array_from_callback(like.shape, like.sharding, whole.__getitem__))
    return structure.unflatten(restored)


def _read_array(folder: Path, path: str, like: jax.ShapeDtypeStruct) -> np.ndarray:
    """Returns the array at a path of the saved state; on all processes but 0, an uninitialized array."""
    if jax.process_index() > 0:
        return np.empty(like.shape, like.dtype)
    # The structure of the whole state: a partial restore would ignore the placeholders.
    item = jax.tree.map_with_path(
        lambda keys, _: like if array_path(keys) == path else ocp.PLACEHOLDER, saved_metadata(folder)
    )
    types = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    state = _restore(folder, item=item, restore_args=types)
    (array,) = (x for x in jax.tree.leaves(state) if x is not ocp.PLACEHOLDER)
    if array.shape != like.shape:
        raise ValueError(f"it contains an array of shape {list(array.shape)}, expected {list(like.shape)}")
    return array


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
