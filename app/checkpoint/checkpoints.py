"""Checkpoints: everything needed to continue a run, saved asynchronously with Orbax."""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from app.checkpoint.process_0 import Process0Manager
from app.checkpoint.reading import read_on_all_hosts, read_verified, silence_abandoned_work
from app.checkpoint.retention import BestCheckpoint, LatestAndBestPolicy
from app.checkpoint.saved_arrays import checksums, compile_checksums
from app.checkpoint.train_progress import NetworkStates, OtherVersionError, ProgressRecord, TrainProgress, progress_path
from app.distributed.collectives import gather_json_over_hosts
from app.records.atomic_write import write_atomic
from app.records.identity import Identity, different_names
from app.records.run_directory import BEST_LINK
from app.runtime.model_spec import LORA_FINGERPRINT, QUANTIZER_FINGERPRINT
from settings.checks.resumed_settings import OPTION, is_in
from settings.errors import InputError

log = logging.getLogger(__name__)

MIN_SLICE_BYTES = 64 << 20
"""Replicated arrays of at least this size are written in slices, one per replica; adapters are smaller."""

READABLE_FINGERPRINTS = (LORA_FINGERPRINT, QUANTIZER_FINGERPRINT)
"""Fingerprints whose values are readable text, shown in error messages."""


