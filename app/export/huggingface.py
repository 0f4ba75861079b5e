"""`grpo export`: writes a policy, or a base model, as a Hugging Face directory, or adapters for PEFT.

It runs on the CPU of one host, regardless of `mesh` and of the number of hosts in training: it only copies weights.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp

from app.checkpoint.saved_policy import PolicyCheckpoint, load_trained_params
from app.export.hf_tensors import HfTensors, write_adapters, write_sharded_safetensors
from app.export.model_card import (
    ADAPTER,
    CARD_FILE,
    FULL_MODEL,
    MERGED_MODEL,
    base_model_card,
    export_notes,
    model_card,
)
from app.mesh import device_mesh, jax_startup
from app.model.decoder import Params
from app.model.io.config_fields import HfConfig
from app.model.io.families import FAMILIES
from app.model.io.gguf import GgufFile
from app.model.io.hf_weights import load_weights
from app.model.io.model_files import ADAPTER_CONFIG_FILE, CONFIG_FILE, ModelFiles
from app.model.lora import LoRAConfig, combine_params
from app.prompts.tokenizer import TOKENIZER_FILE, load_fast_tokenizer
from app.records.atomic_write import create_folder_atomic
from app.records.jsonl import check_output_path
from app.runtime.model_spec import ModelSpec, read_model_spec
from app.runtime.pinned_revisions import pin_revisions
from settings import Resolved, Settings
from settings.errors import InputError
from settings.schema.mesh import MeshSettings
from settings.schema.model import BUILTIN_PREFIX

log = logging.getLogger(__name__)

WeightType = Literal["float32", "bfloat16"]


ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
GENERATION_CONFIG_FILE = "generation_config.json"

OMITTED_BASE_FIELDS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
"""Fields of the base model's config that do not apply to the export: origin, writer, and dtype of the weights."""
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
PORTABLE_TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""A class known to both transformers 4 and 5; by default, version 5 writes a name unknown to version 4."""

TOKENIZER_FILES = (
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""Files to copy; none of them contains code."""


def export(
    resolved: Resolved, *, checkpoint: Path | None, out: Path, dtype: WeightType, only_adapters: bool = False
) -> dict[str, Any]:
    """Writes the policy of a checkpoint to the new folder `out`, and returns the summary to print.

    Adapters are merged into the weights, or with `only_adapters` written without their base model. Without a checkpoint
    (which `only_adapters` needs), the untrained model of `model.path` is written.

    Raises:
        InputError: checkpoint, settings and model do not match; `out` cannot be created; or, with `only_adapters`,
            there are no adapters or PEFT could not load their base model. Nothing is written then.
    """
    start, out = time.perf_counter(), out.expanduser().absolute()
    if os.path.lexists(out):
        raise InputError(f"--out: {out} exists already; give the name of a new folder, or move the old one away")
    check_output_path(out, "--out")
    saved, model = _read_policy(resolved.settings, checkpoint)
    has_adapters = model.policy_definition.lora is not None
    export_format = ADAPTER if only_adapters else MERGED_MODEL if has_adapters else FULL_MODEL
    if saved is None:
        card = base_model_card(resolved, model, dtype=dtype)
    else:
        if only_adapters:
            check_adapters(resolved.settings.model.path, saved, model)
        card = model_card(resolved, saved, model, export_format=export_format, dtype=dtype)
        for note in export_notes(resolved, model, export_format=export_format, dtype=dtype):
            print(f"note: {note}", file=sys.stderr)
    with create_folder_atomic(out) as folder:
        cpu = MeshSettings(platform="cpu")
        jax_startup.initialize_local(cpu)
        mesh = device_mesh.make_mesh(cpu)
        trained: Params = {} if saved is None else load_trained_params(saved, model, mesh)
        if only_adapters:
            weight_files, num_parameters = [ADAPTER_WEIGHTS_FILE], model.policy_definition.num_trainable
            commit, lora = model.files.commit, model.policy_definition.lora
            assert lora is not None
            base = model.files.name if commit else str(model.files.path.resolve())
            _write_json(folder / ADAPTER_CONFIG_FILE, adapter_config(lora, base=base, revision=commit))
            write_tokenizer(model.files, folder)
            write_adapters(folder / ADAPTER_WEIGHTS_FILE, trained, jnp.dtype(dtype))
        else:
            needs_base = saved is None or has_adapters
            frozen = load_weights(model.definition, model.files.weights, mesh) if needs_base else None
            weight_files = write_model(folder, model, combine_params(trained, frozen), dtype=dtype)
            num_parameters = model.definition.num_parameters
        (folder / CARD_FILE).write_text(card, encoding="utf-8")
    return {
        **({} if saved is None else {"run": str(saved.run.path), "step": saved.step}),
        "model": model.files.name,
        "parameters": num_parameters,
        "weights": f"{dtype} in {len(weight_files)} file{'s' if len(weight_files) > 1 else ''}",
        "bytes": sum(file.stat().st_size for file in out.iterdir()),
        "seconds": round(time.perf_counter() - start, 2),
        "written to": str(out),
        "load it": f"{export_format.model_class}.from_pretrained({str(out)!r}), as in {CARD_FILE} there",
        **_next_command(resolved.settings, saved, out, only_adapters=only_adapters),
    }


