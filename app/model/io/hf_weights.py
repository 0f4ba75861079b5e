"""Loads Hugging Face tensors into stacked, sharded parameters, one tensor at a time.

Loading is strict: a missing, extra or mis-shaped tensor raises an error that names it.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from app.model.architecture import Architecture
from app.model.decoder import DecoderDefinition, ParamPath, Params, flatten_by_path
from app.model.io.model_files import TensorSource
from app.records.text_format import format_count
from settings.errors import InputError

log = logging.getLogger(__name__)

LAYER_TENSORS: dict[str, ParamPath] = {
    "input_layernorm.weight": ("attention_norm", "scale"),
    "self_attn.q_norm.weight": ("query_norm", "scale"),
    "self_attn.k_norm.weight": ("key_norm", "scale"),
    "self_attn.q_proj": ("query",),
    "self_attn.k_proj": ("key",),
    "self_attn.v_proj": ("value",),
    "self_attn.o_proj": ("attention_output",),
    "mlp.gate_proj": ("gate",),
    "mlp.up_proj": ("up",),
    "mlp.down_proj": ("down",),
}
"""Tensor name after `model.layers.<i>.` -> parameter; a projection's name omits `.weight` and the optional `.bias`."""

EXPERT = "<expert>"
"""Placeholder for the index of an expert in tensor names."""
QWEN_EXPERTS: dict[str, ParamPath] = {
    "mlp.gate.weight": ("experts", "router"),
    f"mlp.experts.{EXPERT}.gate_proj": ("experts", "gate"),
    f"mlp.experts.{EXPERT}.up_proj": ("experts", "up"),
    f"mlp.experts.{EXPERT}.down_proj": ("experts", "down"),
}
MIXTRAL_EXPERTS: dict[str, ParamPath] = {
    "block_sparse_moe.gate.weight": ("experts", "router"),
    f"block_sparse_moe.experts.{EXPERT}.w1": ("experts", "gate"),
    f"block_sparse_moe.experts.{EXPERT}.w3": ("experts", "up"),
    f"block_sparse_moe.experts.{EXPERT}.w2": ("experts", "down"),
}

PRE_NORM_TENSORS: dict[str, ParamPath] = {"post_attention_layernorm.weight": ("mlp_norm", "scale")}
POST_NORM_TENSORS: dict[str, ParamPath] = {
    "post_attention_layernorm.weight": ("attention_post_norm", "scale"),
    "pre_feedforward_layernorm.weight": ("mlp_norm", "scale"),
    "post_feedforward_layernorm.weight": ("mlp_post_norm", "scale"),
}
"""Norms of families that also normalize after attention and MLP; elsewhere, the first tensor is `mlp_norm`."""

EMBEDDING, LM_HEAD, VALUE_HEAD = "model.embed_tokens.weight", "lm_head.weight", "score.weight"
TOP_TENSORS: dict[str, ParamPath] = {
    EMBEDDING: ("embedding",),
    "model.norm.weight": ("final_norm", "scale"),
    LM_HEAD: ("output",),
    VALUE_HEAD: ("value",),
}
"""Tensor outside the layers -> parameter; `score.weight` is the head of a sequence classifier with one label."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a file and its position in the parameters."""

    name: str
    path: ParamPath
    layer: int | None
    """Index along the leading L dim; None for weights that are not stacked."""
    file_shape: tuple[int, ...]
    expert: int | None = None
    """Index along the dim of experts, which follows L; None for weights that experts share."""


