"""The files of a model: a Hugging Face directory, a hub id, a GGUF file or a built-in model.

Opening a model reads only JSON and headers; tensors are read one at a time. Pickles and remote code are never loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from app.model.io.gguf import GgufFile
from app.model.io.hub import fetch_from_hub
from settings.errors import InputError, join_words
from settings.schema.model import BUILTIN_PREFIX, split_revision

BUILTIN_DIRECTORY = Path(__file__).parent.parent / "builtin"

CONFIG_FILE = "config.json"
ADAPTER_CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

HUB_FILES = (
    CONFIG_FILE,
    ADAPTER_CONFIG_FILE,
    "generation_config.json",
    WEIGHTS_FILE,
    INDEX_FILE,
    "model-*.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
)
"""The files downloaded from the hub: no pickles, no code."""

# safetensors looks up bfloat16 by name, which ml_dtypes registers with numpy.
NUMPY_TYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64),
}

NUM_SPOTS, SPOT_BYTES = 4, 4096
"""Number and size in bytes of the sampled spots of each tensor in a fingerprint: 5 MB in total for 300 tensors."""

DERIVED_TENSOR_SUFFIX = ".rotary_emb.inv_freq"
"""Suffix of buffers in old Llama checkpoints. They are skipped: the configuration determines them."""


class TensorSource(Protocol):
    """Named tensors on disk."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Maps the Hugging Face name of each tensor to its shape."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor in the file's float dtype; quantized tensors are dequantized to float32."""
        ...


@dataclass(frozen=True)
class ModelFiles:
    """An opened model: everything except the values of its tensors."""

    name: str
    """Name shown in messages: directory name, hub id, file stem or `builtin:<name>`."""
    path: Path
    """The Hugging Face directory, or the .gguf file."""
    config: dict[str, Any]
    generation_config: dict[str, Any]
    """The parsed `generation_config.json`; empty if there is none."""
    weights: TensorSource
    fingerprint: str
    """A digest that is equal on all hosts with the same model, and changes with training or merging an adapter.

    It may miss changes to a few weights, and does not protect against tampering: see `fingerprint`.
    """
    commit: str | None = None
    """The commit of the hub repository; None for models from elsewhere."""


class SafetensorsFiles:
    """One `model.safetensors`, or the shards that `model.safetensors.index.json` lists.

    Raises:
        InputError: a file is missing, truncated or not in safetensors format, or does not match the index.
    """

    def __init__(self, directory: Path) -> None:
        if (directory / WEIGHTS_FILE).is_file():
            indexed, paths = {}, [directory / WEIGHTS_FILE]
        elif (directory / INDEX_FILE).is_file():
            indexed = _indexed_shards(directory, directory / INDEX_FILE)
            paths = sorted(set(indexed.values()))
        else:
            pickles = sorted(file.name for pattern in PICKLE_PATTERNS for file in directory.glob(pattern))
            found = f"neither {WEIGHTS_FILE} nor {INDEX_FILE}"
            if pickles:
                found = f"weights only as pickles ({', '.join(pickles[:3])}), which can run arbitrary code when opened"
            raise InputError(f"model.path: {directory} has {found}; save the model as safetensors")
        handles = {path: _open_safetensors(path) for path in paths}
        held = {path: list(handle.keys()) for path, handle in handles.items()}
        # Tensors that the index omits are also loaded.
        self._shards = {name: path for path, names in held.items() for name in names} | indexed
        for path, names in held.items():
            if twice := next((name for name in names if self._shards[name] != path), None):
                raise InputError(
                    f"{directory}: tensor {twice!r} is in {path.name} and in {self._shards[twice].name}; save "
                    "the model again, so that each tensor is in one file"
                )
        self._shapes = {
            name: _checked_shape(directory, name, handles[shard], shard)
            for name, shard in self._shards.items()
            if not name.endswith(DERIVED_TENSOR_SUFFIX)
        }

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    @property
    def byte_ranges(self) -> dict[Path, dict[str, range]]:
        """Maps each file to its tensors' byte ranges, whose keys consist of a tensor's name, dtype and shape.

        Source: the safetensors format, https://huggingface.co/docs/safetensors.
        """
        found = {}
        for path in sorted(set(self._shards.values())):
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
            ranges = {
                f"{name}:{tensor['dtype']}:{tensor['shape']}": (8 + length + at for at in tensor["data_offsets"])
                for name, tensor in header.items()
                if name != "__metadata__"
            }
            found[path] = {name: range(*edges) for name, edges in ranges.items()}
        return found

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor as float32, float16, float64 or `ml_dtypes.bfloat16`, as stored."""
        # Reopened for each tensor: the pages of an open, mapped file would count as this process's memory.
        with safe_open(self._shards[name], framework="numpy") as shard:
            return shard.get_tensor(name)


class ConfigOnlyTensors:
    """An empty tensor source, for a model opened without its weights."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {}

    def read(self, name: str) -> np.ndarray:
        raise AssertionError(f"{name}: the model was opened without its weights")


def is_from_hub(path: str) -> bool:
    """Returns whether `model.path` is a hub id: local paths and built-in models take precedence."""
    local = Path(path).expanduser()
    return not (path.startswith(BUILTIN_PREFIX) or local.exists() or local.suffix == ".gguf")


