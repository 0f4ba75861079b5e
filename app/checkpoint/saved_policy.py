"""Loads a saved policy and its critic, from which rollout, scoring, evaluation, export and replay start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import Mesh

from app.checkpoint.reading import read_verified
from app.checkpoint.saved_arrays import array_path
from app.checkpoint.train_progress import (
    NetworkStates,
    OtherVersionError,
    ProgressRecord,
    TrainProgress,
    progress_path,
)
from app.distributed.collectives import any_host
from app.mesh.placement import abstract_arrays
from app.model.decode_weights import DecodeWeights
from app.model.decoder import Params
from app.records.identity import CHECKPOINT, MODEL, PROMPTS, TOKENIZER, prompts_digest
from app.records.run_directory import RunDirectory
from app.records.sample import Prompt
from app.records.versions import NOT_INSTALLED, QUANTIZATION_PACKAGE
from app.runtime.environments import environment_facts, prepare_turns
from app.runtime.model_spec import (
    LORA_FINGERPRINT,
    QUANTIZER_FINGERPRINT,
    ModelSpec,
    NetworkSpec,
    check_context_length,
    read_model_spec,
)
from app.runtime.pinned_revisions import pin_revisions
from app.runtime.session import Session
from settings import Settings
from settings.errors import InputError

OPTION = "--checkpoint"


@dataclass(frozen=True)
class PolicyCheckpoint:
    """A checkpoint whose arrays are read on request. Opening it reads only metadata, and uses no device."""

    path: Path
    """The checkpoint's folder, `<run>/checkpoints/<step>`."""
    progress: TrainProgress
    checksums: Mapping[str, int]
    """Maps the path of each array in the checkpoint to its checksum."""

    @classmethod
    def open(cls, path: Path) -> PolicyCheckpoint:
        """Opens the checkpoint at `path` (or at a link such as `best`), or the newest one if `path` is a run's folder.

        Raises:
            InputError: there is no checkpoint, or it cannot be read.
        """
        folder = _find_checkpoint(path)
        try:
            record = ProgressRecord.read(folder)
        except OtherVersionError as error:
            raise InputError(f"{OPTION}: {folder} {error}, or choose another checkpoint") from error
        except (OSError, ValueError) as error:
            raise InputError(
                f"{OPTION}: {folder} cannot be read as a checkpoint of this program ({error}); "
                f"choose another one in {folder.parent}"
            ) from error
        return cls(folder, record.progress, record.checksums)

    @property
    def step(self) -> int:
        return self.progress.step

    def describe(self) -> str:
        """Returns the step and a digest of all arrays as text, to identify the weights."""
        digest = hashlib.sha256(json.dumps(dict(self.checksums), sort_keys=True).encode()).hexdigest()
        return f"step {self.step}, {digest[:16]}"

    @property
    def run(self) -> RunDirectory:
        """The run that wrote the checkpoint."""
        return RunDirectory(self.path.parent.parent)

    def check_compatible(self, model: ModelSpec, *, needs_quantizer: bool = True, needs_tokenizer: bool = True) -> None:
        """Raises InputError if the checkpoint was trained with another model, tokenizer or adapter configuration.

        Args:
            needs_quantizer: False if the quantized weights that the adapters were trained with are not loaded.
            needs_tokenizer: False if token ids are used without a tokenizer.
        """
        saved, path = self.progress.fingerprints, model.files.path
        there, wanted = saved.get(LORA_FINGERPRINT), model.adapter_fingerprints.get(LORA_FINGERPRINT)
        if there != wanted:
            raise InputError(
                f"{OPTION}: {self.path} contains {f'adapters of {there}' if there else 'all weights and no adapters'}, "
                f"but model.lora requests {wanted or 'none'}; omit --config to use the run's own settings, or set "
                f"model.lora as in {self.run.settings_path}"
            )
        made_by, here = saved.get(QUANTIZER_FINGERPRINT), model.adapter_fingerprints.get(QUANTIZER_FINGERPRINT)
        if needs_quantizer and made_by is not None and here not in (made_by, NOT_INSTALLED):
            raise InputError(
                f"{OPTION}: the adapters of {self.path} were trained with weights quantized by "
                f"{QUANTIZATION_PACKAGE} {made_by}, but {here} is installed; "
                f"run pip install '{QUANTIZATION_PACKAGE}=={made_by}'"
            )
        fingerprints = {"model": model.files.fingerprint}
        with nullcontext() if needs_tokenizer else suppress(InputError):
            fingerprints["tokenizer"] = model.tokenizer.fingerprint
        for what, fingerprint in fingerprints.items():
            if saved.get(what) != fingerprint:
                raise InputError(
                    f"{OPTION}: {self.path} was trained from another {what} than model.path ({path}); "
                    f"omit --config to use the run's own settings, or set model.path as in {self.run.settings_path}"
                )

    def check_critic(self, critic: NetworkSpec, *, is_required: bool = False) -> None:
        """Raises InputError if the checkpoint's critic was trained from another model, or is required and missing."""
        saved = self.progress.fingerprints.get("the critic")
        if saved is None and is_required:
            raise InputError(
                f"{OPTION}: {self.path} contains no critic, because its run trained none; choose a checkpoint of a "
                "run with algorithm.estimator gae or vtrace"
            )
        if saved not in (None, critic.files.fingerprint):
            raise InputError(
                f"{OPTION}: the critic of {self.path} was trained from another model than critic.path; set "
                f"critic.path as in {self.run.settings_path}"
            )

    def restore_params(self, layout: Params, *, network: Literal["policy", "critic"] = "policy") -> Params:
        """Restores a network's trained arrays with these shapes and shardings. All hosts must call it together.

        Raises:
            InputError: the arrays are damaged.
        """
        return self._restore_item({network: {"params": layout}})[network]["params"]

    def restore_states(self, layout: NetworkStates) -> NetworkStates:
        """Restores the training states of the requested networks, without those that the checkpoint lacks.

        All hosts must call it together.

        Raises:
            InputError: the states are damaged, or their arrays differ from the requested ones.
        """
        saved = {path.partition("/")[0] for path in self.checksums}
        target = {name: network for name, network in layout.items() if name in saved}
        missing = {array_path(keys) for keys, _ in jax.tree.leaves_with_path(target)} - self.checksums.keys()
        if missing:
            raise InputError(
                f"{OPTION}: {self.path} has no array {min(missing)}, because its run did not train the same arrays "
                "as these settings; omit --config to use the run's own settings, or compare with "
                f"{self.run.settings_path}"
            )
        return self._restore_item(target)

    def _restore_item(self, item: Any) -> Any:
        # Other hosts may have copies of the small files without the arrays.
        is_seen_by_all = not any_host(not (self.path / "state").is_dir())
        state, reason = read_verified(self.path, self.checksums, item, is_seen_by_all=is_seen_by_all)
        if state is None:
            raise InputError(f"{OPTION}: {self.path} is damaged ({reason}); choose another one in {self.path.parent}")
        return state


