"""Reads GGUF files as the Hugging Face checkpoints they were converted from.

The `gguf` package parses and dequantizes. This module reverses llama.cpp's conversion: it restores tensor names, the
row order of llama's q and k projections, and the `config.json` fields from the metadata.

Source: the GGUF specification (ggml-org/ggml, docs/gguf.md) and llama.cpp, `convert_hf_to_gguf.py`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, ReaderTensor
from gguf.quants import dequantize

from settings.errors import InputError, join_words

HUGGING_FACE_CLASSES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
"""Maps a file's `general.architecture` to the `model_type` and the class named in the rebuilt `config.json`."""

CHUNK_BYTES = 1 << 16
"""Number of bytes dequantized at a time, so that intermediate arrays stay in a core's cache."""

WORKAROUND = "use the model's safetensors checkpoint, as a directory or a hub id"

OUTER_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_TENSORS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LAYERS_OF_GEMMA_3_27B = 62


class FastListReader(GGUFReader):
    """Reads each list, such as the vocabulary, at once; `GGUFReader` makes an array per entry, which takes seconds."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        start = orig_offs + 12
        kind, count = int(self._get(orig_offs, np.uint32)[0]), int(self._get(orig_offs + 4, np.uint64)[0])
        types = [GGUFValueType.ARRAY, GGUFValueType(kind)]
        if kind in self.gguf_scalar_to_np:
            values = self._get(start, self.gguf_scalar_to_np[types[1]], count)
            if len(values) != count:
                raise ValueError(f"a list of {count} values goes beyond the end of the file")
            return 12 + values.nbytes, [values], [0], types
        if kind != GGUFValueType.STRING:
            return super()._get_field_parts(orig_offs, raw_type)
        texts, end, data = [], start, self.data.data
        for _ in range(count):
            (size,) = struct.unpack_from("<Q", data, end)
            texts.append(data[end + 8 : end + 8 + size])
            end += 8 + size
        return end - orig_offs, texts, list(range(count)), types


class GgufFile:
    """A GGUF file: tensors with Hugging Face names, dequantized when read; metadata; and rebuilt configuration files.

    Raises:
        InputError: the file is damaged, or its architecture, a tensor or a quantization is not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = FastListReader(path)
        except (OSError, ValueError, KeyError, IndexError, OverflowError, struct.error) as error:
            raise InputError(
                f"{path} cannot be read as a GGUF file ({error}); download it again, or give another file"
            ) from error
        self._family = self.metadata("general.architecture")
        if self._family not in HUGGING_FACE_CLASSES:
            raise InputError(
                f"{path}: GGUF architecture {self._family!r} is not supported, expected "
                f"{join_words(HUGGING_FACE_CLASSES)}; {WORKAROUND}"
            )
        self._tensors = {self._hugging_face_name(tensor.name): tensor for tensor in self._reader.tensors}
        if "model.embed_tokens.weight" not in self._tensors:
            raise InputError(f"{path}: tensor 'token_embd.weight' is missing; give the GGUF file of a language model")
        num_heads = self._positive_int("attention.head_count")
        self._num_heads = {"attn_q": num_heads, "attn_k": self._positive_int("attention.head_count_kv", num_heads)}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Maps the Hugging Face name of each tensor to its shape, outermost dim first."""
        return {name: _shape(tensor) for name, tensor in self._tensors.items()}

    @property
    def byte_ranges(self) -> dict[Path, dict[str, range]]:
        """Maps the file's path to its tensors, and each tensor's Hugging Face name to its byte range."""
        edges = {name: (int(one.data_offset), int(one.n_bytes)) for name, one in self._tensors.items()}
        return {self.path: {name: range(start, start + size) for name, (start, size) in edges.items()}}

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor as float32, in Hugging Face's row order."""
        tensor = self._tensors[name]
        values = np.empty(_shape(tensor), np.float32)
        data = np.asarray(tensor.data).reshape(-1, tensor.data.shape[-1])  # a vector is one row
        rows = values.reshape(len(data), -1)
        step = max(1, CHUNK_BYTES * len(data) // max(1, data.nbytes))
        try:
            for start in range(0, len(data), step):
                part = rows[start : start + step]
                # As one row, because the package processes 16 rows at a time, whatever their length.
                part[:] = dequantize(data[start : start + step].reshape(1, -1), tensor.tensor_type).reshape(part.shape)
        except NotImplementedError as error:
            raise InputError(
                f"{self.path}: tensor {tensor.name!r}: {error}; use a file with another quantization"
            ) from error
        stem = tensor.name.split(".")[-2]
        if self._family == "gemma3" and stem.endswith("norm"):
            return values - 1  # llama.cpp stores the full factor, Gemma its difference from 1.
        is_rotated = self._family == "llama" and stem in self._num_heads
        return self._unpermute(values, self._num_heads[stem]) if is_rotated else values

    def metadata(self, key: str, default: Any = None) -> Any:
        """Returns a metadata value as a plain Python object.

        Raises:
            InputError: the value is damaged, or it is missing and there is no default.
        """
        field = self._reader.get_field(key)
        try:
            value = default if field is None else field.contents()
        except (ValueError, IndexError, OverflowError, MemoryError) as error:
            raise InputError(
                f"{self.path}: GGUF metadata {key!r} is damaged ({error}); download the file again"
            ) from error
        if value is None:
            raise InputError(f"{self.path}: GGUF metadata {key!r} is missing; {WORKAROUND}")
        return value

    def config(self) -> dict[str, Any]:
        """Returns the `config.json` fields that determine the architecture."""
        model_dim = self._positive_int("embedding_length")
        head_dim = self._positive_int("attention.key_length", model_dim // self._num_heads["attn_q"])
        scaling = self._family_metadata("rope.scaling.type", "none")
        model_type, class_name = HUGGING_FACE_CLASSES[self._family]
        num_layers, own = self._family_metadata("block_count"), {"hidden_act": "silu"}
        if self._family == "gemma3":
            # The file has no query scale; llama.cpp also derives it from the number of layers.
            scale = model_dim // self._num_heads["attn_q"] if num_layers == LAYERS_OF_GEMMA_3_27B else head_dim
            window = self._positive_int("attention.sliding_window")
            own = {"sliding_window": window, "query_pre_attn_scalar": scale}
        elif window := self._family_metadata("attention.sliding_window", 0):
            raise InputError(
                f"{self.path}: GGUF metadata '{self._family}.attention.sliding_window' = {window} is not supported; "
                f"{WORKAROUND}"
            )
        return {
            "architectures": [class_name],
            "model_type": model_type,
            "vocab_size": self.shapes["model.embed_tokens.weight"][0],
            "hidden_size": model_dim,
            "intermediate_size": self._family_metadata("feed_forward_length"),
            "num_hidden_layers": num_layers,
            "num_attention_heads": self._num_heads["attn_q"],
            "num_key_value_heads": self._num_heads["attn_k"],
            "head_dim": head_dim,
            "max_position_embeddings": self._family_metadata("context_length"),
            "rms_norm_eps": self._float32("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._float32("rope.freq_base", 10_000.0),
            "rope_scaling": None
            if scaling == "none"
            else {"rope_type": scaling, "factor": self._float32("rope.scaling.factor", 1.0)},
            "partial_rotary_factor": self._family_metadata("rope.dimension_count", head_dim) / head_dim,
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._tensors,
            "mlp_bias": "model.layers.0.mlp.up_proj.bias" in self._tensors,
            **own,
        }

    def generation_config(self) -> dict[str, Any]:
        """Returns the token ids that end a sequence, turn or message, in the format of `generation_config.json`."""
        keys = [f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom")]
        ids = [self.metadata(key) for key in keys if self._reader.get_field(key) is not None]
        return {"eos_token_id": sorted(set(ids))}

    def _family_metadata(self, key: str, default: Any = None) -> Any:
        return self.metadata(f"{self._family}.{key}", default)

    def _positive_int(self, key: str, default: int | None = None) -> int:
        value = self._family_metadata(key, default)
        if not isinstance(value, int) or value < 1:
            raise InputError(
                f"{self.path}: GGUF metadata '{self._family}.{key}' must be one positive integer, got {value!r}; "
                f"{WORKAROUND}"
            )
        return value

    def _float32(self, key: str, default: float | None = None) -> float:
        """Returns a float32 value as its shortest decimal: 1e-05, not 9.99999974e-06."""
        return float(str(np.float32(self._family_metadata(key, default))))

    def _unpermute(self, values: np.ndarray, num_heads: int) -> np.ndarray:
        """Reorders the rows of each head from (H/2, 2) to (2, H/2).

        Rotary embedding pairs adjacent rows in llama.cpp, and rows i and i + H/2 in Hugging Face.
        """
        rows = values.shape[0]
        if rows % (2 * num_heads):
            raise InputError(
                f"{self.path}: {rows} rows of a q or k projection cannot be split into {num_heads} heads; download the "
                "file again"
            )
        by_pair = values.reshape(num_heads, rows // num_heads // 2, 2, -1)
        return np.ascontiguousarray(by_pair.swapaxes(1, 2)).reshape(values.shape)

    def _hugging_face_name(self, name: str) -> str:
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        layer, stem, leaf = match.groups("") if match else ("", "", "")
        block_tensors = BLOCK_TENSORS | (GEMMA_TENSORS if self._family == "gemma3" else {})
        module = block_tensors.get(stem) if layer else OUTER_TENSORS.get(stem)
        if module is not None and (leaf == "weight" or module.endswith("_proj")):
            return f"model.layers.{layer}.{module}.{leaf}" if layer else f"{module}.{leaf}"
        why = "scales rotary frequencies one by one" if stem == "rope_freqs" else "is unknown in this architecture"
        raise InputError(f"{self.path}: GGUF tensor {name!r} is not supported, because it {why}; {WORKAROUND}")


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    """Returns the shape, outermost dim first; GGUF stores the innermost first."""
    return tuple(int(size) for size in reversed(tensor.shape))
