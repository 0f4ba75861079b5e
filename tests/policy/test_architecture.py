"""`config.json` in every spelling that is accepted, and one refusal for each way it can be wrong."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig, Qwen2Config

from app.policy.architecture import Architecture, Rope, architecture_from_config, rope_frequencies
from settings.errors import InputError

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
LLAMA: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES}
QWEN2: dict[str, Any] = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **SIZES}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_llama_with_only_its_sizes_takes_transformers_defaults():
    assert architecture_from_config(LLAMA) == Architecture(
        family="llama",
        vocab_size=97,
        num_layers=3,
        model_dim=24,
        mlp_dim=40,
        num_query_heads=6,
        num_kv_heads=2,
        head_dim=4,
        rope=Rope(theta=10_000.0),
        norm_epsilon=1e-5,
        max_positions=128,
        tied_embeddings=False,
        qkv_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
    )


def test_qwen2_always_has_query_key_value_biases_and_never_an_output_bias():
    architecture = architecture_from_config(QWEN2)
    assert (architecture.qkv_bias, architecture.attention_output_bias, architecture.mlp_bias) == (
        True,
        False,
        False,
    )


def test_llama_attention_bias_stands_on_all_four_projections():
    architecture = architecture_from_config(LLAMA | {"attention_bias": True, "mlp_bias": True})
    assert (architecture.qkv_bias, architecture.attention_output_bias, architecture.mlp_bias) == (
        True,
        True,
        True,
    )


def test_head_dim_is_taken_where_named_and_need_not_divide_the_width():
    assert architecture_from_config(LLAMA | {"head_dim": 16, "num_attention_heads": 10}).head_dim == 16


@pytest.mark.parametrize("absent", [{}, {"num_key_value_heads": None}])
def test_without_key_value_heads_every_query_head_has_its_own(absent):
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"} | absent
    assert architecture_from_config(config).num_kv_heads == 6


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3_SCALING},
            {"rope_parameters": {**LLAMA3_SCALING, "rope_theta": 5e5}},
        ),
    ],
)
def test_both_spellings_of_rope_mean_the_same(old, new):
    assert architecture_from_config(LLAMA | old) == architecture_from_config(LLAMA | new)


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config])
@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 3e4}, {**LLAMA3_SCALING, "rope_theta": 3e4}])
def test_what_transformers_saves_is_read(config_class, rope, tmp_path):
    saved = config_class(**SIZES, rope_parameters=dict(rope), tie_word_embeddings=True)
    saved.save_pretrained(tmp_path)
    architecture = architecture_from_config(json.loads((tmp_path / "config.json").read_text()))
    assert architecture.family == config_class.model_type
    assert architecture.rope.theta == 3e4
    assert architecture.rope.kind == rope["rope_type"]
    assert architecture.tied_embeddings


def test_an_original_length_beside_the_scaling_wins_over_the_one_inside():
    config = LLAMA | {"rope_scaling": LLAMA3_SCALING, "original_max_position_embeddings": 32}
    assert architecture_from_config(config).rope.original_max_positions == 32


REFUSED = [
    ({"model_type": "gpt2"}, r"model_type='gpt2'.*llama, qwen2"),
    ({"model_type": None}, r"model_type=None.*llama, qwen2"),
    ({"architectures": ["LlamaForSequenceClassification"]}, r"SequenceClassification.*LlamaForCausalLM"),
    ({"auto_map": {"AutoModelForCausalLM": "modeling.Own"}}, r"auto_map.*never run"),
    ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config"),
    ({"hidden_act": "gelu"}, r"hidden_act='gelu'.*silu"),
    ({"hidden_size": None}, r"hidden_size is missing"),
    ({"vocab_size": "97"}, r"vocab_size.*positive integer.*'97'"),
    ({"num_hidden_layers": 0}, r"num_hidden_layers.*positive integer.*0"),
    ({"num_hidden_layers": True}, r"num_hidden_layers.*positive integer.*True"),
    ({"rms_norm_eps": float("inf")}, r"rms_norm_eps.*positive number"),
    ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings.*true or false"),
    ({"num_key_value_heads": 4}, r"num_attention_heads=6.*num_key_value_heads=4"),
    ({"num_attention_heads": 5, "num_key_value_heads": 5}, r"hidden_size=24.*num_attention_heads=5"),
    ({"head_dim": 5}, r"head_dim=5 is odd"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, r"'yarn'.*default, linear, llama3"),
    ({"rope_scaling": {"rope_type": "linear"}}, r"factor is missing"),
    ({"rope_scaling": {**LLAMA3_SCALING, "high_freq_factor": 1.0}}, r"high_freq_factor=1.0 must exceed"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, r"differ by layer type"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, r"partial_rotary_factor=0.5"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_a_config_that_cannot_be_served_is_refused_by_name(change, message):
    with pytest.raises(InputError, match=message):
        architecture_from_config(LLAMA | change)


@pytest.mark.parametrize(
    "change", [{"use_sliding_window": True}, {"layer_types": ["full_attention", "sliding_attention"]}]
)
def test_qwen2_with_a_sliding_window_is_refused(change):
    with pytest.raises(InputError, match="sliding_window"):
        architecture_from_config(QWEN2 | change)


def test_default_rope_frequencies_by_hand():
    np.testing.assert_allclose(rope_frequencies(Rope(theta=10_000.0), 8), [1, 0.1, 0.01, 0.001], rtol=1e-6)


def test_linear_rope_divides_every_frequency():
    rope = Rope(theta=10_000.0, kind="linear", factor=4.0)
    np.testing.assert_allclose(rope_frequencies(rope, 4), [0.25, 0.0025], rtol=1e-6)


def test_llama3_rope_keeps_fast_pairs_slows_slow_ones_and_blends_between():
    # Wavelengths 6.28, 62.8 and 628 against original/high = 25 and original/low = 100.
    rope = Rope(10_000.0, "llama3", 8.0, 1.0, 4.0, original_max_positions=100)
    kept = (100 * 0.1 / (2 * np.pi) - 1) / 3
    by_hand = [1.0, (1 - kept) * 0.1 / 8 + kept * 0.1, 0.01 / 8, 0.001 / 8]
    np.testing.assert_allclose(rope_frequencies(rope, 8), by_hand, rtol=1e-6)


def test_an_unknown_rope_kind_is_refused():
    with pytest.raises(InputError, match="dynamic"):
        rope_frequencies(Rope(theta=1e4, kind="dynamic"), 8)


@pytest.mark.parametrize(
    "rope",
    [{"rope_type": "linear", "factor": 3.0}, {**LLAMA3_SCALING, "original_max_position_embeddings": 8192}],
)
@pytest.mark.parametrize("head_dim", [10, 64, 128])
def test_rope_frequencies_equal_transformers(rope, head_dim):
    pytest.importorskip("torch", reason="transformers computes its frequencies with torch")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(**SIZES, head_dim=head_dim, rope_parameters={**rope, "rope_theta": 5e5})
    expected, attention_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device=None)
    ours = architecture_from_config(config.to_dict() | {"architectures": None})
    frequencies = rope_frequencies(ours.rope, ours.head_dim)
    assert attention_factor == 1.0
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, expected.numpy(), rtol=3e-7)
