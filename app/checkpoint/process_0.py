"""Saves checkpoints in a folder that only process 0 has; arrays are transferred one by one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Array

from app.checkpoint.array_pieces import gather_in_pieces, piece_program
from app.checkpoint.full_disk import explain_full_disk
from app.distributed.collectives import broadcast_json, error_barrier
from app.records.run_directory import RunDirectory

GATHERED_DIR = ".gathered"
"""Folder of arrays that process 0 has gathered but not yet written to a checkpoint."""


class Process0Manager:
    """The part of Orbax's manager that `Checkpoints` uses, for a folder that only process 0 has.

    All hosts must call each method together. An error of process 0 is raised on all of them.
    """

    def __init__(self, directory: Path, options: ocp.CheckpointManagerOptions, target: Any):
        self._gathered_dir = directory / GATHERED_DIR
        self._run, self._target = RunDirectory(directory.parent), target
        self._manager = None
        with error_barrier():
            if jax.process_index() == 0:
                self._manager = ocp.CheckpointManager(directory, options=options)
        # Compiled here: a compilation during a step would be reported as an anomaly.
        for x in jax.tree.leaves(target):
            if not _is_on_process_0(x):
                piece_program(x)

    @contextmanager
    def _error_barrier(self) -> Iterator[None]:
        # Explained on process 0, which has the disk; the other hosts get the message.
        with error_barrier(), explain_full_disk(self._run, self._target):
            yield

    def _run_on_process_0(self, call: Callable[[ocp.CheckpointManager], object]) -> None:
        with self._error_barrier():
            if self._manager is not None:
                call(self._manager)

    def all_steps(self) -> Sequence[int]:
        steps = [] if self._manager is None else list(self._manager.all_steps())
        return broadcast_json(steps)

    def save(self, step: int, *, args: ocp.args.Composite) -> None:
        state = ocp.args.StandardSave(self._gather(args["state"].item))
        moved = ocp.args.Composite(state=state, progress=args["progress"])
        self._run_on_process_0(lambda manager: manager.save(step, args=moved))

    def _gather(self, state: Any) -> Any:
        """Returns the state with its arrays in files on process 0, or with None instead of arrays on other processes.

        Host memory holds one piece of an array at a time, or one device's part if process 0 has all parts.
        """
        shutil.rmtree(self._gathered_dir, ignore_errors=True)
        with self._error_barrier():
            if jax.process_index() == 0:
                self._gathered_dir.mkdir(parents=True)
        leaves, structure = jax.tree.flatten(state)
        return structure.unflatten([self._gather_array(x, str(number)) for number, x in enumerate(leaves)])

    def _gather_array(self, x: Array, name: str) -> np.ndarray | None:
        whole = None
        with self._error_barrier():
            if jax.process_index() == 0:
                file = self._gathered_dir / name
                # Allocate the space first: on a full disk, a write to the mapped file would kill the process.
                with file.open("wb") as empty:
                    os.posix_fallocate(empty.fileno(), 0, x.nbytes)
                whole = GatheredArray(file, x.dtype, "r+", shape=x.shape)
        is_on_process_0 = _is_on_process_0(x)
        if not is_on_process_0:
            gather_in_pieces(x, whole)
        with self._error_barrier():
            if whole is not None:
                if is_on_process_0:
                    parts = {str(shard.index): (shard.index, shard.data) for shard in x.addressable_shards}
                    for index, data in parts.values():
                        whole[index] = np.asarray(data)
                whole.flush()
        return whole

    def wait_until_finished(self) -> None:
        self._run_on_process_0(lambda manager: manager.wait_until_finished())
        if self._manager is not None:
            shutil.rmtree(self._gathered_dir, ignore_errors=True)

    def delete(self, step: int) -> None:
        self._run_on_process_0(lambda manager: manager.delete(step))

    def reload(self) -> None:
        self._run_on_process_0(lambda manager: manager.reload())

    def close(self) -> None:
        if self._manager is not None:
            # After a failed save, whose error this may raise, the folder would take up the space for the next one.
            try:
                self._manager.close()
            finally:
                shutil.rmtree(self._gathered_dir, ignore_errors=True)


class GatheredArray(np.memmap):
    """An array in a file, which Orbax writes without a copy in memory, because nothing modifies it."""

    def __deepcopy__(self, _: object) -> GatheredArray:
        return self


def _is_on_process_0(x: Array | jax.ShapeDtypeStruct) -> bool:
    """Returns whether the devices of process 0 hold all parts of an array; the same on every host."""
    assert x.sharding is not None
    parts = {device: str(index) for device, index in x.sharding.devices_indices_map(x.shape).items()}
    return {part for device, part in parts.items() if device.process_index == 0} == set(parts.values())
