"""The run directory of process 0, which counts for all hosts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import jax

from app.distributed.collectives import broadcast_bytes, error_barrier
from app.distributed.host_files import copy_from_process_0, is_seen_by_all
from app.records.run_directory import RunDirectory
from settings import Resolved
from settings.errors import InputError

RUN_FILES = ("settings.yaml", "sessions.jsonl", "model.json", "checkpoints/*/progress/*")
"""What a host reads of a run before it continues it."""


@contextmanager
def take_run_directory(resolved: Resolved) -> Iterator[tuple[Resolved, RunDirectory, bool]]:
    """Yields the settings with the run of process 0, its directory, and whether all hosts see that.

    A host that does not see it gets a temporary folder with copies of its small files. All hosts must enter the block
    together.

    Raises:
        InputError: process 0 cannot write there, or another host holds a run of its own.
    """
    own = RunDirectory.from_settings(resolved.settings.run)
    # A derived name depends on the runs that a host has; names that were given are compared later.
    shared = {"dir", "name"} if resolved.provenance["run.name"] == "derived" else {"dir"}
    sent = broadcast_bytes(resolved.settings.run.model_dump_json(include=shared).encode())
    settings = resolved.settings.model_copy(update={"run": resolved.settings.run.model_copy(update=json.loads(sent))})
    resolved, run = replace(resolved, settings=settings), RunDirectory.from_settings(settings.run)
    if is_seen_by_all(run.path):
        yield resolved, run, True
        return
    with error_barrier():
        if jax.process_index() > 0 and (own.has_settings or own.has_checkpoint):
            raise InputError(
                f"run.dir: this host has a run in {own.path} (newest checkpoint: {own.describe_newest_checkpoint()}), "
                f"but process 0 keeps the run in a folder that this host does not see, {run.path}; start process 0 on "
                "this host, copy the run to process 0, or choose another run.name"
            )
    with copy_from_process_0(run.path, RUN_FILES) as path:
        yield resolved, RunDirectory(path), False
