"""Tests that a GGUF file as llama.cpp's converter writes it loads like its source checkpoint."""

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
from tests.model.io.gguf_files import finish, random_checkpoint, write_gguf


def test_byte_ranges_of_a_gguf_file_contain_exactly_its_tensors(tmp_path):
    checkpoint = random_checkpoint(biases=True, tied=False)
    path = write_gguf(tmp_path / "tiny.gguf", "qwen2", checkpoint)
    extents, content = GgufFile(path).byte_ranges[path], path.read_bytes()
    assert extents.keys() == checkpoint.keys()
    for name, values in checkpoint.items():
        stored = quantize(values, GGMLQuantizationType.Q8_0) if "mlp" in name else values
        assert content[extents[name].start : extents[name].stop] == stored.tobytes(), name


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False), ("gemma3", True)])
def test_gguf_tensors_get_hugging_face_names_and_row_order(tmp_path, family, tied):
    checkpoint = random_checkpoint(biases=family != "gemma3", tied=tied, family=family)
    model = open_model(str(write_gguf(tmp_path / "tiny.gguf", family, checkpoint)))
    assert model.weights.shapes == {name: values.shape for name, values in checkpoint.items()}
    q8 = GGMLQuantizationType.Q8_0
    for name, values in checkpoint.items():
        expected = dequantize(quantize(values, q8), q8) if "mlp" in name else values
        read = model.weights.read(name)
        assert type(read) is np.ndarray
        assert read.dtype == np.float32
        np.testing.assert_allclose(read, expected, rtol=0, atol=3e-7 if family == "gemma3" else 0, err_msg=name)
    if family != "llama":  # A Llama with biases also has one on the attention output.
        architecture = architecture_from_config(model.config)
        check_tensors(expected_tensors(DecoderDefinition.create(architecture)), model.weights.shapes, architecture)


def test_gguf_metadata_and_tensors_determine_the_architecture(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", "qwen2", random_checkpoint(biases=True, tied=True))
    model = open_model(str(path))
    architecture = architecture_from_config(model.config)
    assert (model.name, model.path) == ("tiny", path)
    assert architecture.family == "qwen2"
    assert (architecture.num_layers, architecture.model_dim, architecture.mlp_dim) == (2, 64, 96)
    assert (architecture.num_query_heads, architecture.num_kv_heads, architecture.head_dim) == (4, 2, 32)
    assert (architecture.vocab_size, architecture.max_positions) == (40, 512)
    assert (architecture.tied_embeddings, architecture.qkv_bias) == (True, True)
    checkpoint = random_checkpoint(biases=False, tied=True, family="gemma3")
    gemma = architecture_from_config(open_model(str(write_gguf(path, "gemma3", checkpoint))).config)
    assert (gemma.family, gemma.windows, gemma.query_scale) == ("gemma3_text", (4, 4), 32**-0.5)
    assert gemma.windowed_rope is not None and (gemma.rope.theta, gemma.windowed_rope.theta) == (1e5, 1e4)


def tiny_llama(
    folder: Path, *add: Callable[[GGUFWriter], None], family: str = "llama", skip: Sequence[str] = ()
) -> str:
    return str(write_gguf(folder / "a.gguf", family, random_checkpoint(biases=False, tied=True), extra=add, skip=skip))


def test_all_gguf_end_of_turn_ids_are_eos_ids_of_the_generation_config(tmp_path):
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
        (tensor("blk.0.attn_q.weight.lora_a"), f"'blk.0.attn_q.weight.lora_a' {UNKNOWN}"),
        (lambda writer: writer.add_sliding_window(256), r"llama\.attention\.sliding_window' = 256 is not supported"),
        (lambda writer: writer.add_rope_dimension_count(16), "partial_rotary_factor=0.5"),
        (lambda writer: writer.add_string("llama.rope.scaling.type", "yarn"), "'yarn' is not supported"),
    ],
)
def test_unsupported_gguf_features_are_refused_by_name(tmp_path, add, message):
    with pytest.raises(InputError, match=message):
        architecture_from_config(open_model(tiny_llama(tmp_path, add)).config)


def test_unknown_architecture_and_missing_metadata_are_refused_by_name(tmp_path):
    with pytest.raises(InputError, match=r"'gemma2' is not supported, expected llama, qwen2 or gemma3; use the"):
        open_model(tiny_llama(tmp_path, family="gemma2"))
    with pytest.raises(InputError, match=r"'llama\.block_count' is missing"):
        open_model(tiny_llama(tmp_path, skip=("block_count",)))


def test_gguf_head_counts_that_differ_by_layer_are_refused(tmp_path):
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
    with pytest.raises(InputError, match="cannot be read as a GGUF file"):
        open_model(str(path))
