"""Checkpoints: everything that decides the future of a run, saved asynchronously with Orbax."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from app.update.optimizer import TrainState
from settings.errors import InputError

log = logging.getLogger(__name__)


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
    """The checkpoints of one run directory, newest `keep` of them."""

    def __init__(self, directory: Path, *, keep: int):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, cleanup_tmp_directories=True, enable_async_checkpointing=True
        )
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    def save(self, state: TrainState, progress: Progress) -> None:
        """Copies the state off the devices and returns; writing goes on behind. All hosts call it together."""
        self._manager.save(
            progress.step,
            args=ocp.args.Composite(state=ocp.args.StandardSave(state), progress=ocp.args.JsonSave(asdict(progress))),
        )

    @property
    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def restore(self, shapes: TrainState, shardings: TrainState) -> tuple[TrainState, Progress] | None:
        """The newest checkpoint that can be read, on these shardings; None where there is none at all.

        A damaged one is named in a warning and passed over for the one before it.

        Raises:
            InputError: there are checkpoints and none can be read.
        """
        target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
        steps = sorted(self._manager.all_steps(), reverse=True)
        for step in steps:
            try:
                restored = self._manager.restore(
                    step,
                    args=ocp.args.Composite(state=ocp.args.StandardRestore(target), progress=ocp.args.JsonRestore()),
                )
            # Orbax and TensorStore report damage as any of these; what it was stands in the warning.
            except (ValueError, KeyError, OSError, TypeError) as error:
                log.warning("checkpoint of step %d cannot be read (%s); trying the one before", step, error)
                continue
            return restored["state"], Progress(**restored["progress"])
        if steps:
            raise InputError(
                f"checkpoints of steps {steps} cannot be read; they are damaged or belong to another model. "
                "Start over with another run.name"
            )
        return None

    def finish(self) -> None:
        """Waits until the last save is on disk. Raises what went wrong with it."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()


def check_fingerprints(saved: Mapping[str, str], current: Mapping[str, str]) -> None:
    """Raises InputError naming what changed since the checkpoint was written."""
    changed = [name for name, value in current.items() if saved.get(name) != value]
    if changed:
        raise InputError(
            f"--resume: {' and '.join(changed)} changed since this run was started, so it cannot be continued as "
            "the same run. Restore the old files, or start another run.name"
        )
