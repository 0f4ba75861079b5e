"""The files of a model: a Hugging Face directory, a hub id, a GGUF file or a built-in model.

Opening a model reads only JSON and headers; tensors are read one at a time. Pickles and remote code are never loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from app.model.io.fingerprint import fingerprint, safetensors_byte_ranges
from app.model.io.gguf import GgufFile
from app.model.io.hub import fetch_from_hub
from settings.errors import InputError
from settings.schema.model import split_revision

BUILTIN_PREFIX = "builtin:"
BUILTIN_DIRECTORY = Path(__file__).parent.parent / "builtin"

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

HUB_FILES = (
    CONFIG_FILE,
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

DERIVED_TENSOR_SUFFIX = ".rotary_emb.inv_freq"
"""The suffix of buffers in old Llama checkpoints, which can be computed from the configuration."""


class TensorSource(Protocol):
    """Named tensors on disk."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes by Hugging Face tensor name."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor in the file's float type; quantized tensors are converted to float32."""
        ...


@dataclass(frozen=True)
class ModelFiles:
    """An opened model: everything but the values of its tensors."""

    name: str
    """The name for messages: directory name, hub id, file stem or `builtin:<name>`."""
    path: Path
    """The Hugging Face directory, or the .gguf file."""
    config: dict[str, Any]
    generation_config: dict[str, Any]
    """The parsed `generation_config.json`; empty if there is none."""
    weights: TensorSource
    fingerprint: str
    """A digest that is equal on all hosts with the same model, and different after training or merging adapters.

    It may miss changes to a few numbers and does not prevent forgery: see `app.model.io.fingerprint`.
    """
    commit: str | None = None
    """The commit of the hub repository; None for other files."""


class SafetensorsFiles:
    """One `model.safetensors`, or the shards that `model.safetensors.index.json` lists.

    Raises:
        InputError: a file is missing, truncated or not in safetensors format, or does not match the index.
    """

    def __init__(self, directory: Path) -> None:
        index = directory / INDEX_FILE
        if (directory / WEIGHTS_FILE).is_file():
            handle = _open_safetensors(directory / WEIGHTS_FILE)
            handles = dict.fromkeys(handle.keys(), (directory / WEIGHTS_FILE, handle))
        elif index.is_file():
            handles = _open_shards(directory, index)
        else:
            raise _no_weights_error(directory)
        self.paths = sorted({shard for shard, _ in handles.values()})
        self._shards = {name: shard for name, (shard, _) in handles.items()}
        self._shapes = {
            name: _checked_shape(directory, name, handle)
            for name, (_, handle) in handles.items()
            if not name.endswith(DERIVED_TENSOR_SUFFIX)
        }

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor as float32, float16, float64 or `ml_dtypes.bfloat16`, as stored."""
        # Opened anew for each tensor: the pages of an open, mapped file would count as this process's memory.
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
        config_only: opens the configuration without weights, and downloads nothing else from the hub.

    Raises:
        InputError: the model does not exist, or cannot be downloaded or used.
    """
    local, commit = Path(path).expanduser(), None
    if path.startswith(BUILTIN_PREFIX):
        directory, name = _builtin_directory(path), path
    elif local.is_dir():
        directory, name = local, local.resolve().name
    elif local.suffix == ".gguf":
        return _open_gguf(local)
    elif local.is_file():
        raise InputError(f"model.path: {path} is a file, but not a .gguf file; set it to the model's directory")
    else:
        directory = fetch_from_hub(path, files=(CONFIG_FILE,) if config_only else HUB_FILES)
        name, commit = split_revision(path)[0], directory.name
    config = _read_config(directory)
    if config_only:
        return ModelFiles(name, directory, config, {}, ConfigOnlyTensors(), fingerprint(config, {}), commit)
    generation = directory / "generation_config.json"
    weights = SafetensorsFiles(directory)
    return ModelFiles(
        name=name,
        path=directory,
        config=config,
        generation_config=_read_json(generation) if generation.is_file() else {},
        weights=weights,
        fingerprint=fingerprint(config, {path: safetensors_byte_ranges(path) for path in weights.paths}),
        commit=commit,
    )


def _read_config(directory: Path) -> dict[str, Any]:
    if not (directory / CONFIG_FILE).is_file():
        gguf_files = sorted(file.name for file in directory.glob("*.gguf"))
        hint = f"; to use {gguf_files[0]}, set model.path to that file" if gguf_files else ""
        raise InputError(f"model.path: {directory} has no {CONFIG_FILE}, so it is not a Hugging Face model{hint}")
    return _read_json(directory / CONFIG_FILE)


def _open_gguf(path: Path) -> ModelFiles:
    if not path.is_file():
        raise InputError(f"model.path: there is no file {path}")
    weights = GgufFile(path)
    config = weights.config()
    return ModelFiles(
        name=path.stem,
        path=path,
        config=config,
        generation_config=weights.generation_config(),
        weights=weights,
        fingerprint=fingerprint(config, {path: weights.byte_ranges}),
    )


def _builtin_directory(path: str) -> Path:
    known = sorted(file.parent.name for file in BUILTIN_DIRECTORY.glob(f"*/{CONFIG_FILE}"))
    name = path.removeprefix(BUILTIN_PREFIX)
    if name not in known:
        listed = ", ".join(BUILTIN_PREFIX + each for each in known) or "none in this installation"
        raise InputError(f"model.path: there is no built-in model {path!r}; known: {listed}")
    return BUILTIN_DIRECTORY / name


def _open_shards(directory: Path, index: Path) -> dict[str, tuple[Path, Any]]:
    """Returns the path of each tensor's shard, and the opened shard."""
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index} has no weight_map; download the model again")
    shards = {}
    for shard in sorted(set(map(str, weight_map.values()))):
        if Path(shard).name != shard:
            raise InputError(f"{index}: shard {shard!r} must be a plain file name in the directory of the index")
        if not (directory / shard).is_file():
            raise InputError(f"{index}: shard {shard!r} is missing from {directory}; download the model again")
        shards[shard] = _open_safetensors(directory / shard)
    names = {shard: set(handle.keys()) for shard, handle in shards.items()}
    for name, shard in weight_map.items():
        if name not in names[shard]:
            raise InputError(f"{index}: tensor {name!r} is not in shard {shard!r}, where the index places it")
    return {name: (directory / shard, shards[shard]) for name, shard in weight_map.items()}


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is truncated or not a safetensors file ({error}); download it again") from error


def _checked_shape(directory: Path, name: str, handle: Any) -> tuple[int, ...]:
    header = handle.get_slice(name)
    if header.get_dtype() not in NUMPY_TYPES:
        raise InputError(
            f"{directory}: tensor {name!r} has type {header.get_dtype()}, which is not supported; "
            f"supported: {', '.join(NUMPY_TYPES)}; use the unquantized weights"
        )
    return tuple(header.get_shape())


def _no_weights_error(directory: Path) -> InputError:
    pickles = sorted(file.name for pattern in PICKLE_PATTERNS for file in directory.glob(pattern))
    if pickles:
        return InputError(
            f"model.path: {directory} has weights only as pickles ({', '.join(pickles[:3])}), which can "
            "run arbitrary code when opened; save the model as safetensors"
        )
    return InputError(
        f"model.path: {directory} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; "
        "no other kind of weight file is supported"
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value
