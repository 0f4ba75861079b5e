"""`grpo export`: a checkpoint's policy as a Hugging Face directory, or its adapters as PEFT's.

It works alone and on the CPU, whatever `mesh` says: a checkpoint of many hosts is read by one, and weights are only
copied.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
from jax.sharding import Mesh

from app.checkpoint.policy_checkpoint import PolicyCheckpoint
from app.checkpoint.policy_weights import load_trained_params
from app.export.hf_config import GENERATION_CONFIG_FILE, export_config, export_generation_config
from app.export.hf_tensors import HfTensors
from app.export.model_card import ADAPTER, CARD_FILE, FULL_MODEL, MERGED_MODEL, ExportFormat, export_notes, model_card
from app.export.peft import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, PeftTensors, adapter_config
from app.export.safetensors_writer import write_safetensors, write_sharded_safetensors
from app.export.tokenizer import write_tokenizer
from app.mesh import topology
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
from settings.schema.mesh import MeshSettings as MeshSettings

log = logging.getLogger(__name__)

WeightType = Literal["float32", "bfloat16"]

SMALL_FILES_BYTES = 64 << 20
"""Room for tokenizer, configurations and card, whose vocabularies can be tens of MB."""


@dataclass(frozen=True)
class ExportJob:
    """What is exported, and where to: looked at, and found to fit."""

    resolved: Resolved
    settings: Settings
    """With the commit of the hub that the run was started with."""
    saved_policy: PolicyCheckpoint
    model: ModelSpec
    out: Path
    dtype: WeightType
    start: float = field(default_factory=time.perf_counter)

    @classmethod
    def open(cls, resolved: Resolved, *, checkpoint: Path, out: Path, dtype: WeightType) -> ExportJob:
        """Raises InputError where checkpoint, settings and model do not fit, or `out` cannot be made."""
        out = out.expanduser().absolute()
        check_new_folder(out)
        saved = PolicyCheckpoint.open(checkpoint)
        settings = pin_revisions(resolved.settings, saved.run)
        model = read_model_spec(settings)
        saved.check_compatible(model, needs_quantizer=False)
        return cls(resolved, settings, saved, model, out, dtype)

    def print_notes(self, export_format: ExportFormat) -> None:
        """Wherein what is written is not what the run measured."""
        for note in export_notes(
            export_format, dtype=self.dtype, quantization=self.model.policy_definition.quantization
        ):
            print(f"note: {note}", file=sys.stderr)

    def write_directory(
        self, fill_directory: Callable[[Path], list[str]], *, card: str, num_parameters: int
    ) -> dict[str, Any]:
        """Makes the folder, and returns the figures to be shown.

        Args:
            write: fills it, and returns the names of the weight files.
        """
        with create_folder_atomic(self.out) as folder:
            files = fill_directory(folder)
            (folder / CARD_FILE).write_text(card, encoding="utf-8")
        return {
            "run": str(self.saved_policy.run.path),
            "step": self.saved_policy.step,
            "model": self.model.files.name,
            "parameters": num_parameters,
            "weights": f"{self.dtype} in {len(files)} file{'s' if len(files) > 1 else ''}",
            "bytes": sum(file.stat().st_size for file in self.out.iterdir()),
            "seconds": round(time.perf_counter() - self.start, 2),
            "written to": str(self.out),
        }


def export(resolved: Resolved, *, checkpoint: Path, out: Path, dtype: WeightType) -> dict[str, Any]:
    """Writes the policy of a checkpoint to the new folder `out`, adapters merged into the weights beside them.

    Raises:
        InputError: checkpoint, settings or model that do not fit, or an `out` that cannot be made; nothing is written.
    """
    opened = ExportJob.open(resolved, checkpoint=checkpoint, out=out, dtype=dtype)
    model, saved = opened.model, opened.saved_policy
    form = FULL_MODEL if model.policy_definition.lora is None else MERGED_MODEL
    card = model_card(resolved, saved, model, export_format=form, dtype=dtype)
    num_parameters = model.definition.num_parameters
    check_disk_space(opened.out, num_parameters * jnp.dtype(dtype).itemsize + SMALL_FILES_BYTES)
    opened.print_notes(form)
    mesh = make_cpu_mesh()
    trained = load_trained_params(saved, model, mesh)
    frozen = None if model.policy_definition.lora is None else load_weights(model.definition, model.files.weights, mesh)
    params = combine_params(trained, frozen)
    return opened.write_directory(
        lambda folder: write_model(folder, model, params, dtype=dtype), card=card, num_parameters=num_parameters
    )


def export_adapter(resolved: Resolved, *, checkpoint: Path, out: Path, dtype: WeightType) -> dict[str, Any]:
    """Writes the adapters of a checkpoint, without the model that they stand beside, to the new folder `out`.

    Raises:
        InputError: as `export`; there are no adapters, or PEFT could not load what is beside them.
    """
    opened = ExportJob.open(resolved, checkpoint=checkpoint, out=out, dtype=dtype)
    model, saved = opened.model, opened.saved_policy
    config = build_adapter_config(opened)
    card = model_card(resolved, saved, model, export_format=ADAPTER, dtype=dtype)
    num_parameters = model.policy_definition.num_trainable
    check_disk_space(opened.out, num_parameters * jnp.dtype(dtype).itemsize + SMALL_FILES_BYTES)
    opened.print_notes(ADAPTER)
    tensors = PeftTensors(load_trained_params(saved, model, make_cpu_mesh()))

    def write(folder: Path) -> list[str]:
        _write_json(folder / ADAPTER_CONFIG_FILE, config)
        write_tokenizer(model.files, folder)
        write_safetensors(folder / ADAPTER_WEIGHTS_FILE, tensors, [*tensors.shapes], jnp.dtype(dtype))
        return [ADAPTER_WEIGHTS_FILE]

    return opened.write_directory(write, card=card, num_parameters=num_parameters)


def build_adapter_config(job: ExportJob) -> dict[str, Any]:
    """Raises InputError where there are no adapters, or PEFT could not load the model that they stand beside."""
    model, path, lora = job.model, job.settings.model.path, job.model.policy_definition.lora
    if lora is None:
        raise InputError(
            f"--adapter: {job.saved_policy.path} holds all weights and no adapters: its run had no model.lora.rank; "
            f"leave "
            "--adapter away to export the whole model"
        )
    if path.startswith(BUILTIN_PREFIX) or isinstance(model.files.weights, GgufFile):
        raise InputError(
            f"--adapter: PEFT loads adapters over a Hugging Face directory or hub id, and model.path = {path} is "
            "neither; leave --adapter away to export the whole model, with the adapters merged into it"
        )
    commit = model.files.commit
    base = path if commit is not None else str(model.files.path.resolve())
    return adapter_config(lora, base=base, revision=commit)


def make_cpu_mesh() -> Mesh:
    """This host's CPU, as a mesh of its own."""
    alone = MeshSettings(platform="cpu")
    topology.initialize_local(alone)
    return topology.make_mesh(alone)


def write_model(folder: Path, model: ModelSpec, params: Params, *, dtype: WeightType) -> list[str]:
    """Weights, configurations and tokenizer: all that transformers needs. Returns the names of the weight files."""
    log.info("writing %s", folder)
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
    """Raises InputError where a folder of this name could not be made, or something has it."""
    if os.path.lexists(path):
        raise InputError(f"--out: {path} exists already; give the name of a folder that does not, or move it away")
    if not path.parent.is_dir():
        raise InputError(f"--out: {path}: the folder {path.parent} does not exist; create it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise InputError(f"--out: {path}: the folder {path.parent} is not writable; choose another one")


def check_disk_space(path: Path, num_bytes: int) -> None:
    """Raises InputError where the disk of a new folder has no room for so many bytes."""
    free = shutil.disk_usage(path.parent).free
    if free < num_bytes:
        raise InputError(
            f"--out: {path} needs {_format_gigabytes(num_bytes)} and its disk has {_format_gigabytes(free)} left; "
            f"free some, choose "
            "another disk, or take --dtype bfloat16, which needs half of float32"
        )


def _format_gigabytes(size: int) -> str:
    return f"{size / 1e9:,.2f} GB"
