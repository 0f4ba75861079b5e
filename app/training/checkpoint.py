"""Checkpoints: everything that decides the future of a run, saved asynchronously with Orbax."""

from __future__ import annotations

import functools
import logging
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jaxtyping import Array, UInt32

from app.mesh.placement import abstract, gather_over_hosts, max_over_hosts
from app.update.optimizer import TrainState
from settings.errors import InputError

log = logging.getLogger(__name__)

MAX_REASON = 200
"""Characters of a library's account of what is wrong with a checkpoint; TensorStore's run to thousands."""

NOT_DAMAGE = (
    "RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED",
    "PERMISSION_DENIED", "UNAUTHENTICATED", "INTERNAL", "UNIMPLEMENTED",
)  # fmt: skip
"""How TensorStore's errors begin where the files may be whole; it raises ValueError for these, too."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands, beside its weights. All randomness follows from the run's seed and these."""

    step: int
    """Training steps done; the next step samples with this policy version."""
    position: int
    """Prompts taken from the data order so far, over all hosts and epochs."""
    fingerprints: Mapping[str, str]
    """What the run was started with: model, tokenizer and data."""
    wandb_id: str | None = None


class Checkpoints:
    """The checkpoints of one run directory, newest `keep` of them.

    Args:
        shapes: of the state that is saved and restored.
        shardings: where it lies; another mesh than the one that saved will do.
    """

    def __init__(self, directory: Path, *, keep: int, shapes: TrainState, shardings: TrainState):
        self._directory = directory.absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, cleanup_tmp_directories=True, enable_async_checkpointing=True
        )
        self._manager = ocp.CheckpointManager(self._directory, options=options)
        # The manager's own restore ends in a barrier, which a host that cannot read would never reach.
        alone = ocp.options.MultiprocessingOptions(
            primary_host=jax.process_index(), active_processes={jax.process_index()}
        )
        self._reader = ocp.Checkpointer(ocp.CompositeCheckpointHandler(), multiprocessing_options=alone)
        self._target = abstract(shapes, shardings)
        # Compiled now: a compilation in the middle of a run is an alarm.
        self._checksum = jax.jit(checksum).lower(self._target).compile()

    def save(self, state: TrainState, progress: Progress) -> None:
        """Copies the state off the devices and returns; writing goes on behind. All hosts call it together."""
        record = {**asdict(progress), "checksum": int(self._checksum(state))}
        self._manager.save(
            progress.step,
            args=ocp.args.Composite(state=ocp.args.StandardSave(state), progress=ocp.args.JsonSave(record)),
        )

    def restore(self, fingerprints: Mapping[str, str]) -> tuple[TrainState, Progress] | None:
        """The newest checkpoint that can be read; None where there is none at all.

        A damaged one is named in a warning, moved aside, and passed over for the one before it.

        Raises:
            InputError: the run was started with something else than `fingerprints`, hosts see different
                checkpoints, or there are checkpoints and none can be read. Nothing has been moved by then.
        """
        steps = self._agreed_steps()
        for number, step in enumerate(steps):
            record = self._read(step, progress=ocp.args.JsonRestore())
            if record is None:
                continue
            check_fingerprints(record["fingerprints"], fingerprints)
            state = self._read(step, state=ocp.args.StandardRestore(self._target))
            if state is None:
                continue
            if int(self._checksum(state)) != record.pop("checksum"):
                _warn(step, "its arrays are not those that were saved")
                continue
            self._move_aside(steps[:number])
            return state, Progress(**record)
        if steps:
            raise InputError(
                f"--resume: none of the checkpoints of steps {steps} in {self._directory} can be read. "
                "Start over with another run.name"
            )
        return None

    def _agreed_steps(self) -> list[int]:
        """The steps that there are checkpoints of, newest first.

        Raises:
            InputError: hosts see different ones.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        most = int(max_over_hosts(np.asarray(len(steps))))
        if most == 0:
            return []
        padded = np.full(most, -1, np.int64)
        padded[: len(steps)] = steps
        seen = gather_over_hosts(padded)
        if (seen != seen[0]).any():
            by_host = "; ".join(f"host {i}: {[int(step) for step in row if step >= 0]}" for i, row in enumerate(seen))
            raise InputError(
                f"run.dir: the hosts see checkpoints of different steps in {self._directory} ({by_host}); "
                "set run.dir to a folder that all hosts share"
            )
        return steps

    def _read(self, step: int, **item: Any) -> Any:
        """One item of a checkpoint; None on all hosts, with a warning, where any host finds it damaged."""
        value, reason = None, "another host cannot read it"
        try:
            value = self._reader.restore(self._directory / str(step), args=ocp.args.Composite(**item))[next(iter(item))]
        except Exception as error:
            if not is_damage(error):
                raise
            _silence_abandoned_reads()
            reason = str(error)
        if max_over_hosts(np.asarray(value is None)):
            _warn(step, reason)
            return None
        return value

    def _move_aside(self, steps: Sequence[int]) -> None:
        """Renames damaged checkpoints: Orbax saves no step that is not after the newest it sees."""
        if not steps:
            return
        for step in steps if jax.process_index() == 0 else ():
            aside = self._directory / f"damaged-{step}"
            shutil.rmtree(aside, ignore_errors=True)
            (self._directory / str(step)).rename(aside)
        multihost_utils.sync_global_devices("damaged checkpoints are moved aside")
        self._manager.reload()

    def finish(self) -> None:
        """Waits until the last save is on disk. Raises what went wrong with it."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._reader.close()
        self._manager.close()


