"""Safetensors files, written tensor by tensor: the library's own writer wants all of a file in memory at once.

Source: the safetensors format, https://huggingface.co/docs/safetensors (8 bytes of header length, little-endian, a
JSON header of types, shapes and offsets, the tensors without gaps).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from app.model.io.model_files import INDEX_FILE, NUMPY_TYPES, WEIGHTS_FILE, TensorSource

SHARD_BYTES = 5_000_000_000
"""Of a file at most, unless a single tensor is larger: what hubs and file systems take without complaint."""

ALIGNMENT = 8
"""Of the first tensor, in bytes: readers map the file."""

DTYPE_CODES = {dtype: code for code, dtype in NUMPY_TYPES.items()}
METADATA = {"format": "pt"}
"""transformers refuses a file that does not say which framework's layout it has; matrices here are `[out, in]`."""


def write_sharded_safetensors(
    directory: Path, source: TensorSource, dtype: np.dtype, *, shard_bytes: int = SHARD_BYTES
) -> list[str]:
    """Writes every tensor of `source`, rounded to `dtype`; returns the names of the weight files.

    One `model.safetensors`, or shards and the index that names them.
    """
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in source.shapes.items()}
    shards = split_into_shards(sizes, shard_bytes)
    if len(shards) == 1:
        write_safetensors(directory / WEIGHTS_FILE, source, shards[0], dtype)
        return [WEIGHTS_FILE]
    stem = WEIGHTS_FILE.removesuffix(".safetensors")
    files = [f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for file, names in zip(files, shards, strict=True):
        write_safetensors(directory / file, source, names, dtype)
    index = {
        "metadata": {"total_size": sum(sizes.values())},
        "weight_map": {name: file for file, names in zip(files, shards, strict=True) for name in names},
    }
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return files


def split_into_shards(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """Names in their order, cut where the next would make a shard larger than `shard_bytes`."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def write_safetensors(path: Path, source: TensorSource, names: Sequence[str], dtype: np.dtype) -> None:
    """Writes the tensors of these names, rounded to `dtype` once each; one at a time is in memory."""
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
            # No name for what is read, which would keep it alive while the next one is.
            file.write(_as_bytes(source.read(name), dtype))


def _as_bytes(tensor: np.ndarray, dtype: np.dtype) -> memoryview:
    """Little-endian, as all that JAX runs on is."""
    return np.ascontiguousarray(tensor.astype(dtype, copy=False)).reshape(-1).view(np.uint8).data