class Checkpoints:
    """The checkpoints of one run directory, kept according to `policy`, and a link `best` to the best one.

    Which one is the best follows from the evaluation in each checkpoint's `TrainProgress`.

    Args:
        layout: maps each network to the shapes and shardings of its state; the mesh may differ from the one on which
            it was saved.
        is_seen_by_all: whether all hosts see the directory; otherwise only process 0 has the checkpoints, and the other
            hosts have copies of the progress records.
        are_devices_shared: whether other threads run multi-device programs on some of this host's devices.
    """

    def __init__(
        self,
        directory: Path,
        *,
        policy: LatestAndBestPolicy,
        layout: NetworkStates,
        is_seen_by_all: bool = True,
        are_devices_shared: bool = False,
    ):
        self._directory = directory.absolute()
        self._policy, self._is_seen_by_all = policy, is_seen_by_all
        self._directory.mkdir(parents=True, exist_ok=True)
        # With explicit processes, Orbax waits for them without a program on all devices, but at most 5 minutes.
        named = set(range(jax.process_count())) if are_devices_shared else None
        if not is_seen_by_all:
            named = {0}
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy,
            cleanup_tmp_directories=True,
            enable_async_checkpointing=True,
            create=False,
            multiprocessing_options=ocp.options.MultiprocessingOptions(active_processes=named),
        )
        self._target = layout
        if is_seen_by_all:
            self._manager = ocp.CheckpointManager(self._directory, options=options)
        else:
            self._manager = Process0Manager(self._directory, options, self._target)
        disable_slicing_of_small_arrays()
        silence_abandoned_work()
        # Compile here: a compilation during a step would be reported as an anomaly.
        compile_checksums(self._target)

    def save(self, state: NetworkStates, progress: TrainProgress) -> None:
        """Copies the state from the devices and writes it in the background. All hosts must call it together."""
        self._manager.wait_until_finished()
        # Saving deletes superseded checkpoints, and the link must not point to one of them.
        self.update_best_link()
        record = ProgressRecord(progress, checksums(state)).to_json()
        self.record_evaluations(progress)
        self._manager.save(
            progress.step,
            args=ocp.args.Composite(state=ocp.args.StandardSave(state), progress=ocp.args.JsonSave(record)),
        )

    def has_step(self, step: int) -> bool:
        """Returns whether a checkpoint of a step exists or is being written; the same on all hosts."""
        return step in self._manager.all_steps()

    def record_evaluations(self, progress: TrainProgress) -> None:
        """Records this step's evaluation, and the initial evaluation as step 0, to find the best checkpoint."""
        self._policy.record_evaluation(progress.step, progress.evaluation)
        self._policy.record_evaluation(0, progress.initial_evaluation)

    def update_progress(self, progress: TrainProgress) -> None:
        """Replaces the progress record in its step's checkpoint on disk. All hosts must call it together."""
        self.record_evaluations(progress)
        if jax.process_index() == 0:
            folder = self._directory / str(progress.step)
            record = replace(ProgressRecord.read(folder), progress=progress)
            write_atomic(progress_path(folder), json.dumps(record.to_json()).encode())
        self.update_best_link()

    def is_best(self, progress: TrainProgress) -> bool:
        """Returns whether a checkpoint with this progress would be the best so far."""
        self.record_evaluations(progress)
        return self._policy.best_step((*self._manager.all_steps(), progress.step)) == progress.step

    @property
    def best(self) -> BestCheckpoint | None:
        """The best checkpoint, or step 0 (before training) if none is better; None without evaluations or a metric."""
        return self._policy.best_checkpoint(self._manager.all_steps())

    def restore(
        self, check: Callable[[TrainProgress], None], *, replace_damaged: Callable[[int], bool] = lambda _: False
    ) -> tuple[NetworkStates, TrainProgress] | None:
        """Restores and returns the newest readable state and its progress; returns None if there is no checkpoint.

        Damaged checkpoints are reported in a warning, and renamed after another one has been restored.

        Args:
            check: raises InputError if the run cannot be continued from this progress.
            replace_damaged: called on all hosts with the step of a damaged checkpoint; returns True if it has been
                replaced by a copy, which is then read.

        Raises:
            InputError: `check` raised it, hosts see different checkpoints, another version of this program wrote
                the checkpoints, or none of them can be read.
        """
        steps, records = self._common_steps(), dict[int, ProgressRecord]()
        for step in steps:
            record = self._read_record(step)
            if record is None and not records and replace_damaged(step):
                record = self._read_record(step)
            if record is not None:
                records[step] = record
                self.record_evaluations(record.progress)
        damaged = [step for step in steps if step not in records]
        for step, record in records.items():
            self.record_evaluations(record.progress)
            check(record.progress)
            state, reason = self._read_state(step, record)
            # The copy may be of another save of this step, with its own checksums.
            if state is None and replace_damaged(step) and (copied := self._read_record(step)) is not None:
                record = copied
                self.record_evaluations(record.progress)
                check(record.progress)
                state, reason = self._read_state(step, record)
            if state is not None:
                self._move_aside(damaged)
                self.update_best_link()
                return state, record.progress
            _warn_damaged(step, reason)
            damaged.append(step)
        if steps:
            raise InputError(
                f"--resume: no checkpoint in {self._directory} can be read (steps {steps}); restore one from a copy, "
                "or start over with another run.name"
            )
        return None

    def _read_record(self, step: int) -> ProgressRecord | None:
        """Returns the record of a step on all hosts; None, with a warning, if it is damaged on any of them."""
        folder = self._directory / str(step)
        try:
            record, reason = read_on_all_hosts(functools.partial(ProgressRecord.read, folder))
        except OtherVersionError as error:
            raise InputError(f"--resume: {folder} {error}, or start a run with another run.name") from error
        if record is None:
            _warn_damaged(step, reason)
        return record

    def _read_state(self, step: int, record: ProgressRecord) -> tuple[NetworkStates | None, str]:
        folder = self._directory / str(step)
        return read_verified(folder, record.checksums, self._target, is_seen_by_all=self._is_seen_by_all)

    def _common_steps(self) -> list[int]:
        """Returns the steps that have checkpoints, newest first.

        Raises:
            InputError: hosts see different steps.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        seen = gather_json_over_hosts(steps)
        if any(host != seen[0] for host in seen):
            by_host = "; ".join(f"host {i}: {host}" for i, host in enumerate(seen))
            raise InputError(
                f"run.dir: hosts see checkpoints of different steps in {self._directory} ({by_host}); start again "
                "once all hosts see the same files there"
            )
        return steps

    def _move_aside(self, damaged: Sequence[int]) -> None:
        """Renames damaged checkpoints, because Orbax saves only steps later than the newest one it finds."""
        if damaged:
            for step in damaged if jax.process_index() == 0 else ():
                aside = self._directory / f"damaged-{step}"
                shutil.rmtree(aside, ignore_errors=True)
                (self._directory / str(step)).rename(aside)
            multihost_utils.sync_global_devices("damaged checkpoints are renamed")
            self._manager.reload()

    def update_best_link(self) -> None:
        """Points the link to the best checkpoint on disk, or removes it if there is none."""
        if jax.process_index() != 0:
            return
        # A checkpoint directory is renamed to its final name once all of it is written.
        written = [int(child.name) for child in self._directory.iterdir() if child.name.isdigit()]
        link, best = self._directory / BEST_LINK, self._policy.best_step(written)
        try:
            if best is None and link.is_symlink():
                link.unlink()
            elif best is not None and not (link.is_symlink() and os.readlink(link) == str(best)):
                new = link.with_name(f".{BEST_LINK}")
                new.unlink(missing_ok=True)
                new.symlink_to(str(best))
                new.replace(link)
        # A folder with the link's name exists, or the file system has no links.
        except OSError as error:
            _warn_of_link_once(str(error))

    def finish(self) -> None:
        """Waits until the last save is on disk, or raises its error; then deletes a superseded best checkpoint."""
        self._manager.wait_until_finished()
        self.update_best_link()
        superseded = self._policy.superseded(self._manager.all_steps())
        if superseded is not None:
            self._manager.delete(superseded)

    def close(self) -> None:
        """Waits for a save. Its error is only logged: it must not replace the error that ends a run before `finish`."""
        try:
            self._manager.close()
        # Every exception, because Orbax raises TensorStore's errors as ValueError or wraps them in a bare Exception.
        except Exception as error:
            log.warning("the last checkpoint is not saved: %s", error)


@functools.cache
def disable_slicing_of_small_arrays() -> None:
    """Makes Orbax write a replicated array from one device, unless it is large.

    By default, Orbax slices it over the replicas and compiles a program per slice in the step after the first save.
    """
    handler = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=MIN_SLICE_BYTES)
    # Registering a handler again logs a warning.
    orbax_log = logging.getLogger("absl")
    level = orbax_log.level
    orbax_log.setLevel(logging.ERROR)
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
    orbax_log.setLevel(level)


def _warn_damaged(step: int, reason: str) -> None:
    log.warning("skipping the checkpoint of step %d: damaged (%s)", step, reason)


@functools.cache
def _warn_of_link_once(reason: str) -> None:
    log.warning("checkpoints: cannot create the link to the best one (%s); the summary shows its step", reason)


def check_fingerprints(
    saved: Identity,
    current: Identity,
    *,
    changeable: Mapping[str, Sequence[str]] = MappingProxyType({}),
    allowed: Collection[str] = (),
) -> None:
    """Raises InputError with the names of the fingerprints that have changed since the checkpoint was written.

    Args:
        changeable: maps a fingerprint to settings and sections; it may change if one of these is in `allowed`.
        allowed: the settings and sections that the user allows to change.
    """
    ways = {name: changeable.get(name, ()) for name in different_names(saved, current)}
    changed = [name for name, settings in ways.items() if not any(is_in(setting, allowed) for setting in settings)]
    if changed:
        names = [
            f"{name} ({saved.get(name, 'none')} -> {current.get(name, 'none')})"
            if name in READABLE_FINGERPRINTS
            else name
            for name in changed
        ]
        options = " ".join(f"{OPTION} {ways[name][0]}" for name in changed if ways[name])
        way_out = f", or continue with the new ones with {options}" if all(ways[name] for name in changed) else ""
        raise InputError(
            f"--resume: {' and '.join(names)} changed since this run was started, so it cannot be continued as the "
            "same run. Restore the old files (the old revision of a hub model, the old version of a package), or "
            f"start a run with another run.name{way_out}"
        )
