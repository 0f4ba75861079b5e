"""A policy that a run has saved: what evaluation, export and replay start from."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from app.checkpoint.checkpoints import (
    BEST_LINK,
    CHECKSUM_MISMATCH,
    CHECKSUMS,
    OLDER_VERSION_ERROR,
    TrainProgress,
    array_path,
    checksum,
    checksums,
    fetch_checksums,
    open_reader,
    progress_from_record,
    read_item,
)
from app.mesh.placement import abstract_arrays
from app.model.decoder import Params
from app.records.run_directory import RunDirectory
from app.records.versions import NOT_INSTALLED, QUANTIZATION_PACKAGE
from app.runtime.model_spec import LORA_FINGERPRINT, QUANTIZER_FINGERPRINT, ModelSpec
from app.update.optimizer import TrainState
from settings.errors import InputError

OPTION = "--checkpoint"

_checksum = jax.jit(checksum)


@dataclass(frozen=True)
class PolicyCheckpoint:
    """A checkpoint that has been looked at but not yet read: no device has been touched."""

    path: Path
    """`<run>/checkpoints/<step>`."""
    progress: TrainProgress
    checksums: Mapping[str, int]
    """Of every array of the checkpoint, by its path in it."""

    @classmethod
    def open(cls, path: Path) -> PolicyCheckpoint:
        """The checkpoint in a folder, through a link such as `best`, or the newest of a run's.

        Raises:
            InputError: there is none, or it cannot be read.
        """
        folder = _find_checkpoint(path)
        record_file = folder / "progress" / "metadata"
        try:
            record = json.loads(record_file.read_text(encoding="utf-8"))
            if CHECKSUMS not in record and {"step", "fingerprints"} <= record.keys():
                raise InputError(f"{OPTION}: {folder} {OLDER_VERSION_ERROR}")
            sums = {name: int(value) for name, value in record[CHECKSUMS].items()}
            return cls(folder, progress_from_record(record), sums)
        except InputError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{OPTION}: {folder} is damaged, or no checkpoint of this program ({type(error).__name__}: {error}); "
                f"choose another one of {folder.parent}"
            ) from error

    @property
    def step(self) -> int:
        return self.progress.step

    @property
    def run(self) -> RunDirectory:
        """Whose it is."""
        return RunDirectory(self.path.parent.parent)

    def check_compatible(self, model: ModelSpec, *, needs_quantizer: bool = True) -> None:
        """Raises InputError where it was trained from another model, with another tokenizer or with other adapters.

        Args:
            runs: False where only its arrays are read, and nobody asks for the codes that its adapters learned beside.
        """
        saved, path = self.progress.fingerprints, model.files.path
        held, asked = saved.get(LORA_FINGERPRINT), model.adapter_fingerprints.get(LORA_FINGERPRINT)
        if held != asked:
            raise InputError(
                f"{OPTION}: {self.path} holds {f'adapters of {held}' if held else 'all weights and no adapters'}, and "
                f"model.lora asks for {asked or 'none'}; leave --config away to take the run's own settings, or set "
                f"model.lora to what {self.run.settings_path} names"
            )
        made_by, here = saved.get(QUANTIZER_FINGERPRINT), model.adapter_fingerprints.get(QUANTIZER_FINGERPRINT)
        if needs_quantizer and made_by is not None and here not in (made_by, NOT_INSTALLED):
            raise InputError(
                f"{OPTION}: the adapters of {self.path} learned beside codes that {QUANTIZATION_PACKAGE} {made_by} "
                f"had found, "
                f"and {here} is here; pip install '{QUANTIZATION_PACKAGE}=={made_by}'"
            )
        for what, fingerprint in (("model", model.files.fingerprint), ("tokenizer", model.tokenizer.fingerprint)):
            if saved.get(what) != fingerprint:
                raise InputError(
                    f"{OPTION}: {self.path} was trained from another {what} than that of model.path ({path}); leave "
                    f"--config away to take the run's own settings, or set model.path to what "
                    f"{self.run.settings_path} names"
                )

    def restore_params(self, shapes: Params, shardings: Params) -> Params:
        """The policy's trained arrays, on their shardings. All hosts call it together.

        Raises:
            InputError: they are damaged.
        """
        # Beside a critic each network has a branch of its own; see `RunState.arrays`.
        below = ("policy",) if self.has_critic else ()
        item: Any = {"params": abstract_arrays(shapes, shardings)}
        for key in reversed(below):
            item = {key: item}
        return functools.reduce(operator.getitem, (*below, "params"), self._restore_item(item))

    @property
    def has_critic(self) -> bool:
        """Whether the state has a policy and a critic, or is a policy's alone."""
        return any(name.startswith("policy/") for name in self.checksums)

    def restore_states(self, shapes: Mapping[str, TrainState], shardings: Mapping[str, TrainState]) -> dict[str, Any]:
        """Of each network that is asked for and is there, all that its optimizer changes. All hosts call it together.

        Args:
            shapes: by name, `policy` and maybe `critic`.

        Raises:
            InputError: they are damaged, or those of another kind of network.
        """
        names = [name for name in shapes if self.has_critic or name == "policy"]
        targets = {name: abstract_arrays(shapes[name], shardings[name]) for name in names}
        item = targets if self.has_critic else targets["policy"]
        wanted, there = set(jax.eval_shape(checksums, item)), self.checksums.keys()
        if not wanted <= there:
            name = min(wanted - there)
            raise InputError(
                f"{OPTION}: {self.path} has no array {name}: what was trained there is not what these settings train; "
                f"leave --config away to take the run's own settings, or compare with {self.run.settings_path}"
            )
        found = self._restore_item(item)
        return dict(found) if self.has_critic else {"policy": found}

    def _restore_item(self, item: Any) -> Any:
        """A part of the state, in any tree that it has."""
        args = ocp.args.PyTreeRestore(
            item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
        )
        handler = ocp.CompositeCheckpointHandler(state=ocp.PyTreeCheckpointHandler())
        with closing(open_reader(handler)) as reader:
            found, reason = read_item(reader, self.path, state=args)
        # Every host has it or none.
        if found is not None:
            # A program for each: one of all would hold a copy of every array at once, as the integers that it adds up.
            # One after the other, too: sums over devices that wait for each other at once can starve a CPU's threads.
            arrays = jax.tree.leaves_with_path(found)
            sums = fetch_checksums({array_path(keys): _checksum(x).block_until_ready() for keys, x in arrays})
            reason = "" if sums == {name: self.checksums.get(name) for name in sums} else CHECKSUM_MISMATCH
        if reason:
            raise InputError(f"{OPTION}: {self.path} is damaged ({reason}); choose another one of {self.path.parent}")
        return found


def _find_checkpoint(path: Path) -> Path:
    """The checkpoint's own folder."""
    path = path.expanduser()
    if not path.is_dir():
        hint = "; nothing was evaluated in that run" if path.name == BEST_LINK and path.parent.is_dir() else ""
        raise InputError(f"{OPTION}: there is no folder {path}{hint}; give <run>/checkpoints/<step>, or a run's folder")
    folder = path.resolve()
    if folder.name.isdigit() and (folder / "state").is_dir():
        return folder
    run = RunDirectory(folder.parent if folder.name == "checkpoints" else folder)
    if not run.checkpoint_steps:
        raise InputError(f"{OPTION}: {path} holds no checkpoint; give <run>/checkpoints/<step>, or a run's folder")
    return run.checkpoints_dir / str(max(run.checkpoint_steps))