def open_model(path: str, *, config_only: bool = False) -> ModelFiles:
    """Opens `model.path`; an existing file or directory takes precedence over a hub id of the same name.

    Args:
        config_only: whether to open, and to download from the hub, only the configuration.

    Raises:
        InputError: the model does not exist, or cannot be downloaded or used.
    """
    local, commit = Path(path).expanduser(), None
    if path.startswith(BUILTIN_PREFIX):
        directory, name = _builtin_directory(path), path
    elif local.is_dir():
        directory, name = local, local.resolve().name
    elif local.suffix == ".gguf":
        if not local.is_file():
            raise InputError(f"model.path: there is no file {local}; correct the path")
        gguf = GgufFile(local)
        config, generation = gguf.config(), gguf.generation_config()
        return ModelFiles(local.stem, local, config, generation, gguf, fingerprint(config, gguf.byte_ranges))
    elif local.is_file():
        raise InputError(f"model.path: {path} is not a .gguf file; set it to the model's directory or to a .gguf file")
    else:
        directory = fetch_from_hub(path, files=(CONFIG_FILE, ADAPTER_CONFIG_FILE) if config_only else HUB_FILES)
        name, commit = split_revision(path)[0], directory.name
    if (directory / ADAPTER_CONFIG_FILE).is_file():
        base = _read_json(directory / ADAPTER_CONFIG_FILE).get("base_model_name_or_path")
        raise InputError(
            f"model.path: {directory} contains a PEFT adapter ({ADAPTER_CONFIG_FILE}) of the model {base!r}; merge the "
            "two (peft: merge_and_unload, then save_pretrained, with the tokenizer), and set model.path to the result"
        )
    if not (directory / CONFIG_FILE).is_file():
        gguf_files = sorted(file.name for file in directory.glob("*.gguf"))
        hint = f"to use {gguf_files[0]}, set model.path to that file" if gguf_files else "set it to a model's directory"
        raise InputError(f"model.path: {directory} has no {CONFIG_FILE}, so it is not a Hugging Face model; {hint}")
    config = _read_json(directory / CONFIG_FILE)
    if config_only:
        return ModelFiles(name, directory, config, {}, ConfigOnlyTensors(), fingerprint(config, {}), commit)
    generation, weights = directory / "generation_config.json", SafetensorsFiles(directory)
    options = _read_json(generation) if generation.is_file() else {}
    digest = fingerprint(config, weights.byte_ranges)
    return ModelFiles(name, directory, config, options, weights, digest, commit)


def fingerprint(config: Mapping[str, Any], files: Mapping[Path, Mapping[str, range]]) -> str:
    """Returns a hex SHA-256 of a model's configuration, and of its tensors' names, positions and partial contents.

    Tensors up to 16 KiB are read whole. Of a larger one, the first and the last 4 KiB and two spots between them are
    read, so a change to the whole tensor is detected, but not a change to a few numbers elsewhere.
    """
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for path, extents in files.items():
        digest.update(f"{path.name}:{path.stat().st_size}".encode())
        with path.open("rb") as file:
            for name, extent in extents.items():
                digest.update(f"{name}:{extent.start}:{extent.stop}".encode())
                last, spots = len(extent) - SPOT_BYTES, [extent]
                if len(extent) > NUM_SPOTS * SPOT_BYTES:
                    starts = [last * place // (NUM_SPOTS - 1) for place in range(NUM_SPOTS)]
                    spots = [extent[start : start + SPOT_BYTES] for start in starts]
                for spot in spots:
                    file.seek(spot.start)
                    digest.update(file.read(len(spot)))
    return digest.hexdigest()


def _builtin_directory(path: str) -> Path:
    known = sorted(file.parent.name for file in BUILTIN_DIRECTORY.glob(f"*/{CONFIG_FILE}"))
    name = path.removeprefix(BUILTIN_PREFIX)
    if name not in known:
        listed = join_words(BUILTIN_PREFIX + each for each in known) if known else "a model outside this installation"
        raise InputError(f"model.path: there is no built-in model {path!r}; choose {listed}")
    return BUILTIN_DIRECTORY / name


def _indexed_shards(directory: Path, index: Path) -> dict[str, Path]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index} has no weight_map; download the model again")
    for shard in sorted(set(map(str, weight_map.values()))):
        if Path(shard).name != shard:
            raise InputError(f"{index}: shard {shard!r} must be a plain file name; download the model again")
        if not (directory / shard).is_file():
            raise InputError(f"{index}: shard {shard!r} is missing from {directory}; download the model again")
    return {name: directory / str(shard) for name, shard in weight_map.items()}


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{path} cannot be read as safetensors ({error}); download it again, or make it readable"
        ) from error


def _checked_shape(directory: Path, name: str, handle: Any, shard: Path) -> tuple[int, ...]:
    try:
        header = handle.get_slice(name)
    except SafetensorError as error:
        raise InputError(
            f"{directory / INDEX_FILE}: tensor {name!r} is not in shard {shard.name!r}, where the index places it; "
            "download the model again"
        ) from error
    if header.get_dtype() not in NUMPY_TYPES:
        raise InputError(
            f"{directory}: tensor {name!r} has dtype {header.get_dtype()}, expected "
            f"{join_words(NUMPY_TYPES)}; use the unquantized weights"
        )
    return tuple(header.get_shape())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON ({error}); download it again, or make it readable") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(value).__name__}; download it again")
    return value
