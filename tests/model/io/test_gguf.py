"""Tests that a GGUF file in the form of llama.cpp's converter loads as its source checkpoint."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

from app.model.decoder import DecoderDefinition
from app.model.io.families import architecture_from_config
from app.model.io.gguf import GgufFile
from app.model.io.hf_weights import check_tensors, expected_tensors
from app.model.io.model_files import open_model
from settings.errors import InputError

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


def random_checkpoint(*, biases: bool, tied: bool) -> dict[str, np.ndarray]:
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
    for name, values in checkpoint.items():
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        in_layer = name.startswith("model.layers.")
        new = f"blk.{layer}.{LLAMA_CPP_NAMES[rest]}" if in_layer else LLAMA_CPP_NAMES[name]
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            values = permuted_as_llama_cpp_does(values, HEADS if "q_proj" in name else KV_HEADS)
        if "mlp" in name:
            q8 = GGMLQuantizationType.Q8_0
            writer.add_tensor(new, quantize(values, q8), raw_dtype=q8)
        else:
            writer.add_tensor(new, values)
    finish(writer)
    return path


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_byte_ranges_are_those_of_the_tensors(tmp_path):
    checkpoint = random_checkpoint(biases=True, tied=False)
    path = write_gguf(tmp_path / "tiny.gguf", "qwen2", checkpoint)
    extents, content = GgufFile(path).byte_ranges[path], path.read_bytes()
    assert extents.keys() == checkpoint.keys()
    for name, values in checkpoint.items():
        stored = quantize(values, GGMLQuantizationType.Q8_0) if "mlp" in name else values
        assert content[extents[name].start : extents[name].stop] == stored.tobytes(), name


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False)])
def test_tensors_have_hugging_face_s_names_and_row_order(tmp_path, family, tied):
    checkpoint = random_checkpoint(biases=True, tied=tied)
    model = open_model(str(write_gguf(tmp_path / "tiny.gguf", family, checkpoint)))
    assert model.weights.shapes == {name: values.shape for name, values in checkpoint.items()}
    q8 = GGMLQuantizationType.Q8_0
    for name, values in checkpoint.items():
        expected = dequantize(quantize(values, q8), q8) if "mlp" in name else values
        read = model.weights.read(name)
        assert type(read) is np.ndarray
        assert read.dtype == np.float32
        np.testing.assert_array_equal(read, expected, err_msg=name)


def test_metadata_and_tensors_give_the_architecture(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", "qwen2", random_checkpoint(biases=True, tied=True))
    model = open_model(str(path))
    architecture = architecture_from_config(model.config)
    assert (model.name, model.path) == ("tiny", path)
    assert architecture.family == "qwen2"
    assert (architecture.num_layers, architecture.model_dim, architecture.mlp_dim) == (2, 64, 96)
    assert (architecture.num_query_heads, architecture.num_kv_heads, architecture.head_dim) == (4, 2, 32)
    assert (architecture.vocab_size, architecture.max_positions) == (40, 512)
    assert (architecture.tied_embeddings, architecture.qkv_bias) == (True, True)


def tiny_llama(
    folder: Path, *add: Callable[[GGUFWriter], None], family: str = "llama", skip: Sequence[str] = ()
) -> str:
    return str(write_gguf(folder / "a.gguf", family, random_checkpoint(biases=False, tied=True), extra=add, skip=skip))


def test_all_end_ids_are_in_the_generation_config(tmp_path):
    path = tiny_llama(tmp_path, lambda writer: writer.add_eot_token_id(7), lambda writer: writer.add_eom_token_id(9))
    assert open_model(path).generation_config == {"eos_token_id": [2, 7, 9]}


def tensor(name: str) -> Callable[[GGUFWriter], None]:
    return lambda writer: writer.add_tensor(name, np.ones(4, np.float32))


UNKNOWN = "is not supported, because it is unknown in this architecture; use the model's safetensors"


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (tensor("rope_freqs.weight"), "'rope_freqs.weight' .*scales rotary frequencies one by one; use the model's"),
        (tensor("blk.0.ffn_gate_exps.weight"), f"'blk.0.ffn_gate_exps.weight' {UNKNOWN}"),
        (tensor("blk.0.token_embd.weight"), f"'blk.0.token_embd.weight' {UNKNOWN}"),
        (tensor("blk.1.attn_norm.bias"), f"'blk.1.attn_norm.bias' {UNKNOWN}"),
        (tensor("output_norm.bias"), f"'output_norm.bias' {UNKNOWN}"),
        (tensor("blk.0.attn_q.weight.lora_a"), f"'blk.0.attn_q.weight.lora_a' {UNKNOWN}"),
        (
            lambda writer: writer.add_sliding_window(256),
            r"llama\.attention\.sliding_window' = 256 is not supported; use the model's",
        ),
        (lambda writer: writer.add_rope_dimension_count(16), "partial_rotary_factor=0.5"),
        (lambda writer: writer.add_string("llama.rope.scaling.type", "yarn"), "'yarn' is not supported"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused_by_name(tmp_path, add, message):
    with pytest.raises(InputError, match=message):
        architecture_from_config(open_model(tiny_llama(tmp_path, add)).config)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ("blk.2.attn_norm.weight", "model.layers.2.input_layernorm.weight"),
        ("blk.1.attn_output.bias", "model.layers.1.self_attn.o_proj.bias"),
        ("blk.1.ffn_up.bias", "model.layers.1.mlp.up_proj.bias"),
    ],
)
def test_a_tensor_too_many_is_refused_by_name(tmp_path, family, extra, named):
    checkpoint = random_checkpoint(biases=family == "qwen2", tied=True)
    files = open_model(str(write_gguf(tmp_path / "a.gguf", family, checkpoint, extra=[tensor(extra)])))
    architecture = architecture_from_config(files.config)
    entries = expected_tensors(DecoderDefinition.create(architecture))
    with pytest.raises(InputError, match=f"first '{named}'"):
        check_tensors(entries, files.weights.shapes, architecture)


def test_unknown_architecture_and_missing_metadata_are_refused_by_name(tmp_path):
    with pytest.raises(InputError, match=r"'gemma3' is not supported; supported: llama, qwen2\. For others, use"):
        open_model(tiny_llama(tmp_path, family="gemma3"))
    with pytest.raises(InputError, match=r"'llama\.block_count' is missing"):
        open_model(tiny_llama(tmp_path, skip=("block_count",)))


def test_head_counts_that_differ_by_layer_are_refused(tmp_path):
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_head_count([4, 2])
    writer.add_tensor("token_embd.weight", np.ones((3, 4), np.float32))
    finish(writer)
    with pytest.raises(InputError, match=r"llama\.attention\.head_count' must be one positive integer"):
        open_model(str(tmp_path / "a.gguf"))


@pytest.mark.parametrize("kept_bytes", [3, 700, -1])
def test_a_truncated_gguf_file_is_refused(tmp_path, kept_bytes):
    path = Path(tiny_llama(tmp_path))
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(InputError, match="is not a complete GGUF file"):
        open_model(str(path))
