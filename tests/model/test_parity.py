"""Tests the decoder against transformers on the same files.

Weights are large (standard deviation 0.3, norms around 1, every bias random). Attention is then sharp, logits spread
over several units, and a wrong pairing, scale or bias shows in the first digits.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import SamplingRules
from tests.model.reference import (
    BIASES,
    LLAMA3,
    ONE_KV_HEAD,
    SIZES,
    SWITCHES,
    assert_every_segment_has_the_reference_logits,
    import_reference,
    load_ours,
    load_reference,
    reference_logits,
    write_checkpoint,
)
from tests.tiny import TinyEngine, make_prompt

LINEAR = {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4}
QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


def spell_as_before_transformers_5(directory: Path) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    if "sliding_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if "layer_types" in config:
        del config["layer_types"]
        config["sliding_window_pattern"] = config.pop("_sliding_window_pattern", None)
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    path.write_text(json.dumps(config))


TIED = {"tie_word_embeddings": True}
NO_CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        pytest.param("llama", TIED | {"num_key_value_heads": 9, "rms_norm_eps": 0.1}, id="llama-tied-all_kv_heads"),
        pytest.param("llama", BIASES | ONE_KV_HEAD, id="llama-biases-one_kv_head"),
        pytest.param("qwen2", TIED | QWEN_WINDOWS | ONE_KV_HEAD, id="qwen2-tied-windows-one_kv_head"),
        pytest.param(
            "qwen3", TIED | QWEN_WINDOWS | ONE_KV_HEAD | {"attention_bias": True}, id="qwen3-tied-biases-windows"
        ),
        pytest.param("mistral", {}, id="mistral"),
        pytest.param("mixtral", TIED | {"sliding_window": 4}, id="mixtral-tied-window"),
        pytest.param("qwen3_moe", {"norm_topk_prob": False, "attention_bias": True}, id="qwen3_moe-not_normalized"),
        pytest.param("qwen3_moe", QWEN_WINDOWS | ONE_KV_HEAD, id="qwen3_moe-windows-one_kv_head"),
        pytest.param("gemma2", {}, id="gemma2"),
        pytest.param("gemma2", TIED | NO_CAPS | {"attention_bias": True}, id="gemma2-tied-biases-no_caps"),
        pytest.param(
            "gemma3_text",
            TIED | ONE_KV_HEAD | {"final_logit_softcapping": 5.0, "attention_bias": True},
            id="gemma3_text-tied-biases-cap-one_kv_head",
        ),
    ],
)
def test_logits_of_packed_rows_equal_transformers(tmp_path, model_type, changes):
    assert_every_segment_has_the_reference_logits(write_checkpoint(tmp_path, model_type, **changes))


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_logits_of_a_tied_model_with_a_separate_head_equal_transformers(tmp_path, caplog, model_type):
    tensors = load_file(write_checkpoint(tmp_path, model_type, tie_word_embeddings=True) / "model.safetensors")
    trained = np.random.default_rng(1).normal(0, 0.3, tensors["model.embed_tokens.weight"].shape).astype(np.float32)
    save_file(tensors | {"lm_head.weight": trained}, tmp_path / "model.safetensors", {"format": "pt"})
    assert_every_segment_has_the_reference_logits(tmp_path)
    assert "model.path: config.json of" in caplog.text and "ties lm_head.weight to the embedding" in caplog.text
    caplog.clear()
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, tmp_path / "model.safetensors")
    assert "output" not in load_ours(tmp_path)[1] and not caplog.messages


@pytest.mark.parametrize(
    ("model_type", "rope", "spelling"),
    [
        pytest.param("llama", LINEAR, "new", id="llama-linear"),
        pytest.param("llama", LLAMA3, "old", id="llama-llama3-old_spelling"),
        pytest.param("gemma3_text", SWITCHES["gemma3_text"]["rope_parameters"], "old", id="gemma3_text-old_spelling"),
    ],
)
def test_logits_under_every_rope_equal_transformers(tmp_path, model_type, rope, spelling):
    write_checkpoint(tmp_path, model_type, rope_parameters=rope)
    if spelling == "old":
        spell_as_before_transformers_5(tmp_path)
    assert_every_segment_has_the_reference_logits(tmp_path)


def test_logits_from_many_shards_in_bfloat16_equal_transformers(tmp_path):
    write_checkpoint(tmp_path, "qwen2", dtype="bfloat16", max_shard_size="4KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 5
    assert_every_segment_has_the_reference_logits(tmp_path)


def test_greedy_generation_equals_transformers_token_for_token(tmp_path):
    torch, _ = import_reference()
    write_checkpoint(tmp_path, "gemma3_text", **ONE_KV_HEAD)
    reference = load_reference(tmp_path)
    definition, params = load_ours(tmp_path)
    rng = np.random.default_rng(2)
    prompts = [
        make_prompt(f"row-{length}", rng.integers(0, SIZES["vocab_size"], length))
        for length in (1, 3, 4, 8, 17, 6, 11, 2)
    ]
    eos_ids = (5, 11, 23)
    engine = TinyEngine(definition, eos_ids=eos_ids)
    samples = engine.generate(
        engine.to_decode_weights(params),
        prompts,
        GenerationRequest(
            group_size=1, max_new_tokens=24, rules=SamplingRules(temperature=0.0), seed=0, policy_version=0
        ),
    )
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    for prompt, sample in zip(prompts, samples, strict=True):
        input_ids = torch.from_numpy(prompt.token_ids.astype(np.int64))[None]
        generated = reference.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=24,
            eos_token_id=list(eos_ids),
            pad_token_id=0,
        )[0].numpy()
        assert sample.completion_ids.tolist() == generated[len(prompt.token_ids) :].tolist()
        logits = torch.from_numpy(reference_logits(reference, generated)[len(prompt.token_ids) - 1 : -1])
        logprobs = torch.log_softmax(logits, dim=-1).numpy()
        chosen = np.take_along_axis(logprobs, sample.completion_ids[:, None], axis=1)[:, 0]
        np.testing.assert_allclose(sample.behavior_logprobs, chosen, rtol=0, atol=1e-4)
