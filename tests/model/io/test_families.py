"""Tests that `config.json` of every family is read in every accepted spelling, and refused if unsupported."""

from typing import Any

import pytest
import transformers

from app.model.architecture import RopeConfig
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
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FULL, SLIDING = "full_attention", "sliding_attention"


def config_of(model_type: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": model_type, **SIZES, **EXPERTS.get(model_type, {})} | fields


@pytest.mark.parametrize("model_type", FAMILIES)
def test_missing_config_fields_have_the_defaults_of_transformers(model_type):
    fields = config_of(model_type)
    del fields["rms_norm_eps"]
    ours = architecture_from_config(fields)
    sizes = {name: value for name, value in SIZES.items() if name != "rms_norm_eps"}
    theirs = transformers.AutoConfig.for_model(model_type, **sizes, **EXPERTS.get(model_type, {}))
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
    ropes = {FULL: ours.rope, SLIDING: ours.windowed_rope}
    by_kind = theirs.rope_parameters if FULL in theirs.rope_parameters else {FULL: theirs.rope_parameters}
    for kind in ropes.keys() & by_kind:
        assert ropes[kind] == RopeConfig(by_kind[kind]["rope_theta"])


def test_old_and_new_spellings_of_rope_give_equal_architectures():
    old = {"rope_theta": 3e4, "rope_scaling": {"type": "linear", "factor": 2}}
    architecture = architecture_from_config(config_of("llama", **old))
    new = {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e4}
    assert architecture == architecture_from_config(config_of("llama", rope_parameters=new))
    assert architecture.rope == RopeConfig(3e4, "linear", 2.0)


QWEN = {"use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("model_type", "fields", "windows"),
    [
        ("qwen2", {**QWEN, "use_sliding_window": False, "max_window_layers": 0}, ()),
        ("qwen2", {**QWEN, "sliding_window": None, "max_window_layers": 0}, ()),
        ("qwen2", {**QWEN, "max_window_layers": 3}, ()),
        ("qwen3", {**QWEN, "max_window_layers": 1}, (None, 8, 8)),
        ("qwen3", {**QWEN, "layer_types": [SLIDING, FULL, FULL]}, (8, None, None)),
        ("mistral", {"sliding_window": 8}, (8, 8, 8)),
        ("mistral", {"sliding_window": None}, ()),
        ("mistral", {"sliding_window": 8, "layer_types": [SLIDING] * 3}, (8, 8, 8)),
        ("llama", {"layer_types": [FULL] * 3}, ()),
        ("gemma2", {"sliding_window": 8}, (8, None, 8)),
        ("gemma2", {"sliding_window": None, "layer_types": [FULL] * 3}, ()),
        ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 3}, (8, 8, None)),
    ],
)
def test_layers_have_the_attention_windows_of_the_config(model_type, fields, windows):
    assert architecture_from_config(config_of(model_type, **fields)).windows == windows


def test_alternative_spellings_of_config_fields_are_accepted():
    other = {name: value for name, value in config_of("mixtral", num_experts=8).items() if name != "num_local_experts"}
    assert architecture_from_config(other) == architecture_from_config(config_of("mixtral", num_experts=8))
    assert architecture_from_config(config_of("llama", num_key_value_heads=None)).num_kv_heads == 6
    gelu = "gelu_pytorch_tanh"
    for spelling in ({"hidden_act": gelu}, {"hidden_act": "gelu", "hidden_activation": None}):
        assert architecture_from_config(config_of("gemma2", **spelling)).activation == "gelu_tanh"


UNSUPPORTED = (
    *("quantization_config", "kv_lora_rank", "linear_num_value_heads", "n_shared_experts", "attention_chunk_size"),
    *("shared_expert_intermediate_size", "mlp_only_layers", "router_jitter_noise", "use_bidirectional_attention"),
)


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_an_unsupported_config_field_is_refused_by_name(field):
    with pytest.raises(InputError, match=f"config.json has `{field}`: .*(; use|; set)"):
        architecture_from_config(config_of("qwen3_moe", **{field: [1]}))


