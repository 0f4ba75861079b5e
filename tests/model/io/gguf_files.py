"""Writes GGUF files as llama.cpp's converter does."""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from tests.tiny_directory import CHARACTERS, CONTROL_TOKENS

LAYERS, MODEL_DIM, MLP_DIM, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 2, 64, 96, 40, 4, 2, 32

LLAMA_CPP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
GEMMA_NAMES = {
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}


def random_checkpoint(*, biases: bool, tied: bool, family: str = "llama") -> dict[str, np.ndarray]:
    layer = {
        "input_layernorm.weight": (MODEL_DIM,),
        "post_attention_layernorm.weight": (MODEL_DIM,),
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, MODEL_DIM),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, MODEL_DIM),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, MODEL_DIM),
        "self_attn.o_proj.weight": (MODEL_DIM, HEADS * HEAD_DIM),
        "mlp.gate_proj.weight": (MLP_DIM, MODEL_DIM),
        "mlp.up_proj.weight": (MLP_DIM, MODEL_DIM),
        "mlp.down_proj.weight": (MODEL_DIM, MLP_DIM),
    }
    if biases:
        layer |= {f"self_attn.{p}_proj.bias": layer[f"self_attn.{p}_proj.weight"][:1] for p in "qkv"}
    if family == "gemma3":
        layer |= {name: (HEAD_DIM if "self_attn" in name else MODEL_DIM,) for name in GEMMA_NAMES}
    shapes = {"model.embed_tokens.weight": (VOCAB, MODEL_DIM), "model.norm.weight": (MODEL_DIM,)}
    shapes |= {} if tied else {"lm_head.weight": (VOCAB, MODEL_DIM)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def permuted_as_llama_cpp_does(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Permutes rows as llama.cpp does: row 2i + j of a head comes from row j * H/2 + i."""
    out = np.empty_like(weights)
    for head in range(num_heads):
        for i in range(HEAD_DIM // 2):
            for j in range(2):
                out[head * HEAD_DIM + 2 * i + j] = weights[head * HEAD_DIM + j * (HEAD_DIM // 2) + i]
    return out


def add_tokenizer(writer: GGUFWriter, tokens: list[str], *, merge: str, num_control: int = 0) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * num_control + [1] * (len(tokens) - num_control))
    writer.add_token_merges([merge])
    writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")


def write_gguf(path: Path, family: str, checkpoint: dict[str, np.ndarray], *, extra=None, skip=()) -> Path:
    """Writes all matrices of the MLPs as Q8_0, and other tensors as F32."""
    writer = GGUFWriter(path, family)
    writer.add_embedding_length(MODEL_DIM)
    writer.add_feed_forward_length(MLP_DIM)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_context_length(512)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_eos_token_id(2)
    if "block_count" not in skip:
        writer.add_block_count(LAYERS)
    for add in extra or ():
        add(writer)
    if family == "gemma3":
        writer.add_sliding_window(4)
    names = LLAMA_CPP_NAMES | (GEMMA_NAMES if family == "gemma3" else {})
    for name, values in checkpoint.items():
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        in_layer = name.startswith("model.layers.")
        new = f"blk.{layer}.{names[rest]}" if in_layer else names[name]
        if family == "gemma3" and "norm" in name:
            values = values + 1
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            values = permuted_as_llama_cpp_does(values, HEADS if "q_proj" in name else KV_HEADS)
        if "mlp" in name:
            q8 = GGMLQuantizationType.Q8_0
            writer.add_tensor(new, quantize(values, q8), raw_dtype=q8)
        else:
            writer.add_tensor(new, values)
    finish(writer)
    return path


def add_tiny_tokenizer(writer: GGUFWriter) -> None:
    """Adds the tokens of `write_tokenizer` with the same ids, and one more."""
    tokens = [*CONTROL_TOKENS, *CHARACTERS, "12"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(CONTROL_TOKENS) + [1] * (len(tokens) - len(CONTROL_TOKENS)))
    writer.add_token_merges(["1 2"])
    writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
