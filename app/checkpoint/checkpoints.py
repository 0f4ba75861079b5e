"""Checkpoints: everything that decides the future of a run, saved asynchronously with Orbax."""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jaxtyping import Array, UInt32

from app.checkpoint.retention import BestCheckpoint, LatestAndBestPolicy
from app.distributed.collectives import gather_over_hosts, max_over_hosts
from app.mesh.placement import abstract_arrays
from app.records.atomic_write import write_atomic
from app.runtime.model_spec import LORA_FINGERPRINT, QUANTIZER_FINGERPRINT
from settings.errors import InputError

log = logging.getLogger(__name__)

BEST_LINK = "best"
"""A relative link beside the checkpoints, to the best one."""

CHECKSUMS = "checksums"
"""Beside the progress of a checkpoint: path of an array -> its checksum."""

OLDER_VERSION_ERROR = "was written by an older version; finish that run with that version, or start another run.name"
"""Of a checkpoint that has no checksum of each array."""

MIN_SLICE_BYTES = 64 << 20
"""Of an array that several devices hold and write together; adapters are smaller."""

CHECKSUM_MISMATCH = "its arrays are not those that were saved"

READABLE_FINGERPRINTS = (LORA_FINGERPRINT, QUANTIZER_FINGERPRINT)
"""Fingerprints that say something to a person."""

MAX_REASON_CHARS = 200
"""Characters of a library's account of what is wrong with a checkpoint; TensorStore's run to thousands."""

NON_DAMAGE_PREFIXES = (
    "RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED",
    "PERMISSION_DENIED", "UNAUTHENTICATED", "INTERNAL", "UNIMPLEMENTED",
)  # fmt: skip
"""How TensorStore's errors begin where the files may be whole; it raises ValueError for these, too."""


@dataclass(frozen=True)
class TrainProgress:
    """Where a run stands, beside its weights. All randomness follows from the run's seed and these."""

    step: int
    """Training steps done; the next step samples with this policy version."""
    position: int
    """Prompts taken from the data order so far, over all hosts and epochs."""
    fingerprints: Mapping[str, str]
    """What the run was started with: model, tokenizer and data."""
    wandb_id: str | None = None
    kl_coef: float | None = None
    """Weight of the KL in the next step's rewards, where it is adapted; None in older checkpoints."""
    lengths: Mapping[str, float] | None = None
    """Prompt -> mean length of its samples when it came last, which decides how the next are scheduled."""
    evaluation: Mapping[str, float | None] | None = None
    """Metrics under `eval/` of this step; None where there was no evaluation."""
    unevaluated: Mapping[str, Any] | None = None
    """The step's other metrics, where its evaluation was stopped and is still to come."""

    def after_step(self, step: int, *, num_prompts: int, **changed: Any) -> TrainProgress:
        """Where the run stands when a step has taken so many prompts more, before an evaluation."""
        return replace(self, step=step, position=self.position + num_prompts, evaluation=None, **changed)

    def with_evaluation(self, metrics: Mapping[str, float | None]) -> TrainProgress:
        """Where it stands behind an evaluation of the step, with these metrics."""
        evaluation = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        return replace(self, evaluation=evaluation or None, unevaluated=None)


