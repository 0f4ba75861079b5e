"""Converts stacked parameters to Hugging Face tensors, and adapters to PEFT tensors, and writes safetensors files.

A model is written tensor by tensor, because the writer of the safetensors library keeps a whole file in memory.
Source: Hu et al. 2021, LoRA; the checkpoint format of PEFT, https://huggingface.co/docs/peft; the safetensors format,
https://huggingface.co/docs/safetensors (8 bytes of header length, little-endian, a JSON header of dtypes, shapes and
offsets, the tensors without gaps).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from jaxtyping import Array
from safetensors.numpy import save

from app.model.decoder import DecoderDefinition, Params, flatten_by_path
from app.model.io.hf_weights import LAYER_TENSORS, expected_tensors
from app.model.io.model_files import INDEX_FILE, NUMPY_TYPES, TensorSource
from app.model.lora import LORA_A, LORA_B, merge_adapters

PREFIX = "base_model.model.model.layers"
"""Path of the layers in an adapter file: two levels that PEFT adds, then their path in the base model."""

PROJECTIONS = {path[0]: name for name, path in LAYER_TENSORS.items() if name.endswith("_proj")}
"""Maps a projection's name in this program to its Hugging Face module: `query` -> `self_attn.q_proj`."""


SHARD_BYTES = 5_000_000_000
"""Maximum size of a weight file, unless a single tensor is larger; hubs and file systems accept this size."""

ALIGNMENT = 8
"""Alignment of the first tensor in bytes, for readers that memory-map the file."""

DTYPE_CODES = {dtype: code for code, dtype in NUMPY_TYPES.items()}
METADATA = {"format": "pt"}
"""transformers rejects a file without a framework name; `pt` means that matrices are `[out, in]`."""


class HfTensors:
    """A `TensorSource` of the tensors under their Hugging Face names, layer by layer.

    Names and shapes are those expected by `load_weights`. Adapters are merged into their kernels; without adapters,
    `load_weights` applied to this object returns the parameters bit for bit.
    """

    def __init__(self, definition: DecoderDefinition, params: Params) -> None:
        self._entries = {entry.name: entry for entry in expected_tensors(definition)}
        self._arrays = flatten_by_path(params)
        self._lora = definition.lora

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: entry.file_shape for name, entry in self._entries.items()}

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor as float32, fetched from its devices; a kernel `[*in, *out]` as a matrix `[out, in]`."""
        entry = self._entries[name]
        *inside, leaf = entry.path
        if entry.layer is None:
            array = self._arrays[entry.path]
        else:
            leaves = (leaf, LORA_A, LORA_B) if leaf == "kernel" else (leaf,)
            stacked = {one: self._arrays[path] for one in leaves if (path := (*inside, one)) in self._arrays}
            arrays = {one: slice_layer(array, entry.layer, entry.expert) for one, array in stacked.items()}
            array = merge_adapters(arrays, self._lora)[leaf]
        tensor, shape = np.asarray(array), entry.file_shape
        return tensor.reshape(shape[::-1]).T if leaf == "kernel" else tensor.reshape(shape)


@jax.jit
def slice_layer(stacked: Array, layer: int, expert: int | None = None) -> Array:
    """Returns one layer of a stacked array, with a layer dim of size 1, or one expert of that layer.

    The slice is taken on the devices: fetching the stacked array would copy all layers, and JAX would keep the copy.
    """
    if expert is None:
        return jax.lax.dynamic_slice_in_dim(stacked, layer, 1)
    return stacked[layer, expert]


def write_adapters(path: Path, adapters: Params, dtype: np.dtype) -> None:
    """Writes adapters under the names that PEFT gives them, each rounded once to `dtype`.

    `lora_A.weight` [r, in] = A^T and `lora_B.weight` [out, r] = B^T.
    """
    tensors = {}
    for (*_, projection, leaf), stacked in flatten_by_path(adapters).items():
        for layer, values in enumerate(np.asarray(stacked)):
            is_down = leaf == LORA_A
            matrix = values.reshape(-1, values.shape[-1]) if is_down else values.reshape(len(values), -1)
            name = f"{PREFIX}.{layer}.{PROJECTIONS[projection]}.{'lora_A' if is_down else 'lora_B'}.weight"
            tensors[name] = np.ascontiguousarray(matrix.T, dtype)
    # The library's save_file would make a file that only its owner can read.
    path.write_bytes(save(tensors, metadata=METADATA))


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
