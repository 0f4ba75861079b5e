from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from app.model.io import model_files
from app.model.io.model_files import open_model
from settings.errors import InputError

CONFIG = {"model_type": "llama", "hidden_size": 4}
TENSORS = {
    "model.embed_tokens.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "model.norm.weight": np.array([1, -2, 3.5, 0.25], ml_dtypes.bfloat16),
    "model.layers.0.mlp.up_proj.weight": np.array([[0.5, 65504]], np.float16),
}


def write_model(directory: Path, *, config=CONFIG, tensors=TENSORS) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if tensors:
        save_file(tensors, directory / "model.safetensors")
    return directory


def write_sharded_model(directory: Path, weight_map: dict[str, str] | None = None) -> Path:
    write_model(directory, tensors=None)
    names = sorted(TENSORS)
    shards = {"model-00001-of-00002.safetensors": names[:1], "model-00002-of-00002.safetensors": names[1:]}
    for shard, held in shards.items():
        save_file({name: TENSORS[name] for name in held}, directory / shard)
    weight_map = weight_map or {name: shard for shard, held in shards.items() for name in held}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def assert_holds_the_tensors(model: model_files.ModelFiles) -> None:
    assert model.weights.shapes == {name: tensor.shape for name, tensor in TENSORS.items()}
    for name, tensor in TENSORS.items():
        read = model.weights.read(name)
        assert read.dtype == tensor.dtype
        np.testing.assert_array_equal(read, tensor)


def test_a_directory_gives_its_tensors_bit_for_bit_bfloat16_included(tmp_path):
    model = open_model(str(write_model(tmp_path / "tiny")))
    assert (model.name, model.path, model.config) == ("tiny", tmp_path / "tiny", CONFIG)
    assert model.generation_config == {}
    assert_holds_the_tensors(model)


def test_shards_are_read_through_their_index(tmp_path):
    assert_holds_the_tensors(open_model(str(write_sharded_model(tmp_path / "sharded"))))


def test_the_generation_config_is_read_where_there_is_one(tmp_path):
    write_model(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert open_model(str(tmp_path)).generation_config == {"eos_token_id": [1, 2]}


def test_the_rotary_buffer_of_old_checkpoints_is_not_a_weight(tmp_path):
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    model = open_model(str(write_model(tmp_path, tensors=TENSORS | buffer)))
    assert set(model.weights.shapes) == set(TENSORS)


def test_an_existing_directory_is_taken_before_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    write_model(tmp_path / "owner" / "model")
    assert open_model("owner/model").name == "model"


def test_the_builtin_model_is_found_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(model_files, "BUILTIN_DIRECTORY", tmp_path / "builtin")
    (tmp_path / "builtin").mkdir()
    write_model(tmp_path / "builtin" / "tiny")
    model = open_model("builtin:tiny")
    assert model.name == "builtin:tiny"
    assert_holds_the_tensors(model)
    with pytest.raises(InputError, match=r"builtin:large.*known: builtin:tiny"):
        open_model("builtin:large")


def test_the_fingerprint_follows_weights_and_config_not_the_place(tmp_path):
    first = open_model(str(write_model(tmp_path / "a"))).fingerprint
    assert open_model(str(write_model(tmp_path / "b"))).fingerprint == first
    trained = TENSORS | {"model.norm.weight": TENSORS["model.norm.weight"] * ml_dtypes.bfloat16(1.01)}
    assert open_model(str(write_model(tmp_path / "c", tensors=trained))).fingerprint != first
    assert open_model(str(write_model(tmp_path / "d", config={**CONFIG, "x": 1}))).fingerprint != first


def test_a_small_change_of_any_one_kernel_changes_the_fingerprint(tmp_path):
    """The change is one that merging adapters into a few kernels causes."""
    kernels = {f"model.layers.{i}.self_attn.v_proj.weight": np.ones((64, 256), np.float32) for i in range(8)}
    rest = {f"model.layers.{i}.mlp.up_proj.weight": np.ones((1024, 256), np.float32) for i in range(8)}
    found = {open_model(str(write_model(tmp_path, tensors=kernels | rest))).fingerprint}
    for name, kernel in kernels.items():
        changed = kernels | rest | {name: kernel * np.float32(1.001)}
        found.add(open_model(str(write_model(tmp_path, tensors=changed))).fingerprint)
    assert len(found) == 9


def test_a_directory_without_config_is_refused(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"no config\.json"):
        open_model(str(tmp_path))


def test_a_directory_with_only_a_gguf_file_says_how_to_name_it(tmp_path):
    (tmp_path / "small.gguf").touch()
    with pytest.raises(InputError, match=r"small\.gguf, set model\.path to that file"):
        open_model(str(tmp_path))


@pytest.mark.parametrize("pickle", ["consolidated.00.pth"])
def test_pickled_weights_are_refused_with_the_reason(tmp_path, pickle):
    (write_model(tmp_path, tensors=None) / pickle).write_bytes(b"never opened")
    with pytest.raises(InputError, match=rf"{pickle}.*can run arbitrary code"):
        open_model(str(tmp_path))


@pytest.mark.parametrize("kept_bytes", [5, -1])
def test_a_truncated_safetensors_file_is_refused(tmp_path, kept_bytes):
    file = write_model(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept_bytes])
    with pytest.raises(InputError, match=r"model\.safetensors is truncated"):
        open_model(str(tmp_path))


