"""Provides weights from memory under the tensor names of Hugging Face."""

import weakref
from collections import Counter

import jax
import numpy as np

from app.model.architecture import Architecture
from app.model.decoder import DecoderDefinition, Params
from tests.tiny import random_params

Tensors = dict[str, np.ndarray]


class Held:
    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, name: str) -> np.ndarray:
        return self.tensors[name]


class Watched(Held):
    """A source that returns copies, and counts reads and earlier copies that are still alive."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(tensors)
        self.num_reads = Counter[str]()
        self.num_alive: list[int] = []
        self._buffers: list[weakref.ref[np.ndarray]] = []

    def read(self, name: str) -> np.ndarray:
        self.num_reads[name] += 1
        self.num_alive.append(sum(buffer() is not None for buffer in self._buffers))
        # Not aligned, like most tensors in a file: JAX may use an aligned array itself as the CPU's device buffer.
        buffer = np.empty(self.tensors[name].size + 1, np.float32)
        self._buffers.append(weakref.ref(buffer))
        buffer[1:] = self.tensors[name].ravel()
        return buffer[1:].reshape(self.tensors[name].shape)


def in_hugging_face_names(architecture: Architecture, params: Params) -> Tensors:
    """Inverts loading, weight by weight: Hugging Face stores `[out, in]` matrices."""
    blocks = jax.tree.map(np.asarray, params["blocks"])
    tensors = {
        "model.embed_tokens.weight": np.asarray(params["embedding"]),
        "model.norm.weight": np.asarray(params["final_norm"]["scale"]),
    }
    if not architecture.tied_embeddings:
        tensors["lm_head.weight"] = np.asarray(params["output"])
    for i in range(architecture.num_layers):
        layer = f"model.layers.{i}"
        tensors[f"{layer}.input_layernorm.weight"] = blocks["attention_norm"]["scale"][i]
        mlp_norm = "pre_feedforward_layernorm" if architecture.post_norms else "post_attention_layernorm"
        tensors[f"{layer}.{mlp_norm}.weight"] = blocks["mlp_norm"]["scale"][i]
        if architecture.post_norms:
            tensors[f"{layer}.post_attention_layernorm.weight"] = blocks["attention_post_norm"]["scale"][i]
            tensors[f"{layer}.post_feedforward_layernorm.weight"] = blocks["mlp_post_norm"]["scale"][i]
        if architecture.query_key_norms:
            tensors[f"{layer}.self_attn.q_norm.weight"] = blocks["query_norm"]["scale"][i]
            tensors[f"{layer}.self_attn.k_norm.weight"] = blocks["key_norm"]["scale"][i]
        for name, ours in (("q", "query"), ("k", "key"), ("v", "value")):
            tensors[f"{layer}.self_attn.{name}_proj.weight"] = (
                blocks[ours]["kernel"][i].reshape(architecture.model_dim, -1).T
            )
            if architecture.qkv_bias:
                tensors[f"{layer}.self_attn.{name}_proj.bias"] = blocks[ours]["bias"][i].reshape(-1)
        output = blocks["attention_output"]
        tensors[f"{layer}.self_attn.o_proj.weight"] = output["kernel"][i].reshape(-1, architecture.model_dim).T
        if architecture.attention_output_bias:
            tensors[f"{layer}.self_attn.o_proj.bias"] = output["bias"][i]
        if architecture.num_experts is not None:
            experts, is_mixtral = blocks["experts"], architecture.family == "mixtral"
            mlp = "block_sparse_moe" if is_mixtral else "mlp"
            tensors[f"{layer}.{mlp}.gate.weight"] = experts["router"][i]
            for name, of_mixtral in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
                for e, kernel in enumerate(experts[name]["kernel"][i]):
                    tensors[f"{layer}.{mlp}.experts.{e}.{of_mixtral if is_mixtral else f'{name}_proj'}.weight"] = (
                        kernel.T
                    )
            continue
        for name in ("gate", "up", "down"):
            tensors[f"{layer}.mlp.{name}_proj.weight"] = blocks[name]["kernel"][i].T
            if architecture.mlp_bias:
                tensors[f"{layer}.mlp.{name}_proj.bias"] = blocks[name]["bias"][i]
    return tensors


def random_file(architecture: Architecture) -> tuple[Params, Tensors]:
    params = random_params(DecoderDefinition.create(architecture))
    return params, in_hugging_face_names(architecture, params)
