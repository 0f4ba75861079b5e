"""Tests of loading weights: strict names and shapes, one tensor at a time, bit for bit on any mesh."""

from __future__ import annotations

import re
import weakref
from collections import Counter
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from app.model.architecture import Architecture
from app.model.decoder import DecoderDefinition, Params, ValueDecoder
from app.model.io.hf_weights import critic_tensors, load_weights
from settings.errors import InputError
from tests.tiny import BIASED, EVEN, EXPERTS, MIXTURE, ODD, SWITCHED, SWITCHES, make_mesh, random_params

Tensors = dict[str, np.ndarray]

QUERY_0 = "model.layers.0.self_attn.q_proj.weight"


class Held:
    """Tensors of a file that are held in memory."""

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
        # Four bytes off, like most tensors in a file: an aligned array may itself become the CPU's device buffer.
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


def load(architecture: Architecture, source: Held, mesh_shape: tuple[int, int, int] = (1, 1, 1)) -> Params:
    return load_weights(DecoderDefinition.create(architecture), source, make_mesh(mesh_shape))


def random_file(architecture: Architecture) -> tuple[Params, Tensors]:
    params = random_params(DecoderDefinition.create(architecture))
    return params, in_hugging_face_names(architecture, params)


def shardings(params: Params) -> dict[str, PartitionSpec]:
    """Returns the spec of each weight by its dotted path, without trailing Nones."""
    specs = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        axes = list(leaf.sharding.spec)
        while axes and axes[-1] is None:
            axes.pop()
        specs[".".join(key.key for key in path)] = PartitionSpec(*axes)
    return specs


MESHES = pytest.mark.parametrize("mesh_shape", [(1, 1, 1), (2, 2, 2)], ids=str)


@MESHES
@pytest.mark.parametrize(
    "architecture",
    [ODD, BIASED, EVEN, SWITCHED, MIXTURE, replace(EVEN, **EXPERTS | {"family": "mixtral", "query_key_norms": False})],
    ids=["odd-tied", "odd-untied-biases", "even-tied", "every-switch", "qwen3_moe", "mixtral"],
)
def test_weights_come_back_bit_for_bit_on_every_mesh_each_read_once_and_alone(architecture, mesh_shape):
    params, tensors = random_file(architecture)
    source = Watched(tensors)
    loaded = load(architecture, source, mesh_shape)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {np.dtype(np.float32)}
    assert source.num_reads == dict.fromkeys(tensors, 1)
    # JAX itself lets go of a large array only at its next call; behind a layer's there is one, behind these none.
    num_unstacked_matrices = 1 if architecture.tied_embeddings else 2
    assert sum(source.num_alive) <= num_unstacked_matrices


def test_weights_lie_where_the_rule_table_puts_them():
    axes = PartitionSpec
    _, tensors = random_file(EVEN)
    assert shardings(load(EVEN, Held(tensors), (2, 2, 2))) == {
        "embedding": axes("tp", "fsdp"),
        "final_norm.scale": axes("fsdp"),
        "blocks.attention_norm.scale": axes(None, "fsdp"),
        "blocks.query.kernel": axes(None, "fsdp", "tp"),
        "blocks.key.kernel": axes(None, "fsdp", "tp"),
        "blocks.value.kernel": axes(None, "fsdp", "tp"),
        "blocks.attention_output.kernel": axes(None, "tp", None, "fsdp"),
        "blocks.mlp_norm.scale": axes(None, "fsdp"),
        "blocks.gate.kernel": axes(None, "fsdp", "tp"),
        "blocks.up.kernel": axes(None, "fsdp", "tp"),
        "blocks.down.kernel": axes(None, "tp", "fsdp"),
    }


def test_whole_experts_lie_along_tp_and_the_router_on_every_device_of_it():
    architecture = replace(EVEN, **EXPERTS)
    _, tensors = random_file(architecture)
    specs = shardings(load(architecture, Held(tensors), (2, 2, 2)))
    assert specs["blocks.experts.router"] == PartitionSpec(None, None, "fsdp")
    assert specs["blocks.experts.gate.kernel"] == specs["blocks.experts.up.kernel"] == PartitionSpec(None, "tp", "fsdp")
    assert specs["blocks.experts.down.kernel"] == PartitionSpec(None, "tp", None, "fsdp")


def test_norms_of_heads_are_whole_on_every_device_and_norms_of_the_width_are_split():
    architecture = replace(EVEN, **SWITCHES)
    _, tensors = random_file(architecture)
    specs = shardings(load(architecture, Held(tensors), (2, 2, 2)))
    assert specs["blocks.query_norm.scale"] == specs["blocks.key_norm.scale"] == PartitionSpec()
    for norm in ("attention_post_norm", "mlp_norm", "mlp_post_norm"):
        assert specs[f"blocks.{norm}.scale"] == PartitionSpec(None, "fsdp")


def test_a_dim_that_its_axis_does_not_divide_is_whole_on_every_device():
    _, tensors = random_file(ODD)
    specs = shardings(load(ODD, Held(tensors), (2, 2, 2)))
    assert specs["embedding"] == PartitionSpec(None, "fsdp")  # 53 tokens over tp = 2
    assert specs["blocks.key.kernel"] == PartitionSpec(None, "fsdp")  # 3 key heads over tp = 2
    assert specs["blocks.query.kernel"] == PartitionSpec(None, "fsdp", "tp")


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16], ids=lambda dtype: dtype.__name__)
def test_every_stored_type_becomes_float32(dtype):
    params, tensors = random_file(ODD)
    stored = load(ODD, Held({name: tensor.astype(dtype) for name, tensor in tensors.items()}))
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(dtype).astype(np.float32), params)
    jax.tree.map(np.testing.assert_array_equal, stored, rounded)
    assert {leaf.dtype for leaf in jax.tree.leaves(stored)} == {np.dtype(np.float32)}