def _find_checkpoint(path: Path) -> Path:
    """Returns the folder of the checkpoint at `path`; see `PolicyCheckpoint.open`."""
    path = path.expanduser()
    if not path.is_dir():
        raise InputError(f"{OPTION}: there is no folder {path}; give <run>/checkpoints/<step>, or a run's folder")
    folder = path.resolve()
    if folder.name.isdigit() and ((folder / "state").is_dir() or progress_path(folder).is_file()):
        return folder
    run = RunDirectory(folder.parent if folder.name == "checkpoints" else folder)
    if not run.checkpoint_steps:
        raise InputError(f"{OPTION}: {path} contains no checkpoint; give <run>/checkpoints/<step>, or a run's folder")
    return run.checkpoints_dir / str(max(run.checkpoint_steps))


class PolicySource(NamedTuple):
    settings: Settings
    """The settings, with hub models at the commits that the checkpoint's run used."""
    model: ModelSpec
    saved_policy: PolicyCheckpoint | None
    """The checkpoint with the trained weights; None = use the weights of `model.path`."""

    def identity(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Returns named values of policy, prompts and environment, which determine the samples besides the sampling."""
        settings, model, saved = self
        return {
            MODEL: model.files.fingerprint,
            TOKENIZER: model.tokenizer.fingerprint,
            CHECKPOINT: None if saved is None else saved.describe(),
            PROMPTS: prompts_digest(prompts),
            "model.eos_tokens": [*settings.model.eos_tokens] or None,
            "model.dtype": settings.model.dtype,
            **environment_facts(settings.env),
        }

    def load_decode_weights(self, session: Session) -> DecodeWeights:
        """Loads the decode weights; nothing else of the model stays on the devices. All hosts must call it together."""
        scoring, saved = session.scoring, self.saved_policy
        if saved is None:
            weights = session.to_decode_weights(scoring.load_params())
        else:
            trained = load_trained_params(saved, self.model, session.mesh)
            weights = session.to_decode_weights(scoring.full_params(trained))
        scoring.free_frozen_params()
        return weights


def read_policy_source(settings: Settings, checkpoint: Path | None) -> PolicySource:
    """Reads model files, tokenizer and checkpoint. Without a checkpoint, the model has no adapters.

    Raises:
        InputError: one of them cannot be used, they do not match, or the context is too short.
    """
    saved = None if checkpoint is None else PolicyCheckpoint.open(checkpoint)
    settings = settings if saved is None else pin_revisions(settings, saved.run)
    model = read_model_spec(settings)
    if saved is None:
        model = model.without_adapters
    else:
        saved.check_compatible(model)
    check_context_length(model.architecture, settings, path=settings.model.path)
    prepare_turns(settings, model.tokenizer)
    return PolicySource(settings, model, saved)


def load_trained_params(checkpoint: PolicyCheckpoint, model: ModelSpec, mesh: Mesh) -> Params:
    """Loads the trained weights of a checkpoint: only the adapters, in float32, if there are any, else all weights.

    Call `checkpoint.check_compatible` first. All hosts must call it together.

    Raises:
        InputError: the saved weights are damaged.
    """
    definition = model.policy_definition
    layout = abstract_arrays(definition.shapes, definition.shardings(mesh))
    return checkpoint.restore_params(definition.trainable(layout))
