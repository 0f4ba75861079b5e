"""The files of an exported model beside its weights: configurations and tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.model.io.config_fields import HfConfig
from app.model.io.families import FAMILIES
from app.model.io.gguf import GgufFile
from app.model.io.model_files import ModelFiles
from app.prompts.tokenizer import TOKENIZER_FILE, load_fast_tokenizer

GENERATION_CONFIG_FILE = "generation_config.json"

OMITTED_BASE_FIELDS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
"""Fields of the base model that do not apply to the export: its origin, its writer, and the type of its weights."""
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


def export_config(config: HfConfig, *, dtype: str, eos_ids: Sequence[int]) -> dict[str, Any]:
    """Returns the base model's configuration with the type of the exported weights.

    Adds fields that a GGUF file or a short config.json omits and for which transformers has other defaults.
    """
    kept = {name: value for name, value in config.items() if name not in OMITTED_BASE_FIELDS}
    required = {"architectures": [FAMILIES[config["model_type"]].causal_lm], "eos_token_id": unwrap_single_id(eos_ids)}
    missing = {name: value for name, value in required.items() if kept.get(name) is None}
    # Uses the newer name only if the base does: every version of transformers reads the older one.
    return {**kept, **missing, "dtype" if "dtype" in config else "torch_dtype": dtype}


def export_generation_config(base: Mapping[str, Any], *, eos_ids: Sequence[int], pad_id: int) -> dict[str, Any]:
    """Returns the base model's generation configuration, with the end tokens of the training samples."""
    kept = {name: value for name, value in base.items() if name != "transformers_version"}
    return {"pad_token_id": pad_id, **kept, "eos_token_id": unwrap_single_id(eos_ids)}


def unwrap_single_id(ids: Sequence[int]) -> int | list[int]:
    """Returns a list of ids, or a single id as an integer, which every reader accepts."""
    return ids[0] if len(ids) == 1 else list(ids)


def write_tokenizer(files: ModelFiles, directory: Path) -> None:
    """Copies the tokenizer files of a model's directory, or writes equivalent ones for a GGUF file."""
    if isinstance(files.weights, GgufFile):
        load_fast_tokenizer(files).save_pretrained(directory)
        config = json.loads((directory / TOKENIZER_CONFIG_FILE).read_text(encoding="utf-8"))
        config["tokenizer_class"] = PORTABLE_TOKENIZER_CLASS
        (directory / TOKENIZER_CONFIG_FILE).write_text(
            json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        return
    for name in TOKENIZER_FILES:
        # Copies the content: files from the hub are links into its cache.
        if (files.path / name).is_file():
            shutil.copyfile(files.path / name, directory / name)