def without(tensors: Tensors, name: str) -> Tensors:
    return {other: tensor for other, tensor in tensors.items() if other != name}


def assert_refused_unread(architecture: Architecture, tensors: Tensors, message: str) -> None:
    source = Watched(tensors)
    with pytest.raises(InputError, match=message):
        load(architecture, source)
    assert not source.num_reads


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.layers.1.self_attn.o_proj.bias",
    ],
)
def test_a_missing_tensor_is_named(name):
    _, tensors = random_file(BIASED)
    missing = without(tensors, name)
    assert_refused_unread(BIASED, missing, rf"model\.path: missing tensors: 1, first '{name}'\.")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.self_attn.q_norm.weight",
        "model.layers.0.pre_feedforward_layernorm.weight",
        "model.layers.1.post_feedforward_layernorm.weight",
    ],
)
def test_a_norm_that_only_some_families_have_is_missed_where_it_is_due_and_refused_elsewhere(name):
    _, tensors = random_file(SWITCHED)
    missing = rf"missing tensors: 1, first '{name}'\..*describes a gemma3_text model"
    assert_refused_unread(SWITCHED, without(tensors, name), missing)
    plain = replace(ODD, num_layers=3)
    assert_refused_unread(plain, random_file(plain)[1] | {name: tensors[name]}, f"unknown to a llama .*'{name}'")
    flat = tensors | {name: tensors[name][:-1]}
    assert_refused_unread(SWITCHED, flat, rf"'{name}' has shape \(\d+,\), expected \(\d+,\) from config.json")


def test_a_missing_tensor_is_named_beside_the_unexpected_one_that_looks_like_it():
    _, tensors = random_file(ODD)
    renamed = without(tensors, QUERY_0) | {QUERY_0.replace("q_proj", "qq_proj"): tensors[QUERY_0]}
    hint = "; the file has 'model.layers.0.self_attn.qq_proj.weight', which is not expected"
    assert_refused_unread(ODD, renamed, f"first '{re.escape(QUERY_0)}'{re.escape(hint)}")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.mlp.up_proj.weight",  # there are two layers
        "model.layers.0.self_attn.q_proj.bias",
    ],
)
def test_a_tensor_that_the_architecture_has_no_place_for_is_named(name):
    _, tensors = random_file(ODD)
    more = tensors | {name: np.zeros(3, np.float32)}
    assert_refused_unread(ODD, more, f"tensors unknown to a llama model: 1, first '{name}'")


def test_a_tied_model_may_repeat_its_embedding_as_the_head_which_is_not_read():
    params, tensors = random_file(ODD)
    source = Watched(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    jax.tree.map(np.testing.assert_array_equal, load(ODD, source), params)
    assert "lm_head.weight" not in source.num_reads


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.norm.weight", (36, 1), (36,)),
        # The same number of values, and still another matrix: [in, out] instead of [out, in].
        (QUERY_0, (36, 60), (60, 36)),
        ("model.layers.1.self_attn.k_proj.bias", (3, 10), (30,)),
    ],
)
def test_a_tensor_of_another_shape_is_named_with_both_shapes(name, shape, expected):
    _, tensors = random_file(BIASED)
    other = tensors | {name: np.zeros(shape, np.float32)}
    message = f"tensor '{name}' has shape {shape}, expected {expected} from config.json"
    assert_refused_unread(BIASED, other, re.escape(message))


def critic_of(tensors: Tensors) -> Params:
    definition, source = DecoderDefinition.create(BIASED, ValueDecoder), Held(tensors)
    return load_weights(definition, source, make_mesh(), entries=critic_tensors(definition, source.shapes))


def test_a_critic_from_a_language_model_has_its_trunk_and_a_head_of_zeros():
    params, tensors = random_file(BIASED)
    critic = critic_of(tensors)
    np.testing.assert_array_equal(critic.pop("value"), np.zeros(BIASED.model_dim))
    del params["output"]
    jax.tree.map(np.testing.assert_array_equal, critic, params)


def test_a_critic_from_a_sequence_classification_checkpoint_has_its_head():
    _, tensors = random_file(BIASED)
    del tensors["lm_head.weight"]
    head = np.arange(BIASED.model_dim, dtype=np.float32)
    np.testing.assert_array_equal(critic_of({**tensors, "score.weight": head[None]})["value"], head)
    with pytest.raises(InputError, match=r"'score.weight' has shape \(2, 36\), expected \(1, 36\)"):
        critic_of({**tensors, "score.weight": np.stack([head, head])})


def test_a_checkpoint_with_two_heads_is_neither_a_language_model_nor_a_classifier():
    _, tensors = random_file(BIASED)
    both = {**tensors, "score.weight": np.zeros((1, BIASED.model_dim), np.float32)}
    with pytest.raises(InputError, match=r"lm_head.weight"):
        critic_of(both)
    with pytest.raises(InputError, match=r"score.weight"):
        load(BIASED, Held(both))
