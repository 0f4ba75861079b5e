"""Tests of `config.json` of every family in every accepted spelling, and of every refused configuration."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoConfig

from app.model.architecture import Architecture, RopeConfig
from app.model.io.families import FAMILIES, architecture_from_config
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


EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


def config_of(model_type: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": model_type, **SIZES, **EXPERTS.get(model_type, {}), **fields}


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
        rope=RopeConfig(theta=10_000.0),
        norm_epsilon=1e-5,
        max_positions=128,
        tied_embeddings=False,
    )


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


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 3e4}, {**LLAMA3_SCALING, "rope_theta": 3e4}])
def test_what_transformers_saves_is_read(model_type, rope, tmp_path):
    AutoConfig.for_model(model_type, **SIZES, rope_parameters=dict(rope), tie_word_embeddings=True).save_pretrained(
        tmp_path
    )
    architecture = architecture_from_config(json.loads((tmp_path / "config.json").read_text()))
    assert architecture.family == model_type
    assert architecture.rope.theta == 3e4
    assert architecture.rope.rope_type == rope["rope_type"]
    assert architecture.tied_embeddings


@pytest.mark.parametrize("model_type", FAMILIES)
def test_absent_fields_take_the_values_that_transformers_gives_them(model_type):
    fields = config_of(model_type)
    del fields["rms_norm_eps"]
    ours = architecture_from_config(fields)
    sizes = {name: value for name, value in SIZES.items() if name != "rms_norm_eps"}
    theirs = AutoConfig.for_model(model_type, **sizes, **EXPERTS.get(model_type, {}))
    assert ours.norm_epsilon == theirs.rms_norm_eps
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 24 // 6)
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    assert ours.attention_soft_cap == getattr(theirs, "attn_logit_softcapping", None)
    assert ours.logit_soft_cap == getattr(theirs, "final_logit_softcapping", None)
    assert ours.normalized_routing == getattr(theirs, "norm_topk_prob", model_type == "mixtral")
    types = getattr(theirs, "layer_types", None) or ["sliding" if model_type == "mistral" else "full"] * 3
    assert ours.layer_windows == tuple(theirs.sliding_window if "sliding" in kind else None for kind in types)
    if model_type.startswith("gemma"):
        assert ours.query_scale == theirs.query_pre_attn_scalar**-0.5
    ropes = {"full_attention": ours.rope, "sliding_attention": ours.windowed_rope}
    nested = theirs.rope_parameters if "full_attention" in theirs.rope_parameters else None
    for kind, rope in (nested or {"full_attention": theirs.rope_parameters}).items():
        assert ropes[kind] == RopeConfig(rope["rope_theta"])


@pytest.mark.parametrize("model_type", EXPERTS)
def test_both_spellings_of_the_number_of_experts_mean_the_same(model_type):
    configs = [
        {**SIZES, "model_type": model_type, "num_experts_per_tok": 2, "moe_intermediate_size": 16, **spelling}
        for spelling in ({"num_experts": 8}, {"num_local_experts": 8}, {"num_experts": 8, "num_local_experts": 8})
    ]
    first, *others = map(architecture_from_config, configs)
    assert (first.num_experts, first.experts_per_token) == (8, 2)
    assert first.mlp_dim == (16 if model_type == "qwen3_moe" else 40)
    assert others == [first, first]


def test_gemma3_means_the_same_in_the_spelling_before_transformers_5():
    old = {
        "rope_theta": 1e6,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 2,
    }
    new = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
    architecture = architecture_from_config(config_of("gemma3_text", sliding_window=7, **old))
    assert architecture == architecture_from_config(config_of("gemma3_text", sliding_window=7, **new))
    assert architecture.rope == RopeConfig(1e6, "linear", 8.0)
    assert architecture.windowed_rope == RopeConfig(2e4)
    assert architecture.windows == (7, None, 7)


@pytest.mark.parametrize(
    "spelling",
    [
        {"hidden_activation": "gelu_pytorch_tanh"},
        {"hidden_act": "gelu_pytorch_tanh"},
        {"hidden_act": "gelu", "hidden_activation": None},
        {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"},
    ],
)
def test_gemma_has_the_same_activation_in_every_spelling(spelling):
    assert architecture_from_config(config_of("gemma2", **spelling)).activation == "gelu_tanh"


@pytest.mark.parametrize(
    ("model_type", "fields", "windows"),
    [
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}, ()),
        ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, ()),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, ()),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, (None, 8, 8)),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            },
            (8, None, None),
        ),
        ("mistral", {"sliding_window": 8}, (8, 8, 8)),
        ("mistral", {"sliding_window": None}, ()),
        ("mistral", {"sliding_window": 8, "layer_types": ["sliding_attention"] * 3}, (8, 8, 8)),
        ("llama", {"layer_types": ["full_attention"] * 3}, ()),
        ("gemma2", {"sliding_window": 8}, (8, None, 8)),
        ("gemma2", {"sliding_window": None, "layer_types": ["full_attention"] * 3}, ()),
        ("gemma3_text", {"sliding_window": 8}, (8, 8, 8)),
        ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 3}, (8, 8, None)),
    ],
)
def test_windows_stand_on_the_layers_that_the_config_gives_them(model_type, fields, windows):
    assert architecture_from_config(config_of(model_type, **fields)).windows == windows


REFUSED = [
    (
        {"model_type": "gpt2"},
        r"model_type='gpt2'.*llama, mistral, qwen2, qwen3, mixtral, qwen3_moe, gemma2, gemma3_text",
    ),
    ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, r"'deepseek_v3' is not supported \(`kv_lora_rank`: .*MLA"),
    (
        {"model_type": "qwen3_next", "linear_num_value_heads": 32},
        r"'qwen3_next' is not supported .*DeltaNet.*; supported",
    ),
    ({"model_type": "qwen2_moe", "shared_expert_intermediate_size": 64}, r"'qwen2_moe' .*shared experts"),
    ({"model_type": ["llama"]}, r"model_type=\['llama'\].*llama, mistral"),
    ({"architectures": ["LlamaForSequenceClassification"]}, r"SequenceClassification.*LlamaForCausalLM"),
    ({"auto_map": {"AutoModelForCausalLM": "modeling.Own"}}, r"auto_map.*never run"),
    ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config"),
    ({"num_local_experts": 8}, r"`num_local_experts`: mixtures of experts.*dense"),
    ({"attention_chunk_size": 8192}, r"`attention_chunk_size`.*full or sliding attention"),
    ({"use_sliding_window": True}, r"use_sliding_window=true"),
    ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, r"layer_types=.*'full_attention' for"),
    ({"layer_types": ["full_attention"]}, r"layer_types must list one type for each of 3 layers"),
    ({"layer_types": ["full_attention"] * 2 + ["chunked_attention"]}, r"layer_types has 'chunked_attention'"),
    ({"hidden_act": "gelu"}, r"hidden_act='gelu'.*silu"),
    ({"hidden_size": None}, r"hidden_size is missing"),
    ({"vocab_size": "97"}, r"vocab_size.*positive integer.*'97'"),
    ({"num_hidden_layers": True}, r"num_hidden_layers.*positive integer.*True"),
    ({"rms_norm_eps": float("inf")}, r"rms_norm_eps.*positive number"),
    ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings.*true or false"),
    ({"num_key_value_heads": 4}, r"num_attention_heads=6.*num_key_value_heads=4"),
    ({"num_attention_heads": 5, "num_key_value_heads": 5}, r"hidden_size=24.*num_attention_heads=5"),
    ({"head_dim": 5}, r"head_dim must be even.*got 5"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, r"'yarn'.*default, linear, llama3"),
    ({"rope_parameters": 3}, r"rope_parameters must be an object, got 3"),
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
    ("model_type", "change", "message"),
    [
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, r"'sliding_attention'.*use_sliding_window is false"),
        ("qwen3", {"use_sliding_window": 1}, r"use_sliding_window must be true or false, got 1"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 0}, r"sliding_window must be a positive integer"),
        ("qwen3", {"max_window_layers": -1}, r"max_window_layers must be an integer of at least 0, got -1"),
        (
            "mistral",
            {"sliding_window": 2**40},
            r"positive integer below 1,073,741,824, got 1099511627776",
        ),
        (
            "mistral",
            {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            r"layer_types=.*'mistral' with sliding_window=4096; expected 'sliding_attention'",
        ),
        ("mistral", {"architectures": ["LlamaForCausalLM"]}, r"LlamaForCausalLM.*model_type='mistral'.*MistralFor"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, r"decoder_sparse_step=2.*layers without experts"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"`mlp_only_layers`: layers without experts"),
        ("qwen3_moe", {"n_shared_experts": 1}, r"`n_shared_experts`: shared experts"),
        ("qwen3_moe", {"num_local_experts": 4}, r"num_experts and num_local_experts .* differ"),
        ("qwen3_moe", {"num_experts": None}, r"num_experts is missing"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, r"num_experts_per_tok=9 is more than the 8 experts"),
        ("mixtral", {"router_jitter_noise": 0.01}, r"`router_jitter_noise`: noise in the router"),
        ("gemma2", {"hidden_activation": "gelu"}, r"hidden_activation must be 'gelu_pytorch_tanh', got 'gelu'"),
        ("gemma2", {"hidden_act": "silu"}, r"hidden_act='silu' contradicts hidden_activation='gelu_pytorch_tanh'"),
        ("gemma2", {"final_logit_softcapping": 0}, r"final_logit_softcapping must be a positive number, got 0"),
        ("gemma2", {"sliding_window": None}, r"sliding_window is null"),
        ("gemma2", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, r"differ by layer type"),
        ("gemma3_text", {"use_bidirectional_attention": True}, r"`use_bidirectional_attention`: only causal"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping.*must be null"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e6}}, r"has 'rope_theta'; expected an object for"),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": 3}}, r"sliding_attention must be an object, got 3"),
        ("gemma3_text", {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, r"'yarn'.*default, linear, llama3"),
        ("gemma3_text", {"sliding_window_pattern": 0}, r"sliding_window_pattern must be a positive integer.*, got 0"),
        (
            "gemma3",
            {"text_config": {"model_type": "gemma3_text"}, "vision_config": {}},
            r"'gemma3' combines .*text-only checkpoint of model_type 'gemma3_text'",
        ),
        ("mistral3", {"text_config": {"model_type": "mistral"}}, r"text-only checkpoint of model_type 'mistral'"),
        ("llava", {"text_config": "none", "vision_config": {}}, r"model_type='llava' .*text-only checkpoint$"),
    ],
)
def test_what_a_family_cannot_do_is_refused_by_name(model_type, change, message):
    with pytest.raises(InputError, match=message):
        architecture_from_config(config_of(model_type, **change))