class Checkpoints:
    """The checkpoints of one run directory: those that `policy` keeps, and a link `best` to the best of them.

    Which is the best, the checkpoints themselves say, each in its `Progress`; the link follows.

    Args:
        shapes: of the arrays that are saved and restored, in any tree.
        shardings: where it lies; another mesh than the one that saved will do.
    """

    def __init__(self, directory: Path, *, policy: LatestAndBestPolicy, shapes: Any, shardings: Any):
        self._directory = directory.absolute()
        self._policy = policy
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy, cleanup_tmp_directories=True, enable_async_checkpointing=True
        )
        self._manager = ocp.CheckpointManager(self._directory, options=options)
        disable_slicing_of_small_arrays()
        self._reader = open_reader(ocp.CompositeCheckpointHandler())
        self._target = abstract_arrays(shapes, shardings)
        # Compiled now: a compilation in the middle of a run is an alarm.
        self._checksums = jax.jit(checksums).lower(self._target).compile()

    def save(self, state: Any, progress: TrainProgress) -> None:
        """Copies the state off the devices and returns; writing goes on behind. All hosts call it together."""
        self._manager.wait_until_finished()
        # What may be deleted from now on must not be what the link names.
        self.update_best_link()
        record = {**asdict(progress), CHECKSUMS: fetch_checksums(self._checksums(state))}
        self._policy.record_evaluation(progress.step, progress.evaluation)
        self._manager.save(
            progress.step,
            args=ocp.args.Composite(state=ocp.args.StandardSave(state), progress=ocp.args.JsonSave(record)),
        )

    def has_step(self, step: int) -> bool:
        """Whether there is a checkpoint of a step, or one is being written. The same on every host."""
        return step in self._manager.all_steps()

    def update_progress(self, progress: TrainProgress) -> None:
        """Says something else beside the arrays of a step that is on disk. All hosts call it together."""
        self._policy.record_evaluation(progress.step, progress.evaluation)
        if jax.process_index() == 0:
            path = self._directory / str(progress.step) / "progress" / "metadata"
            record = json.loads(path.read_text()) | asdict(progress)
            write_atomic(path, json.dumps(record).encode())
        self.update_best_link()

    def is_best(self, progress: TrainProgress) -> bool:
        """Whether a checkpoint of this step would be the best one so far."""
        return self._policy.is_better(progress.evaluation, self._manager.all_steps())

    @property
    def best(self) -> BestCheckpoint | None:
        """The best checkpoint; None where none was evaluated, or the policy does not ask."""
        return self._policy.best_checkpoint(self._manager.all_steps())

    def restore(self, fingerprints: Mapping[str, str]) -> tuple[Any, TrainProgress] | None:
        """The newest checkpoint that can be read; None where there is none at all.

        The best one, too, is read, so that no damaged one stands in the way of a better. A damaged checkpoint is
        named in a warning, moved aside, and passed over.

        Raises:
            InputError: the run was started with something else than `fingerprints`, hosts see different
                checkpoints, an older version wrote them, or there are some and none can be read. Nothing has been
                moved by then.
        """
        steps = self._common_steps()
        records = {step: self._read_item(step, progress=ocp.args.JsonRestore()) for step in steps}
        sound = {step: record for step, record in records.items() if record is not None}
        for step, record in sound.items():
            if CHECKSUMS not in record:
                raise InputError(f"--resume: {self._directory / str(step)} {OLDER_VERSION_ERROR}")
            check_fingerprints(record["fingerprints"], fingerprints)
            self._policy.record_evaluation(step, record.get("evaluation"))
        while sound:
            state = self._restore_newest_and_best(sound)
            if state is not None:
                self._move_damaged_aside([step for step in steps if step not in sound])
                self.update_best_link()
                return state, progress_from_record(sound[max(sound)])
        if steps:
            raise InputError(
                f"--resume: none of the checkpoints of steps {steps} in {self._directory} can be read. "
                "Start over with another run.name"
            )
        return None

    def _restore_newest_and_best(self, sound: dict[int, Any]) -> Any | None:
        """The newest state, the best one being readable, too; else None, with the unreadable one gone from `sound`."""
        newest, best = max(sound), self._policy.best_step(sound)
        state = None
        # The newest last: two states at once may be more than the devices hold.
        for step in (newest,) if best in (None, newest) else (best, newest):
            state = None
            state = self._read_item(step, state=ocp.args.StandardRestore(self._target))
            if state is not None and fetch_checksums(self._checksums(state)) != sound[step][CHECKSUMS]:
                _warn_damaged(step, CHECKSUM_MISMATCH)
                state = None
            if state is None:
                del sound[step]
                return None
        return state

    def _common_steps(self) -> list[int]:
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

    def _read_item(self, step: int, **item: Any) -> Any:
        """One item of a checkpoint; None on all hosts, with a warning, where any host finds it damaged."""
        value, reason = read_item(self._reader, self._directory / str(step), **item)
        if value is None:
            _warn_damaged(step, reason)
        return value

    def _move_damaged_aside(self, steps: Sequence[int]) -> None:
        """Renames damaged checkpoints: Orbax saves no step that is not after the newest it sees."""
        if not steps:
            return
        for step in steps if jax.process_index() == 0 else ():
            aside = self._directory / f"damaged-{step}"
            shutil.rmtree(aside, ignore_errors=True)
            (self._directory / str(step)).rename(aside)
        multihost_utils.sync_global_devices("damaged checkpoints are moved aside")
        self._manager.reload()

    def update_best_link(self) -> None:
        """Lets the link name the best checkpoint on disk; cheap where it already does."""
        if jax.process_index() != 0:
            return
        # A directory has its final name only once all of it is written.
        written = [step for step in self._manager.all_steps() if (self._directory / str(step)).is_dir()]
        best = self._policy.best_step(written)
        try:
            set_symlink(self._directory / BEST_LINK, None if best is None else str(best))
        except OSError as error:
            _warn_of_link(str(error))

    def finish(self) -> None:
        """Waits until the last save is on disk. Raises what went wrong with it."""
        self._manager.wait_until_finished()
        self.update_best_link()
        superseded = self._policy.superseded(self._manager.all_steps())
        if superseded is not None:
            self._manager.delete(superseded)

    def close(self) -> None:
        self._reader.close()
        self._manager.close()


