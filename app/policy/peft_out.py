"""LoRA adapters as the files that PEFT loads over the model that they were trained on.

Source: Hu et al. 2021, LoRA; the checkpoint format of PEFT, https://huggingface.co/docs/peft.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float

from app.policy.weights import LAYER_TENSORS

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"

PREFIX = "base_model.model.model.layers"
"""PEFT's own two levels, and those of a causal language model."""

PROJECTIONS = {path[0]: name for name, path in LAYER_TENSORS.items() if name.endswith("_proj")}
"""Our projection -> its module in a layer: `query` -> `self_attn.q_proj`."""


class Adapter(NamedTuple):
    """Of one projection, over all layers: its kernel [in, out] stands for kernel + (alpha / rank) a b."""

    a: Float[Array, "L *inputs r"]
    b: Float[Array, "L r *outputs"]


def adapter_tensors(adapters: Mapping[str, Adapter]) -> dict[str, np.ndarray]:
    """PEFT's tensors, float32: `lora_A.weight` [r, in] = a^T and `lora_B.weight` [out, r] = b^T, layer by layer.

    Args:
        adapters: by our name of the projection.
    """
    tensors = {}
    for projection, (a, b) in adapters.items():
        num_layers, rank = a.shape[0], a.shape[-1]
        down, up = np.asarray(a).reshape(num_layers, -1, rank), np.asarray(b).reshape(num_layers, rank, -1)
        for layer in range(num_layers):
            module = f"{PREFIX}.{layer}.{PROJECTIONS[projection]}"
            tensors[f"{module}.lora_A.weight"] = down[layer].T
            tensors[f"{module}.lora_B.weight"] = up[layer].T
    return tensors


def adapter_config(
    *, base: str, revision: str | None, rank: int, alpha: float, projections: list[str]
) -> dict[str, Any]:
    """`adapter_config.json`.

    Args:
        base: hub id, or absolute path of the model's directory.
        revision: commit of the hub id.
        projections: our names of those that have adapters.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(PROJECTIONS[name].rpartition(".")[2] for name in projections),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }
