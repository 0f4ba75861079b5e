"""Tests loading weights: strict names and shapes, one tensor at a time, bit for bit on any mesh."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from app.model.architecture import Architecture
from app.model.decoder import Decoder, DecoderDefinition, Params, ValueDecoder
from app.model.io.families import FAMILIES, architecture_from_config
from app.model.io.hf_weights import check_tensors, critic_tensors, expected_tensors, load_weights
from settings.errors import InputError
from tests.model.io.tensors_in_memory import Held, Tensors, Watched, random_file
from tests.tiny import BIASED, EVEN, EXPERTS, MIXTURE, ODD, SWITCHED, make_mesh
from tests.tiny_directory import CONFIG


def load(architecture: Architecture, source: Held, mesh_shape: tuple[int, int, int] = (1, 1, 1)) -> Params:
    return load_weights(DecoderDefinition.create(architecture), source, make_mesh(mesh_shape))


@pytest.mark.parametrize(
    ("architecture", "mesh_shape"),
    [
        *((BIASED, (1, 1, 1)), (SWITCHED, (2, 2, 2)), (MIXTURE, (2, 2, 2))),
        (replace(EVEN, **EXPERTS | {"family": "mixtral", "query_key_norms": False}), (1, 1, 1)),
    ],
    ids=["biases", "every-switch", "qwen3_moe", "mixtral"],
)
def test_every_tensor_is_loaded_bit_for_bit_and_read_once(architecture, mesh_shape):
    params, tensors = random_file(architecture)
    source = Watched(tensors)
    loaded = load(architecture, source, mesh_shape)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {np.dtype(np.float32)}
    assert source.num_reads == dict.fromkeys(tensors, 1)
    # JAX frees a large array only at its next call, which follows the tensors of layers but not the unstacked ones.
    num_unstacked_matrices = 1 if architecture.tied_embeddings else 2
    assert sum(source.num_alive) <= num_unstacked_matrices


QUERY_0, RENAMED = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.qq_proj.weight"


@pytest.mark.parametrize(
    ("architecture", "missing", "added", "message"),
    [
        (BIASED, "lm_head.weight", {}, "model.path: missing tensors: 1, first 'lm_head.weight'."),
        (BIASED, "model.layers.1.self_attn.o_proj.bias", {}, "first 'model.layers.1.self_attn.o_proj.bias'."),
        (SWITCHED, "model.layers.2.self_attn.q_norm.weight", {}, "q_norm.weight'. config.json describes a gemma3_text"),
        (ODD, QUERY_0, {RENAMED: (60, 36)}, f"first '{QUERY_0}'; the file has '{RENAMED}', which is not expected"),
        # This matrix has the right number of values, but is [in, out] instead of [out, in].
        (BIASED, None, {QUERY_0: (36, 60)}, f"'{QUERY_0}' has shape (36, 60), expected (60, 36) from config.json"),
    ],
)
def test_missing_or_misshapen_tensors_are_refused_before_any_is_read(architecture, missing, added, message):
    tensors = random_file(architecture)[1] | {name: np.zeros(shape, np.float32) for name, shape in added.items()}
    tensors.pop(missing, None)
    source = Watched(tensors)
    with pytest.raises(InputError, match=re.escape(message)):
        load(architecture, source)
    assert not source.num_reads


FAMILY_FIELDS = {
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "qwen3_moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
    "gemma2": {"query_pre_attn_scalar": 8},
}


@pytest.mark.parametrize("head", ["ForCausalLM", "ForSequenceClassification"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_unexpected_tensor_is_refused_by_name(family, head):
    """Tensors with a row too many are refused as well. A language model may have a head; a classifier has none."""
    fields = {
        "sliding_window": 8,
        "tie_word_embeddings": True,
        "architectures": [FAMILIES[family].architecture_name(head)],
    }
    config = CONFIG | fields | FAMILY_FIELDS.get(family, {}) | {"model_type": family}
    architecture = architecture_from_config(config, heads=(head,))
    classifies = head != "ForCausalLM"
    entries = expected_tensors(DecoderDefinition.create(architecture, ValueDecoder if classifies else Decoder))
    shapes = {entry.name: entry.file_shape for entry in entries}
    check_tensors(entries, shapes, architecture)
    modules = {name.rpartition(".")[0] for name in shapes}
    extra = {f"{module}.{leaf}" for module in modules for leaf in ("bias", "lora_A.weight", "lora_B.default.weight")}
    extra |= {name.replace("layers.1.", "layers.2.") for name in shapes} | {f"base_model.{name}" for name in shapes}
    extra |= {"model.layers.0.self_attn.sinks", "v_head.summary.weight", "lm_head.bias"}
    extra |= {"lm_head.weight"} if classifies else {"score.weight", "score.bias"}
    for name in extra - shapes.keys():
        with pytest.raises(InputError, match=re.escape(f"unknown to a {family} model: 1, first '{name}'")):
            check_tensors(entries, shapes | {name: (3,)}, architecture)
    for name, (rows, *rest) in shapes.items():
        with pytest.raises(InputError, match=re.escape(f"tensor '{name}' has shape {(rows + 1, *rest)}")):
            check_tensors(entries, shapes | {name: (rows + 1, *rest)}, architecture)


def test_the_head_of_a_tied_model_is_not_read():
    params, tensors = random_file(ODD)
    source = Watched(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    jax.tree.map(np.testing.assert_array_equal, load(ODD, source), params)
    assert "lm_head.weight" not in source.num_reads


def critic_of(tensors: Tensors) -> Params:
    definition, source = DecoderDefinition.create(BIASED, ValueDecoder), Held(tensors)
    return load_weights(definition, source, make_mesh(), entries=critic_tensors(definition, source.shapes))


def test_a_critic_starts_with_the_trunk_of_a_language_model_and_a_zero_head():
    params, tensors = random_file(BIASED)
    critic = critic_of(tensors)
    np.testing.assert_array_equal(critic.pop("value"), np.zeros(BIASED.model_dim))
    del params["output"]
    jax.tree.map(np.testing.assert_array_equal, critic, params)


def test_a_critic_uses_the_head_of_a_classifier_with_one_label():
    _, tensors = random_file(BIASED)
    head = np.arange(BIASED.model_dim, dtype=np.float32)
    both = {**tensors, "score.weight": head[None]}
    with pytest.raises(InputError, match=r"lm_head.weight"):
        critic_of(both)
    with pytest.raises(InputError, match=r"score.weight"):
        load(BIASED, Held(both))
    del both["lm_head.weight"]
    np.testing.assert_array_equal(critic_of(both)["value"], head)
    with pytest.raises(InputError, match=r"'score.weight' has shape \(2, 36\), expected \(1, 36\)"):
        critic_of({**both, "score.weight": np.stack([head, head])})
