"""LoRA adapters in PEFT's format, to be loaded on top of their base model.

Source: Hu et al. 2021, LoRA; the checkpoint format of PEFT, https://huggingface.co/docs/peft.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from app.export.hf_tensors import slice_layer
from app.model.decoder import Params, flatten_by_path
from app.model.io.hf_weights import LAYER_TENSORS
from app.model.lora import LORA_A, LORA_B, LoRAConfig

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"

PREFIX = "base_model.model.model.layers"
"""Path of the layers: the two levels added by PEFT, then those of a causal language model."""

PROJECTIONS = {path[0]: name for name, path in LAYER_TENSORS.items() if name.endswith("_proj")}
"""Our projection -> its module in a layer: `query` -> `self_attn.q_proj`."""


class PeftTensors:
    """The tensors of adapters under PEFT's names, layer by layer: a `TensorSource`.

    `lora_A.weight` [r, in] = A^T and `lora_B.weight` [out, r] = B^T.
    """

    def __init__(self, adapters: Params) -> None:
        flat = flatten_by_path(adapters)
        self._adapters = {
            path[-2]: (down, flat[*path[:-1], LORA_B]) for path, down in flat.items() if path[-1] == LORA_A
        }
        (num_layers,) = {len(down) for down, _ in self._adapters.values()}
        self._places = {
            f"{PREFIX}.{layer}.{PROJECTIONS[projection]}.{factor}.weight": (projection, layer, factor)
            for layer in range(num_layers)
            for projection in self._adapters
            for factor in ("lora_A", "lora_B")
        }

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: self._shape(projection, factor) for name, (projection, _, factor) in self._places.items()}

    def _shape(self, projection: str, factor: str) -> tuple[int, int]:
        down, up = self._adapters[projection]
        rank = down.shape[-1]
        return (rank, math.prod(down.shape[1:-1])) if factor == "lora_A" else (math.prod(up.shape[2:]), rank)

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor as float32, fetched from its devices."""
        projection, layer, factor = self._places[name]
        down, up = self._adapters[projection]
        tensor = np.asarray(slice_layer(down if factor == "lora_A" else up, layer))
        return tensor.reshape(self._shape(projection, factor)[::-1]).T


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