def checksum(state: TrainState) -> UInt32[Array, ""]:
    """sum_i (2 i + 1) sum(32-bit words of array i) mod 2^32: exact, so the same on every mesh.

    TensorStore's compressed arrays carry none; a flipped bit in a weight would pass.
    """
    sums = [
        (2 * i + 1) * jnp.sum(jax.lax.bitcast_convert_type(x, jnp.uint32)) for i, x in enumerate(jax.tree.leaves(state))
    ]
    return jnp.sum(jnp.stack(sums))


def is_damage(error: Exception) -> bool:
    """Whether the files are to blame, rather than memory, the network, a permission or a bug.

    A good checkpoint that is taken for a damaged one is moved aside, and its steps are trained again.
    """
    # Orbax wraps whatever goes wrong while it reads an array, out of memory too, in a bare Exception.
    cause = error.__cause__ if type(error) is Exception else error
    return isinstance(cause, (ValueError, KeyError, FileNotFoundError)) and not str(cause).startswith(NOT_DAMAGE)


def _warn(step: int, reason: str) -> None:
    short = " ".join(reason.split())[:MAX_REASON]
    log.warning("checkpoint of step %d is damaged (%s); trying the one before", step, short)


@functools.cache
def _silence_abandoned_reads() -> None:
    """From now on drops what the other reads have to say after a failed restore, whenever they say it.

    Orbax reads all arrays at once and gives up at the first that fails. Each of the others then prints a
    traceback of its own, of the same damage or of an event loop that is gone.
    """
    before = sys.unraisablehook

    def report(unraisable: sys.UnraisableHookArgs) -> None:
        if not str(unraisable.exc_value).startswith(("Event loop is closed", "Encountered error while reading")):
            before(unraisable)

    sys.unraisablehook = report


def check_fingerprints(saved: Mapping[str, str], current: Mapping[str, str]) -> None:
    """Raises InputError naming what changed since the checkpoint was written."""
    changed = [name for name, value in current.items() if saved.get(name) != value]
    if changed:
        raise InputError(
            f"--resume: {' and '.join(changed)} changed since this run was started, so it cannot be continued as "
            "the same run. Restore the old files, or start another run.name"
        )
