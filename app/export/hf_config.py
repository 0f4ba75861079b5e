"""`config.json` and `generation_config.json` of a model that is written out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.model.io.config_fields import HfConfig
from app.model.io.families import FAMILIES

GENERATION_CONFIG_FILE = "generation_config.json"

OMITTED_BASE_FIELDS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
"""Where the base came from, who wrote its file, and the type of its weights."""


def export_config(config: HfConfig, *, dtype: str, eos_ids: Sequence[int]) -> dict[str, Any]:
    """The base's configuration, with the type of the weights written beside it.

    What a GGUF file or a terse directory leaves out is said: transformers has other defaults for some of it.
    """
    kept = {name: value for name, value in config.items() if name not in OMITTED_BASE_FIELDS}
    named = {"architectures": [FAMILIES[config["model_type"]].causal_lm], "eos_token_id": unwrap_single_id(eos_ids)}
    unnamed = {name: value for name, value in named.items() if kept.get(name) is None}
    # The newer name where the base has it; the older one is read by every version.
    name_of_type = "dtype" if "dtype" in config else "torch_dtype"
    return {**kept, **unnamed, name_of_type: dtype}


def export_generation_config(base: Mapping[str, Any], *, eos_ids: Sequence[int], pad_id: int) -> dict[str, Any]:
    """The base's, ending where the policy's samples ended in training."""
    kept = {name: value for name, value in base.items() if name != "transformers_version"}
    return {"pad_token_id": pad_id, **kept, "eos_token_id": unwrap_single_id(eos_ids)}


def unwrap_single_id(ids: Sequence[int]) -> int | list[int]:
    """A single id by itself, which every reader takes."""
    return ids[0] if len(ids) == 1 else list(ids)