def hf_tensor_shape(path: ParamPath, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape that one layer's parameter has in a file: `[out, in]` for kernels, flat for biases."""
    if path[-1] == "kernel":
        outputs = shape[-1:] if path[-2] in ("attention_output", "gate", "up", "down") else shape[-2:]
        inputs = shape[: len(shape) - len(outputs)]
        return (int(np.prod(outputs)), int(np.prod(inputs)))
    if path == TOP_TENSORS[VALUE_HEAD]:
        return (1, *shape)
    return (int(np.prod(shape)),) if path[-1] == "bias" else shape


def from_hf_layout(tensor: np.ndarray, path: ParamPath, shape: tuple[int, ...]) -> np.ndarray:
    """Converts a file's `[out, in]` matrix to a `[*in, *out]` kernel; only reshapes other tensors."""
    return (tensor.T if path[-1] == "kernel" else tensor).reshape(shape)


def expected_tensors(definition: DecoderDefinition) -> list[TensorEntry]:
    """Returns every tensor that the architecture needs: first those outside the layers, then layer by layer."""
    flat = flatten_by_path(definition.unquantized.shapes)
    entries = [
        TensorEntry(name, path, None, hf_tensor_shape(path, flat[path].shape))
        for name, path in TOP_TENSORS.items()
        if path in flat
    ]
    arch = definition.architecture
    layer_tensors = LAYER_TENSORS | (POST_NORM_TENSORS if arch.post_norms else PRE_NORM_TENSORS)
    layer_tensors |= MIXTRAL_EXPERTS if arch.family == "mixtral" else QWEN_EXPERTS
    for layer in range(arch.num_layers):
        for suffix, tail in layer_tensors.items():
            for leaf, ending in (((), ""), (("kernel",), ".weight"), (("bias",), ".bias")):
                if (path := ("blocks", *tail, *leaf)) not in flat:
                    continue
                name, shape = f"model.layers.{layer}.{suffix}{ending}", flat[path].shape[1:]
                experts = range(shape[0]) if EXPERT in name else (None,)
                file_shape = hf_tensor_shape(path, shape[1:] if EXPERT in name else shape)
                entries += [
                    TensorEntry(name.replace(EXPERT, str(expert)), path, layer, file_shape, expert)
                    for expert in experts
                ]
    return entries


def critic_tensors(definition: DecoderDefinition, shapes: Mapping[str, tuple[int, ...]]) -> list[TensorEntry]:
    """Returns the tensors that a value decoder loads from a checkpoint.

    From a causal language model, it loads all tensors except the head; the value head then starts as zeros.
    """
    entries = expected_tensors(definition)
    return entries if VALUE_HEAD in shapes else [entry for entry in entries if entry.name != VALUE_HEAD]


def has_own_head(source: TensorSource) -> bool:
    """Returns whether the checkpoint has an LM head that differs from the embedding matrix."""
    if not source.shapes.keys() >= {EMBEDDING, LM_HEAD}:
        return False
    return not np.array_equal(source.read(EMBEDDING), source.read(LM_HEAD))


@dataclass(frozen=True)
class FirstTokens:
    """A tensor source whose embedding and LM head have only the rows of the first `vocab_size` tokens."""

    source: TensorSource
    vocab_size: int

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {
            name: (self.vocab_size, *shape[1:]) if name in (EMBEDDING, LM_HEAD) else shape
            for name, shape in self.source.shapes.items()
        }

    def read(self, name: str) -> np.ndarray:
        tensor = self.source.read(name)
        return tensor[: self.vocab_size] if name in (EMBEDDING, LM_HEAD) else tensor


def check_tensors(
    entries: list[TensorEntry], shapes: Mapping[str, tuple[int, ...]], architecture: Architecture
) -> None:
    """Raises InputError with the name of the first missing, extra or mis-shaped tensor."""
    expected = {entry.name: entry.file_shape for entry in entries}
    # The file of a tied model may repeat the embedding as the head; a critic ignores a language model's head.
    optional = set() if VALUE_HEAD in expected else {LM_HEAD}
    missing = [name for name in expected if name not in shapes]
    extra = [n for n in shapes if n not in expected and n not in optional]
    if missing:
        # Only the first 200, because a comparison with tens of thousands of experts' names takes seconds.
        near = difflib.get_close_matches(missing[0], extra[:200], n=1)
        hint = f"; the file has {near[0]!r}, which is not expected" if near else ""
        raise InputError(
            f"model.path: missing tensors: {len(missing)}, first {missing[0]!r}{hint}. "
            f"config.json describes a {architecture.family} model, which these weights do not fit; use "
            "the config.json that was saved with them"
        )
    if extra:
        raise InputError(
            f"model.path: tensors unknown to a {architecture.family} model: {len(extra)}, first {extra[0]!r}. "
            "Ignoring them would change the network; use the config.json that was saved with the weights"
        )
    for name, shape in expected.items():
        if tuple(shapes[name]) != shape:
            raise InputError(
                f"model.path: tensor {name!r} has shape {tuple(shapes[name])}, expected {shape} from config.json; "
                "use the config.json that was saved with the weights"
            )


def load_weights(
    definition: DecoderDefinition, source: TensorSource, mesh: Mesh, *, entries: list[TensorEntry] | None = None
) -> Params:
    """Reads every tensor once into its sharded parameter.

    Host memory contains one tensor at a time, or one matrix of all experts of a layer. Parameters get the definition's
    dtypes: float32, unless they are quantized or `held_in` another dtype.

    Args:
        entries: the tensors to read; None = all tensors of the architecture. Other weights are zeros.

    Raises:
        InputError: a tensor is missing, extra or mis-shaped; raised before anything is placed on devices.
    """
    entries = expected_tensors(definition) if entries is None else entries
    check_tensors(entries, source.shapes, definition.architecture)
    in_files = flatten_by_path(definition.unquantized.shapes)
    shapes, shardings = flatten_by_path(definition.shapes), flatten_by_path(definition.shardings(mesh))

    def read(entry: TensorEntry) -> dict[ParamPath, np.ndarray]:
        shape = in_files[entry.path].shape
        tensor = np.asarray(source.read(entry.name)).astype(np.float32, copy=False)
        num_stacked = (entry.layer is not None) + (entry.expert is not None)
        tensor = from_hf_layout(tensor, entry.path, shape[num_stacked:])
        if entry.path not in shapes:
            return quantize_kernel(definition, entry.path, tensor)
        return {entry.path: tensor.astype(shapes[entry.path].dtype, copy=False)}

    def read_experts(path: ParamPath, entries: Iterable[TensorEntry]) -> dict[ParamPath, np.ndarray]:
        stacked = np.empty(shapes[path].shape[1:], shapes[path].dtype)
        for entry in entries:
            stacked[entry.expert] = read(entry)[path]
        return {path: stacked}

    def write(parts: dict[ParamPath, np.ndarray], layer: int) -> None:
        for path, part in parts.items():
            sharding = shardings[path]
            params[path] = make_layer_writer(sharding)(
                params[path], place_tensor(part, NamedSharding(mesh, PartitionSpec(*sharding.spec[1:]))), layer
            )

    num_values = sum(int(np.prod(entry.file_shape)) for entry in entries)
    size = f"{format_count(len(entries), 'tensor')} ({format_count(num_values, 'value')})"
    log.info("loading %s onto %s", size, format_count(mesh.size, "device"))
    params: dict[ParamPath, Array] = {
        entry.path: place_tensor(read(entry)[entry.path], shardings[entry.path])
        for entry in entries
        if entry.layer is None
    }
    zeros = [path for path in shapes if path not in params]
    params |= jax.jit(
        lambda: {path: jnp.zeros(shapes[path].shape, shapes[path].dtype) for path in zeros},
        out_shardings={path: shardings[path] for path in zeros},
    )()
    stacked = [entry for entry in entries if entry.layer is not None]
    for (path, layer), (entry, *others) in itertools.groupby(stacked, key=lambda entry: (entry.path, entry.layer)):
        assert layer is not None
        # Keep no reference to the tensor here: it would stay in memory while the next one is read.
        write(read(entry) if entry.expert is None else read_experts(path, [entry, *others]), layer)
    return unflatten_dict(params)


def quantize_kernel(definition: DecoderDefinition, path: ParamPath, kernel: np.ndarray) -> dict[ParamPath, np.ndarray]:
    """Quantizes the kernel of one layer and returns its codes and scales, with their paths as keys."""
    parts = definition.quantizer(path).quantize(kernel)
    return {(*path[:-1], leaf): np.asarray(part) for leaf, part in parts.items()}


def place_tensor(tensor: np.ndarray, sharding: NamedSharding) -> Array:
    """Returns the tensor as a sharded array. Every host must pass the whole tensor."""
    return jax.make_array_from_callback(tensor.shape, sharding, lambda index: tensor[index])


@functools.cache
def make_layer_writer(sharding: NamedSharding) -> Callable[[Array, Array, int], Array]:
    """Returns a compiled function (stacked, value, layer) -> stacked that sets stacked[layer] = value in place."""
    return jax.jit(
        lambda stacked, value, layer: jax.lax.dynamic_update_index_in_dim(stacked, value, layer, 0),
        donate_argnums=0,
        out_shardings=sharding,
    )
