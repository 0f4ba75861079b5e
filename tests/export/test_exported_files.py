"""Tests the files of an export: tokenizer, configuration, tensors and adapters."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file

from app.export.hf_tensors import PROJECTIONS, HfTensors, write_adapters, write_sharded_safetensors
from app.export.huggingface import (
    ADAPTER_WEIGHTS_FILE,
    adapter_config,
    export_config,
    export_generation_config,
    write_tokenizer,
)
from app.model.decoder import DecoderDefinition, Params
from app.model.io.hf_weights import load_weights
from app.model.io.model_files import ADAPTER_CONFIG_FILE, INDEX_FILE, ModelFiles, SafetensorsFiles, open_model
from app.model.lora import LoRAConfig, combine_params
from app.prompts.tokenizer import load_fast_tokenizer, load_tokenizer
from settings.schema.model import PROJECTIONS as TARGETS
from tests.model import reference
from tests.model.io.tensors_in_memory import Held, Watched, random_file
from tests.prompts.tokenizers import write_directory, write_gguf
from tests.tiny import BIASED, MIXTURE, ODD, SWITCHED, make_mesh, random_params

MESSAGES = [{"role": "user", "content": "12 + 1 = a?\n\nna\u00efve 345"}]


def written(files: ModelFiles, directory: Path) -> ModelFiles:
    """Returns the model files of a folder to which only the tokenizer of `files` was written."""
    directory.mkdir()
    write_tokenizer(files, directory)
    return replace(files, path=directory, weights=open_model("builtin:tiny").weights)


@pytest.mark.parametrize("pre", ["smollm", "qwen2"])
def test_exported_gguf_tokenizer_equals_the_one_loaded_by_transformers(tmp_path, pre):
    files = open_model(str(write_gguf(tmp_path / "a.gguf", pre=pre, padding=3)))
    again = written(files, tmp_path / "out")
    assert load_tokenizer(again).fingerprint == load_tokenizer(files).fingerprint
    # transformers picks the tokenizer class by the model type in config.json, which a complete export contains.
    (tmp_path / "out" / "config.json").write_text(json.dumps(files.config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = load_fast_tokenizer(files)
    assert theirs.eos_token == ours.eos_token == "<|im_end|>"
    assert theirs.encode(MESSAGES[0]["content"]) == ours.encode(MESSAGES[0]["content"])
    for generates in (False, True):
        chats = [
            tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=generates, return_dict=False)
            for tokenizer in (theirs, ours)
        ]
        assert chats[0] == chats[1]


def test_tokenizer_files_are_copied_unchanged_without_code(tmp_path):
    directory = write_directory(tmp_path / "base")
    (directory / "tokenization_own.py").write_text("raise SystemExit")
    (directory / "merges.txt").symlink_to(directory / "tokenizer.json")
    files = open_model(str(directory))
    again = written(files, tmp_path / "out")
    copied = {path.name: path for path in (tmp_path / "out").iterdir()}
    assert set(copied) == {"tokenizer.json", "tokenizer_config.json", "merges.txt"}
    assert not copied["merges.txt"].is_symlink()
    assert all(path.read_bytes() == (directory / name).read_bytes() for name, path in copied.items())
    assert load_tokenizer(again).fingerprint == load_tokenizer(files).fingerprint


BASE = {"model_type": "qwen2", "hidden_size": 8, "rope_theta": 1e6}


def test_exported_config_keeps_the_base_but_sets_dtype_and_eos_ids():
    terse = export_config(BASE | {"eos_token_id": None}, dtype="float32", eos_ids=(3, 5))
    added = {"architectures": ["Qwen2ForCausalLM"], "eos_token_id": [3, 5], "torch_dtype": "float32"}
    assert terse == BASE | added
    assert export_config(BASE | {"eos_token_id": 0}, dtype="float32", eos_ids=(0, 3))["eos_token_id"] == 0
    for name, other in (("torch_dtype", "dtype"), ("dtype", "torch_dtype")):
        config = export_config(BASE | {name: "bfloat16"}, dtype="float32", eos_ids=(3,))
        assert config[name] == "float32" and other not in config
    named = BASE | {"_name_or_path": "/home/somebody/qwen", "transformers_version": "4.40.0"}
    assert "_name_or_path" not in export_config(named, dtype="float32", eos_ids=(3,))
    assert "transformers_version" not in export_generation_config(named, eos_ids=(3,), pad_id=0)
    base = {"eos_token_id": 2, "temperature": 0.6, "pad_token_id": 9}
    for eos_ids, written in (((7,), 7), ((2, 7), [2, 7])):
        assert export_generation_config(base, eos_ids=eos_ids, pad_id=0) == base | {"eos_token_id": written}
        assert export_generation_config({}, eos_ids=eos_ids, pad_id=4) == {"pad_token_id": 4, "eos_token_id": written}


MIXTRAL = replace(MIXTURE, family="mixtral", query_key_norms=False)


def random_tensors() -> dict[str, np.ndarray]:
    """Returns tensors of odd sizes, one of which is not contiguous in memory."""
    rng = np.random.default_rng(0)
    shapes = {"a": (5, 7), "b.weight": (3,), "c": (2, 3, 4), "d": (11, 2)}
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    tensors["d"] = np.asfortranarray(tensors["d"])
    return tensors


def test_shards_are_bounded_and_the_index_finds_each_tensor(tmp_path):
    tensors = random_tensors()
    source = Watched(tensors)
    files = write_sharded_safetensors(tmp_path, source, np.dtype(np.float32), shard_bytes=160)
    # Each tensor is read once and freed before the next one is read.
    assert (source.num_reads, source.num_alive) == (dict.fromkeys(tensors, 1), [0] * len(tensors))
    assert files == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert {path.name for path in tmp_path.iterdir()} == {*files, INDEX_FILE}
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
    assert [sorted(load_file(tmp_path / file)) for file in files] == [["a", "b.weight"], ["c"], ["d"]]
    read = SafetensorsFiles(tmp_path)
    assert read.shapes == Held(tensors).shapes
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(read.read(name), tensor, strict=True)


@pytest.mark.parametrize(
    ("architecture", "mesh_shape"),
    [(BIASED, (2, 2, 2)), (SWITCHED, (1, 8, 1)), (MIXTURE, (1, 2, 4)), (ODD, (1, 1, 1)), (MIXTRAL, (1, 1, 1))],
    ids=["untied-biases", "every-switch", "qwen3_moe", "tied", "mixtral"],
)
def test_exported_tensors_equal_the_loaded_ones_bit_for_bit(architecture, mesh_shape):
    params, tensors = random_file(architecture)
    definition = DecoderDefinition.create(architecture)
    out = HfTensors(definition, load_weights(definition, Held(tensors), make_mesh(mesh_shape)))
    assert out.shapes == {name: tensor.shape for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(out.read(name), tensor, err_msg=name, strict=True)
    jax.tree.map(np.testing.assert_array_equal, load_weights(definition, out, make_mesh()), params)


def write_adapter_folder(directory: Path, base: Path, lora: LoRAConfig, trained: Params) -> Path:
    directory.mkdir()
    (directory / ADAPTER_CONFIG_FILE).write_text(json.dumps(adapter_config(lora, base=str(base), revision=None)))
    write_adapters(directory / ADAPTER_WEIGHTS_FILE, trained, np.dtype(np.float32))
    return directory


# peft asks transformers for a property by its old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("family", "projections"), [("llama", TARGETS), ("gemma3_text", ("o_proj", "gate_proj", "down_proj"))]
)
def test_peft_logits_equal_ours_with_the_same_adapters(tmp_path, family, projections):
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    base = reference.write_checkpoint(tmp_path / "base", family, num_hidden_layers=2)
    plain, params = reference.load_ours(base)
    lora = LoRAConfig(rank=3, alpha=7.5, projections=projections)
    definition = DecoderDefinition.create(plain.architecture, lora=lora)
    trained = definition.trainable(random_params(definition))
    written = write_adapter_folder(tmp_path / "adapter", base, lora, trained)
    theirs = peft.PeftModel.from_pretrained(reference.load_reference(base), str(written)).eval()
    rows = reference.packed_rows(*reference.SHORT_ROWS)
    ours = reference.our_logits(definition, combine_params(trained, params), rows)
    assert np.abs(ours - reference.our_logits(plain, params, rows)).max() > 0.5
    reference.assert_reference_logits(ours, rows, theirs)


def test_adapter_config_has_rank_alpha_base_and_names_of_projections():
    assert [name.rpartition(".")[2] for name in PROJECTIONS.values()] == list(TARGETS)
    lora = LoRAConfig(rank=4, alpha=16.0, projections=("q_proj",))
    config = adapter_config(lora, base="some/model", revision="c0ffee")
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 16, ["q_proj"])
    assert isinstance(config["lora_alpha"], int) and config["task_type"] == "CAUSAL_LM"
    assert (config["base_model_name_or_path"], config["revision"]) == ("some/model", "c0ffee")