@pytest.mark.parametrize(
    ("model_type", "change", "message"),
    [
        ("gpt2", {}, r"model_type='gpt2'.*llama, mistral, qwen2, qwen3, mixtral, qwen3_moe, gemma2 or gemma3_text"),
        ("deepseek_v3", {"kv_lora_rank": 512}, r"'deepseek_v3' is not supported \(`kv_lora_rank`: .*MLA"),
        ("llama", {"model_type": ["llama"]}, r"model_type=\['llama'\].*llama, mistral"),
        ("gemma3", {"text_config": {"model_type": "gemma3_text"}, "vision_config": {}}, r"combines .*'gemma3_text'"),
        ("llava", {"text_config": "none", "vision_config": {}}, r"model_type='llava' .*text-only checkpoint$"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, r"SequenceClassification.*LlamaForCausalLM"),
        ("llama", {"auto_map": {"AutoModelForCausalLM": "modeling.Own"}}, r"auto_map.*never run"),
        ("llama", {"num_local_experts": 8}, r"`num_local_experts`: mixtures of experts.*dense"),
        ("llama", {"use_sliding_window": True}, r"use_sliding_window=true"),
        ("llama", {"layer_types": [FULL, SLIDING, FULL]}, r"layer_types=.*every layer the type 'full_attention'"),
        ("llama", {"layer_types": [FULL, FULL, "chunked_attention"]}, r"layer_types has 'chunked_attention'"),
        ("qwen2", {"layer_types": [SLIDING] * 3}, r"'sliding_attention'.*use_sliding_window is false"),
        ("mistral", {"layer_types": [SLIDING, FULL, SLIDING]}, r"'mistral' with sliding_window=4096; give"),
        ("qwen3", {"max_window_layers": -1}, r"max_window_layers must be an integer of at least 0, got -1"),
        ("llama", {"hidden_act": "gelu"}, r"hidden_act='gelu'.*silu"),
        ("llama", {"hidden_size": None}, r"hidden_size is missing"),
        ("llama", {"num_hidden_layers": True}, r"num_hidden_layers.*positive integer.*True"),
        ("mistral", {"sliding_window": 2**40}, r"positive integer below 1,073,741,824, got 1099511627776"),
        ("gemma2", {"final_logit_softcapping": 0}, r"final_logit_softcapping must be a positive number, got 0"),
        ("llama", {"tie_word_embeddings": "yes"}, r"tie_word_embeddings.*true or false"),
        ("llama", {"num_key_value_heads": 4}, r"num_attention_heads=6.*num_key_value_heads=4"),
        ("llama", {"num_attention_heads": 5, "num_key_value_heads": 5}, r"hidden_size=24.*num_attention_heads=5"),
        ("llama", {"head_dim": 5}, r"head_dim must be even.*got 5"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, r"'yarn'.*default, linear or llama3"),
        ("llama", {"rope_parameters": 3}, r"rope_parameters must be an object, got 3"),
        ("llama", {"rope_scaling": {**LLAMA3_SCALING, "high_freq_factor": 1.0}}, r"high_freq_factor=1.0 must exceed"),
        ("llama", {"rope_parameters": {FULL: {"rope_theta": 1e4}}}, r"differ by layer type"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor=0.5"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, r"decoder_sparse_step=2.*layers without experts"),
        ("qwen3_moe", {"num_local_experts": 4}, r"num_experts and num_local_experts .* differ"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, r"num_experts_per_tok=9 exceeds the 8 experts"),
        ("gemma2", {"hidden_activation": "gelu"}, r"hidden_activation must be 'gelu_pytorch_tanh', got 'gelu'"),
        ("gemma2", {"hidden_act": "silu"}, r"hidden_act='silu' contradicts hidden_activation='gelu_pytorch_tanh'"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping.*must be null"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e6}}, r"has 'rope_theta', expected only an object for"),
        ("gemma3_text", {"rope_parameters": {SLIDING: 3}}, r"sliding_attention must be an object, got 3"),
    ],
)
def test_an_unsupported_or_malformed_config_is_refused_by_name(model_type, change, message):
    with pytest.raises(InputError, match=message):
        architecture_from_config(config_of(model_type) | change)