def test_a_missing_shard_is_named(tmp_path):
    (write_sharded_model(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InputError, match=r"model-00002-of-00002\.safetensors' is missing"):
        open_model(str(tmp_path))


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd"])
def test_a_shard_outside_the_directory_is_refused(tmp_path, shard):
    save_file(TENSORS, tmp_path / "secret.safetensors")
    directory = write_sharded_model(tmp_path / "model", {"model.norm.weight": shard})
    with pytest.raises(InputError, match="must be a plain file name in the directory of the index"):
        open_model(str(directory))


def test_a_tensor_that_is_not_where_the_index_says_is_named(tmp_path):
    write_sharded_model(tmp_path, {"model.lost.weight": "model-00001-of-00002.safetensors"})
    with pytest.raises(InputError, match=r"'model\.lost\.weight' is not in shard"):
        open_model(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[1]", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_a_malformed_index_is_refused(tmp_path, text):
    (write_sharded_model(tmp_path) / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InputError, match=r"index\.json"):
        open_model(str(tmp_path))


def test_quantised_tensors_are_refused_by_name(tmp_path):
    write_model(tmp_path, tensors=TENSORS | {"model.packed": np.ones(3, np.int32)})
    with pytest.raises(InputError, match=r"'model\.packed' has type I32"):
        open_model(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_a_malformed_config_is_refused(tmp_path, text):
    (write_model(tmp_path) / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=r"config\.json(: expected a JSON object| cannot be read as JSON)"):
        open_model(str(tmp_path))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("./nowhere/model", "neither an existing directory or file nor a hub id"),
        ("nowhere.gguf", r"no file nowhere\.gguf"),
        ("owner/model", r"'owner/model' is not a local path, and the newest revision.*HF_HUB_OFFLINE is set"),
    ],
)
def test_a_model_that_cannot_be_found_is_one_plain_error(tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        open_model(path)


def test_a_file_that_is_no_gguf_file_is_refused(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(InputError, match=r"not a \.gguf file; set it to the model's directory"):
        open_model(str(tmp_path / "model.safetensors"))


def test_nothing_that_can_run_code_is_fetched_from_the_hub():
    assert not [name for name in model_files.HUB_FILES if name.endswith((".py", ".bin", ".pt", ".pth"))]
    assert all(name.endswith((".json", ".safetensors", ".jinja")) for name in model_files.HUB_FILES)