def _read_policy(settings: Settings, checkpoint: Path | None) -> tuple[PolicyCheckpoint | None, ModelSpec]:
    """Reads the checkpoint and its model; without a checkpoint, the model has no adapters."""
    if checkpoint is None:
        return None, read_model_spec(settings).without_adapters
    saved = PolicyCheckpoint.open(checkpoint)
    model = read_model_spec(pin_revisions(settings, saved.run))
    saved.check_compatible(model, needs_quantizer=False)
    return saved, model


def _next_command(
    settings: Settings, saved: PolicyCheckpoint | None, out: Path, *, only_adapters: bool
) -> dict[str, str]:
    """Returns the command to run next with the exported model."""
    if only_adapters:
        return {}
    if saved is None:
        return {"train from it": f"--set {shlex.quote(f'model.path={out}')}"}
    config = ["--config", str(saved.run.settings_path)] if saved.run.has_settings else []
    exact = [word for name in settings.rollout.rounding for word in ("--set", f"{name}=null")]
    return {"measure it": shlex.join(["grpo", "evaluate", *config, "--set", f"model.path={out}", *exact])}


def check_adapters(path: str, saved_policy: PolicyCheckpoint, model: ModelSpec) -> None:
    """Raises InputError if a checkpoint has no adapters, or if PEFT could not load their base model at `path`."""
    if model.policy_definition.lora is None:
        raise InputError(
            f"--adapter: {saved_policy.path} contains all weights and no adapters: its run had no model.lora.rank; "
            "omit --adapter to export the whole model"
        )
    if path.startswith(BUILTIN_PREFIX) or isinstance(model.files.weights, GgufFile):
        base = shlex.join(["grpo", "export", "--set", f"model.path={path}", "--out", "base-hf"])
        raise InputError(
            f"--adapter: PEFT needs a Hugging Face directory or hub id as the base model, but model.path = {path} is "
            "neither; omit --adapter to export the whole model with the adapters merged, or write the base as such "
            f"a directory with `{base}` and train with `--set model.path=base-hf`"
        )


def adapter_config(lora: LoRAConfig, *, base: str, revision: str | None) -> dict[str, Any]:
    """Returns the content of `adapter_config.json`.

    Args:
        base: hub id or absolute path of the base model.
        revision: commit of the hub id; None for a path.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.projections),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }


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


def export_config(config: HfConfig, *, dtype: str, eos_ids: Sequence[int]) -> dict[str, Any]:
    """Returns the base model's configuration with the dtype of the exported weights.

    Adds `architectures` and `eos_token_id` where the base configuration omits them, as transformers would use defaults
    that do not fit the model.
    """
    kept = {name: value for name, value in config.items() if name not in OMITTED_BASE_FIELDS}
    required = {"architectures": [FAMILIES[config["model_type"]].causal_lm], "eos_token_id": unwrap_single_id(eos_ids)}
    missing = {name: value for name, value in required.items() if kept.get(name) is None}
    # Uses the newer name only if the base does: every version of transformers reads the older one.
    return {**kept, **missing, "dtype" if "dtype" in config else "torch_dtype": dtype}


def export_generation_config(base: Mapping[str, Any], *, eos_ids: Sequence[int], pad_id: int) -> dict[str, Any]:
    """Returns the base's generation configuration with training's EOS ids, and a padding id if it has none."""
    kept = {name: value for name, value in base.items() if name != "transformers_version"}
    return {"pad_token_id": pad_id, **kept, "eos_token_id": unwrap_single_id(eos_ids)}


def unwrap_single_id(ids: Sequence[int]) -> int | list[int]:
    """Returns the ids as a list, or a single id as an integer, which every reader accepts."""
    return ids[0] if len(ids) == 1 else list(ids)


def write_tokenizer(files: ModelFiles, directory: Path) -> None:
    """Copies the tokenizer files of a model's directory, or writes equivalent ones for a GGUF file."""
    if isinstance(files.weights, GgufFile):
        load_fast_tokenizer(files).save_pretrained(directory)
        config = json.loads((directory / TOKENIZER_CONFIG_FILE).read_text(encoding="utf-8"))
        _write_json(directory / TOKENIZER_CONFIG_FILE, config | {"tokenizer_class": PORTABLE_TOKENIZER_CLASS})
        return
    for name in TOKENIZER_FILES:
        # Copies the content: files from the hub are links into its cache.
        if (files.path / name).is_file():
            shutil.copyfile(files.path / name, directory / name)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
