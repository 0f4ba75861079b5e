"""Converts our stacked parameters to the tensors of a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from jaxtyping import Array

from app.model.decoder import DecoderDefinition, ParamPath, Params, flatten_by_path
from app.model.io.hf_weights import TensorEntry, expected_tensors
from app.model.lora import LORA_A, LORA_B, merge_adapters


class HfTensors:
    """The tensors under their Hugging Face names, in the order of the layers: a `TensorSource`.

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
        """Returns one tensor as float32, fetched from its devices."""
        entry = self._entries[name]
        array = self._arrays[entry.path] if entry.layer is None else self._layer_array(entry, entry.layer)
        return to_hf_layout(np.asarray(array), entry.path, entry.file_shape)

    def _layer_array(self, entry: TensorEntry, layer: int) -> Array:
        *inside, leaf = entry.path
        leaves = (leaf, LORA_A, LORA_B) if leaf == "kernel" else (leaf,)
        stacked = {name: self._arrays[path] for name in leaves if (path := (*inside, name)) in self._arrays}
        arrays = {name: slice_layer(array, layer, entry.expert) for name, array in stacked.items()}
        return merge_adapters(arrays, self._lora)[leaf]


@jax.jit
def slice_layer(stacked: Array, layer: int, expert: int | None = None) -> Array:
    """Returns one layer of a stacked array, with a layer dim of size 1, or one expert of that layer.

    The slice is taken on the devices: fetching the stacked array would copy all layers, and JAX would keep the copy.
    """
    if expert is None:
        return jax.lax.dynamic_slice_in_dim(stacked, layer, 1)
    return stacked[layer, expert]


def to_hf_layout(tensor: np.ndarray, path: ParamPath, file_shape: tuple[int, ...]) -> np.ndarray:
    """Inverts `hf_weights.from_hf_layout`: turns our `[*in, *out]` kernel into the file's `[out, in]` matrix."""
    if path[-1] == "kernel":
        return tensor.reshape(file_shape[::-1]).T
    return tensor.reshape(file_shape)
