"""Writes safetensors files tensor by tensor, because the library's writer holds a whole file in memory.

Source: the safetensors format, https://huggingface.co/docs/safetensors (8 bytes of header length, little-endian, a
JSON header of types, shapes and offsets, the tensors without gaps).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory

from app.model.io.model_files import INDEX_FILE, NUMPY_TYPES, TensorSource

SHARD_BYTES = 5_000_000_000
"""Maximum size of a file, unless a single tensor is larger; hubs and file systems accept this size."""

ALIGNMENT = 8
"""Alignment of the first tensor in bytes, for readers that map the file."""

DTYPE_CODES = {dtype: code for code, dtype in NUMPY_TYPES.items()}
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
    """Writes the named tensors, each rounded once to `dtype`; only one at a time is in memory."""
    header, end = {}, 0
    for name in names:
        start, end = end, end + math.prod(source.shapes[name]) * dtype.itemsize
        header[name] = {"dtype": DTYPE_CODES[dtype], "shape": list(source.shapes[name]), "data_offsets": [start, end]}
    encoded = json.dumps({"__metadata__": METADATA, **header}, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for name in names:
            # Every platform supported by JAX is little-endian, like the format.
            file.write(
                np.ascontiguousarray(source.read(name).astype(dtype, copy=False)).reshape(-1).view(np.uint8).data
            )
