"""`grpo export`: writes the policy of a checkpoint as a Hugging Face directory, or its adapters for PEFT.

It runs on the CPU of one host, regardless of `mesh` and of the number of hosts in training: it only copies weights.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
from jax.sharding import Mesh

from app.checkpoint.policy_weights import load_trained_params
from app.checkpoint.saved_policy import PolicyCheckpoint
from app.export.hf_files import GENERATION_CONFIG_FILE, export_config, export_generation_config, write_tokenizer
from app.export.hf_tensors import HfTensors
from app.export.model_card import ADAPTER, CARD_FILE, FULL_MODEL, MERGED_MODEL, ExportFormat, export_notes, model_card
from app.export.peft import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, PeftTensors, adapter_config
from app.export.safetensors_writer import write_safetensors, write_sharded_safetensors
from app.mesh import device_mesh, jax_startup
from app.model.decoder import Params
from app.model.io.gguf import GgufFile
from app.model.io.hf_weights import load_weights
from app.model.io.model_files import BUILTIN_PREFIX, CONFIG_FILE
from app.model.lora import combine_params
from app.records.atomic_write import create_folder_atomic
from app.runtime.model_spec import ModelSpec, read_model_spec
from app.runtime.pinned_revisions import pin_revisions
from settings import Resolved, Settings
from settings.errors import InputError
from settings.schema.mesh import MeshSettings

log = logging.getLogger(__name__)

WeightType = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class ExportJob:
    """A checkpoint, its model and the folder to write, checked for compatibility."""

    resolved: Resolved
    settings: Settings
    """The settings, with the hub commit used at the start of the run."""
    saved_policy: PolicyCheckpoint
    model: ModelSpec
    out: Path
    dtype: WeightType
    start: float = field(default_factory=time.perf_counter)

    @classmethod
    def open(cls, resolved: Resolved, *, checkpoint: Path, out: Path, dtype: WeightType) -> ExportJob:
        """Opens a job; raises InputError if checkpoint, settings and model differ, or `out` cannot be created."""
        out = out.expanduser().absolute()
        check_new_folder(out)
        saved = PolicyCheckpoint.open(checkpoint)
        settings = pin_revisions(resolved.settings, saved.run)
        model = read_model_spec(settings)
        saved.check_compatible(model, needs_quantizer=False)
        return cls(resolved, settings, saved, model, out, dtype)

    def write_directory(
        self, export_format: ExportFormat, write_files: Callable[[Path], list[str]], *, num_parameters: int
    ) -> dict[str, Any]:
        """Creates the folder and returns the summary to print.

        Args:
            write_files: fills a folder and returns the names of its weight files.
        """
        card = model_card(self.resolved, self.saved_policy, self.model, export_format=export_format, dtype=self.dtype)
        for note in export_notes(self.resolved, self.model, export_format=export_format, dtype=self.dtype):
            print(f"note: {note}", file=sys.stderr)
        with create_folder_atomic(self.out) as folder:
            weight_files = write_files(folder)
            (folder / CARD_FILE).write_text(card, encoding="utf-8")
        return {
            "run": str(self.saved_policy.run.path),
            "step": self.saved_policy.step,
            "model": self.model.files.name,
            "parameters": num_parameters,
            "weights": f"{self.dtype} in {len(weight_files)} file{'s' if len(weight_files) > 1 else ''}",
            "bytes": sum(file.stat().st_size for file in self.out.iterdir()),
            "seconds": round(time.perf_counter() - self.start, 2),
            "written to": str(self.out),
            "load it": f"{export_format.model_class}.from_pretrained({str(self.out)!r}), as in {CARD_FILE} there",
            **({} if export_format is ADAPTER else {"measure it": self._evaluate_command()}),
        }

    def _evaluate_command(self) -> str:
        run = self.saved_policy.run
        config = ["--config", str(run.settings_path)] if run.has_settings else []
        exact = [word for name in self.resolved.settings.rollout.rounding for word in ("--set", f"{name}=null")]
        return shlex.join(["grpo", "evaluate", *config, "--set", f"model.path={self.out}", *exact])


def export(resolved: Resolved, *, checkpoint: Path, out: Path, dtype: WeightType) -> dict[str, Any]:
    """Writes the policy of a checkpoint to the new folder `out`, with adapters merged into the weights.

    Raises:
        InputError: checkpoint, settings and model do not match, or `out` cannot be created; nothing is written.
    """
    job = ExportJob.open(resolved, checkpoint=checkpoint, out=out, dtype=dtype)
    model, has_adapters = job.model, job.model.policy_definition.lora is not None

    def write_files(folder: Path) -> list[str]:
        mesh = make_cpu_mesh()
        trained = load_trained_params(job.saved_policy, model, mesh)
        frozen = load_weights(model.definition, model.files.weights, mesh) if has_adapters else None
        return write_model(folder, model, combine_params(trained, frozen), dtype=dtype)

    export_format = MERGED_MODEL if has_adapters else FULL_MODEL
    return job.write_directory(export_format, write_files, num_parameters=model.definition.num_parameters)


def export_adapter(resolved: Resolved, *, checkpoint: Path, out: Path, dtype: WeightType) -> dict[str, Any]:
    """Writes the adapters of a checkpoint, without their base model, to the new folder `out`.

    Raises:
        InputError: as for `export`; also if the checkpoint has no adapters, or PEFT could not load their base model.
    """
    job = ExportJob.open(resolved, checkpoint=checkpoint, out=out, dtype=dtype)
    model, config = job.model, build_adapter_config(job)

    def write_files(folder: Path) -> list[str]:
        tensors = PeftTensors(load_trained_params(job.saved_policy, model, make_cpu_mesh()))
        _write_json(folder / ADAPTER_CONFIG_FILE, config)
        write_tokenizer(model.files, folder)
        write_safetensors(folder / ADAPTER_WEIGHTS_FILE, tensors, [*tensors.shapes], jnp.dtype(dtype))
        return [ADAPTER_WEIGHTS_FILE]

    return job.write_directory(ADAPTER, write_files, num_parameters=model.policy_definition.num_trainable)


def build_adapter_config(job: ExportJob) -> dict[str, Any]:
    """Returns PEFT's configuration; raises InputError without adapters, or if PEFT could not load the base model."""
    model, path, lora = job.model, job.settings.model.path, job.model.policy_definition.lora
    if lora is None:
        raise InputError(
            f"--adapter: {job.saved_policy.path} holds all weights and no adapters: its run had no model.lora.rank; "
            "omit --adapter to export the whole model"
        )
    if path.startswith(BUILTIN_PREFIX) or isinstance(model.files.weights, GgufFile):
        raise InputError(
            f"--adapter: PEFT needs a Hugging Face directory or hub id as the base model, but model.path = {path} is "
            "neither; omit --adapter to export the whole model, with the adapters merged into it"
        )
    commit = model.files.commit
    return adapter_config(lora, base=model.files.name if commit else str(model.files.path.resolve()), revision=commit)


