"""Writes safetensors files of limited size, so that one file's tensors are in memory at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.numpy import save_file

from app.model.io.model_files import INDEX_FILE, TensorSource

SHARD_BYTES = 5_000_000_000
"""Maximum size of a file, unless a single tensor is larger; hubs and file systems accept this size."""
METADATA = {"format": "pt"}
"""transformers rejects a file without the name of a framework; `pt` means that matrices are `[out, in]`."""


def write_sharded_safetensors(
    directory: Path, source: TensorSource, dtype: np.dtype, *, shard_bytes: int = SHARD_BYTES
) -> list[str]:
    """Writes every tensor of `source`, rounded to `dtype`; returns the names of the weight files.

    The result is a single `model.safetensors`, or several shards and their index.
    """
    plan = split_state_dict_into_shards_factory(
        {name: math.prod(shape) * dtype.itemsize for name, shape in source.shapes.items()},
        get_storage_size=lambda num_bytes: num_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    for file, names in plan.filename_to_tensors.items():
        write_safetensors(directory / file, source, names, dtype)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [*plan.filename_to_tensors]


def write_safetensors(path: Path, source: TensorSource, names: Sequence[str], dtype: np.dtype) -> None:
    """Writes the named tensors, each rounded once to `dtype`."""
    tensors = {name: np.ascontiguousarray(source.read(name).astype(dtype, copy=False)) for name in names}
    save_file(tensors, path, metadata=METADATA)