@functools.cache
def disable_slicing_of_small_arrays() -> None:
    """An array that several devices hold is written by one of them, unless it is large.

    By default Orbax cuts it in as many slices, and compiles a program for each in the step after the first save.
    """
    handler = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=MIN_SLICE_BYTES)
    # Which warns of what is done here on purpose.
    orbax_log = logging.getLogger("absl")
    level = orbax_log.level
    orbax_log.setLevel(logging.ERROR)
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
    orbax_log.setLevel(level)


def open_reader(handler: ocp.CompositeCheckpointHandler) -> ocp.Checkpointer:
    """Reads on this host alone: a restore of all ends in a barrier, which a host that cannot read never reaches."""
    alone = ocp.options.MultiprocessingOptions(primary_host=jax.process_index(), active_processes={jax.process_index()})
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def read_item(reader: ocp.Checkpointer, folder: Path, **item: Any) -> tuple[Any, str]:
    """One item of the checkpoint in a folder, and ""; None on all hosts where any finds it damaged, and why."""
    value, reason = None, "another host cannot read it"
    try:
        value = reader.restore(folder, args=ocp.args.Composite(**item))[next(iter(item))]
    except Exception as error:
        if not is_damage(error):
            raise
        _silence_abandoned_reads()
        reason = one_line_reason(error)
    return (None, reason) if max_over_hosts(np.asarray(value is None)) else (value, "")


def progress_from_record(record: Mapping[str, Any]) -> TrainProgress:
    """What a checkpoint says of its run, without what it says of its arrays."""
    return TrainProgress(**{name: value for name, value in record.items() if name != CHECKSUMS})


def checksums(state: Any) -> dict[str, UInt32[Array, ""]]:
    """Path of an array -> its checksum."""
    return {array_path(keys): checksum(x) for keys, x in jax.tree.leaves_with_path(state)}


def array_path(keys: Sequence[Any]) -> str:
    """An array's place in a state, as a checkpoint spells it."""
    return "/".join(jax.tree_util.keystr((key,), simple=True) for key in keys)


def checksum(x: Array) -> UInt32[Array, ""]:
    """Sum of the 32-bit words mod 2^32: exact, so the same on every mesh.

    TensorStore's compressed arrays carry none; a flipped bit in a weight would pass.
    """
    return jnp.sum(jax.lax.bitcast_convert_type(x, jnp.uint32), dtype=jnp.uint32)


def fetch_checksums(sums: Mapping[str, Array]) -> dict[str, int]:
    """Fetched, as a checkpoint has them."""
    return {path: int(value) for path, value in jax.device_get(sums).items()}


def is_damage(error: Exception) -> bool:
    """Whether the files are to blame, rather than memory, the network, a permission or a bug.

    A good checkpoint that is taken for a damaged one is moved aside, and its steps are trained again.
    """
    # Orbax wraps whatever goes wrong while it reads an array, out of memory too, in a bare Exception.
    cause = error.__cause__ if type(error) is Exception else error
    return isinstance(cause, (ValueError, KeyError, FileNotFoundError)) and not str(cause).startswith(
        NON_DAMAGE_PREFIXES
    )


def _warn_damaged(step: int, reason: str) -> None:
    log.warning("checkpoint of step %d is damaged (%s); passing it over", step, reason)


def one_line_reason(error: Exception) -> str:
    """What a library says of a checkpoint, in one line."""
    return " ".join(str(error).split())[:MAX_REASON_CHARS]


def set_symlink(link: Path, target: str | None) -> None:
    """Makes a symbolic link name a neighbour, at once; removes it where the target is None.

    Raises:
        OSError: something else has the link's name, or the file system has no links.
    """
    if target is None:
        if link.is_symlink():
            link.unlink()
        return
    if link.is_symlink() and os.readlink(link) == target:
        return
    new = link.with_name(f".{link.name}")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.replace(link)


@functools.cache
def _warn_of_link(reason: str) -> None:
    log.warning("checkpoints: no link to the best one (%s); the summary names its step", reason)


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
    changed = [name for name in {**saved, **current} if saved.get(name) != current.get(name)]
    if changed:
        names = [
            f"{name} ({saved.get(name, 'none')} -> {current.get(name, 'none')})"
            if name in READABLE_FINGERPRINTS
            else name
            for name in changed
        ]
        raise InputError(
            f"--resume: {' and '.join(names)} changed since this run was started, so it cannot be continued as the "
            "same run. Restore the old files (of a hub id the old revision, of a package the old version), or start "
            "another run.name"
        )
