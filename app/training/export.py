"""`grpo export`: a checkpoint's policy as a Hugging Face directory."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp

from app.mesh import topology
from app.policy.config_out import GENERATION_CONFIG_FILE, exported_config, exported_generation_config
from app.policy.decoder import Params
from app.policy.safetensors_out import write_weights
from app.policy.weight_files import CONFIG_FILE
from app.policy.weights_out import TensorsOut
from app.prompts.tokenizer_out import write_tokenizer
from app.training.model_card import CARD_FILE, model_card
from app.training.model_input import ModelInput, read_model_input
from app.training.pinned_model import pinned
from app.training.saved_policy import SavedPolicy
from app.whole_file import new_folder
from settings import Resolved
from settings.errors import InputError
from settings.mesh_section import Mesh

WeightType = Literal["float32", "bfloat16"]

SMALL_FILES_BYTES = 64 << 20
"""Room for tokenizer, configurations and card, whose vocabularies can be tens of MB."""


def export(resolved: Resolved, *, checkpoint: Path, out: Path, dtype: WeightType) -> dict[str, Any]:
    """Writes the policy of a checkpoint to the new folder `out`, and returns the figures to be shown.

    It works alone and on the CPU, whatever `mesh` says: a checkpoint of many hosts is read by one, and weights are only
    copied.

    Raises:
        InputError: checkpoint, settings or model that do not fit, or an `out` that cannot be made; nothing is written.
    """
    out = out.expanduser().absolute()
    check_new_folder(out)
    saved = SavedPolicy.open(checkpoint)
    settings = pinned(resolved.settings, saved.run)
    model = read_model_input(settings)
    saved.check(model)
    card = model_card(resolved, saved, model, dtype=dtype)
    num_parameters = model.definition.num_parameters
    check_space(out, num_parameters * jnp.dtype(dtype).itemsize + SMALL_FILES_BYTES)
    start = time.perf_counter()
    params = read_params(saved, model)
    with new_folder(out) as folder:
        files = write_model(folder, model, params, dtype=dtype)
        (folder / CARD_FILE).write_text(card, encoding="utf-8")
    return {
        "run": str(saved.run.path),
        "step": saved.step,
        "model": model.files.name,
        "parameters": num_parameters,
        "weights": f"{dtype} in {len(files)} file{'s' if len(files) > 1 else ''}",
        "bytes": sum(file.stat().st_size for file in out.iterdir()),
        "seconds": round(time.perf_counter() - start, 2),
        "written to": str(out),
    }


def read_params(saved: SavedPolicy, model: ModelInput) -> Params:
    """The policy's weights, float32, in this host's memory."""
    alone = Mesh(platform="cpu")
    topology.start_alone(alone)
    return saved.read(model.definition.shapes, model.definition.shardings(topology.make_mesh(alone)))


def write_model(folder: Path, model: ModelInput, params: Params, *, dtype: WeightType) -> list[str]:
    """Weights, configurations and tokenizer: all that transformers needs. Returns the names of the weight files."""
    files, tokenizer = model.files, model.tokenizer
    config = exported_config(files.config, dtype=dtype, eos_ids=tokenizer.eos_ids)
    generation = exported_generation_config(files.generation_config, eos_ids=tokenizer.eos_ids, pad_id=tokenizer.pad_id)
    _write_json(folder / CONFIG_FILE, config)
    _write_json(folder / GENERATION_CONFIG_FILE, generation)
    write_tokenizer(files, folder)
    return write_weights(folder, TensorsOut(model.definition, params), jnp.dtype(dtype))


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


def check_space(path: Path, needed: int) -> None:
    """Raises InputError where the disk of a new folder has no room for so many bytes."""
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise InputError(
            f"--out: {path} needs {_gigabytes(needed)} and its disk has {_gigabytes(free)} left; free some, choose "
            "another disk, or take --dtype bfloat16, which needs half of float32"
        )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.2f} GB"