def make_cpu_mesh() -> Mesh:
    """Returns a mesh of this host's CPU."""
    settings = MeshSettings(platform="cpu")
    jax_startup.initialize_local(settings)
    return device_mesh.make_mesh(settings)


def write_model(folder: Path, model: ModelSpec, params: Params, *, dtype: WeightType) -> list[str]:
    """Writes weights, configurations and tokenizer for transformers; returns the names of the weight files."""
    log.info("writing weights, configuration and tokenizer")
    files, tokenizer = model.files, model.tokenizer
    config = export_config(files.config, dtype=dtype, eos_ids=tokenizer.eos_ids)
    generation = export_generation_config(files.generation_config, eos_ids=tokenizer.eos_ids, pad_id=tokenizer.pad_id)
    _write_json(folder / CONFIG_FILE, config)
    _write_json(folder / GENERATION_CONFIG_FILE, generation)
    write_tokenizer(files, folder)
    return write_sharded_safetensors(folder, HfTensors(model.policy_definition, params), jnp.dtype(dtype))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def check_new_folder(path: Path) -> None:
    """Raises InputError if the path exists, or a folder cannot be created there."""
    if os.path.lexists(path):
        raise InputError(f"--out: {path} exists already; give the name of a new folder, or move it away")
    if not path.parent.is_dir():
        raise InputError(f"--out: {path}: the folder {path.parent} does not exist; create it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise InputError(f"--out: {path}: the folder {path.parent} is not writable; choose another one")
