"""`config.json` and `generation_config.json` of an exported model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.model.io.config_fields import HfConfig
from app.model.io.families import FAMILIES

GENERATION_CONFIG_FILE = "generation_config.json"

OMITTED_BASE_FIELDS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
"""Fields of the base model that do not apply to the export: its origin, its writer, and the type of its weights."""


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
