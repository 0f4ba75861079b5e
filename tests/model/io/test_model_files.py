import json
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from app.model.io import model_files
from app.model.io.model_files import open_model
from settings.errors import InputError
from tests.local_hub import LocalHub, serve, use_hub

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


def test_tensors_of_a_model_directory_are_read_bit_for_bit(tmp_path):
    model = open_model(str(write_model(tmp_path / "tiny")))
    assert (model.name, model.path, model.config) == ("tiny", tmp_path / "tiny", CONFIG)
    assert model.generation_config == {}
    assert_holds_the_tensors(model)
    (tmp_path / "tiny" / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert open_model(str(tmp_path / "tiny")).generation_config == {"eos_token_id": [1, 2]}


def test_unindexed_tensors_are_read_and_duplicate_ones_refused(tmp_path):
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    *indexed, last = sorted(TENSORS)
    folder = write_sharded_model(tmp_path, dict(zip(indexed, (first, second), strict=True)))
    assert_holds_the_tensors(open_model(str(folder)))
    save_file({name: TENSORS[name] for name in (indexed[0], last)}, folder / first)
    assert_refused(folder, f"'{last}' is in {first} and in {second}; save the model again")


def test_a_peft_adapter_as_model_is_refused_with_advice_to_merge_it(tmp_path):
    (write_model(tmp_path) / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
    way_out = r"a PEFT adapter .* of the model 'owner/base'; merge the two \(peft: merge_and_unload"
    assert_refused(tmp_path, way_out)
    (tmp_path / "config.json").unlink()
    assert_refused(tmp_path, way_out)


def test_the_rotary_buffer_of_old_checkpoints_is_ignored(tmp_path):
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    model = open_model(str(write_model(tmp_path, tensors=TENSORS | buffer)))
    assert set(model.weights.shapes) == set(TENSORS)


def test_an_existing_directory_takes_precedence_over_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    write_model(tmp_path / "owner" / "model")
    assert open_model("owner/model").name == "model"


def test_the_model_fingerprint_depends_only_on_weights_and_config(tmp_path):
    first = open_model(str(write_model(tmp_path / "a"))).fingerprint
    assert open_model(str(write_model(tmp_path / "b"))).fingerprint == first
    trained = TENSORS | {"model.norm.weight": TENSORS["model.norm.weight"] * ml_dtypes.bfloat16(1.01)}
    assert open_model(str(write_model(tmp_path / "c", tensors=trained))).fingerprint != first
    assert open_model(str(write_model(tmp_path / "d", config={**CONFIG, "x": 1}))).fingerprint != first


def test_a_small_change_of_any_single_kernel_changes_the_model_fingerprint(tmp_path):
    """Merging adapters into a few kernels causes changes of this size."""
    kernels = {f"model.layers.{i}.self_attn.v_proj.weight": np.ones((64, 256), np.float32) for i in range(8)}
    rest = {f"model.layers.{i}.mlp.up_proj.weight": np.ones((1024, 256), np.float32) for i in range(8)}
    found = {open_model(str(write_model(tmp_path, tensors=kernels | rest))).fingerprint}
    for name, kernel in kernels.items():
        changed = kernels | rest | {name: kernel * np.float32(1.001)}
        found.add(open_model(str(write_model(tmp_path, tensors=changed))).fingerprint)
    assert len(found) == 9


def assert_refused(folder: Path, message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_model(str(folder))


def test_incomplete_model_directories_are_refused_with_the_reason(tmp_path):
    for folder in ("no_config", "gguf", "pickle", "no_shard"):
        (tmp_path / folder).mkdir()
    save_file(TENSORS, tmp_path / "no_config" / "model.safetensors")
    assert_refused(tmp_path / "no_config", r"no config\.json")
    (tmp_path / "gguf" / "small.gguf").touch()
    assert_refused(tmp_path / "gguf", r"small\.gguf, set model\.path to that file")
    (write_model(tmp_path / "pickle", tensors=None) / "consolidated.00.pth").write_bytes(b"never opened")
    assert_refused(tmp_path / "pickle", r"consolidated.00.pth.*can run arbitrary code")
    (write_sharded_model(tmp_path / "no_shard") / "model-00002-of-00002.safetensors").unlink()
    assert_refused(tmp_path / "no_shard", r"model-00002-of-00002\.safetensors' is missing")


@pytest.mark.parametrize("kept_bytes", [5, -1])
def test_a_truncated_safetensors_file_is_refused(tmp_path, kept_bytes):
    file = write_model(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept_bytes])
    assert_refused(tmp_path, r"model\.safetensors cannot be read as safetensors")


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"model.norm.weight": "../secret.safetensors"}, "must be a plain file name"),
        ({"model.norm.weight": "/etc/passwd"}, "must be a plain file name"),
        ({"model.lost.weight": "model-00001-of-00002.safetensors"}, r"'model\.lost\.weight' is not in shard"),
    ],
)
def test_an_index_with_paths_outside_the_folder_or_wrong_shards_is_refused(tmp_path, weight_map, message):
    save_file(TENSORS, tmp_path / "secret.safetensors")
    assert_refused(write_sharded_model(tmp_path / "model", weight_map), message)


@pytest.mark.parametrize("text", ["{", "[1]", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_a_malformed_index_is_refused(tmp_path, text):
    (write_sharded_model(tmp_path) / "model.safetensors.index.json").write_text(text)
    assert_refused(tmp_path, r"index\.json")


def test_quantized_tensors_are_refused_by_name(tmp_path):
    write_model(tmp_path, tensors=TENSORS | {"model.packed": np.ones(3, np.int32)})
    assert_refused(tmp_path, r"'model\.packed' has dtype I32")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("./nowhere/model", "neither an existing directory or file nor a hub id"),
        ("builtin:large", "choose builtin:tiny"),
        ("nowhere.gguf", r"no file nowhere\.gguf"),
        ("model.safetensors", r"not a \.gguf file; set it to the model's directory"),
        ("owner/model", r"'owner/model' is not a local path, and the newest revision.*HF_HUB_OFFLINE is set"),
    ],
)
def test_a_path_without_a_model_is_refused(tmp_path, monkeypatch, path, message):
    (tmp_path / "model.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        open_model(path)


ID = "owner/model"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalHub]:
    with serve() as hub:
        use_hub(monkeypatch, hub.url, tmp_path / "cache")
        yield hub


def write_files(folder: Path, *, version: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"version": version}))
    save_file({"model.norm.weight": np.full(3, version, np.float32)}, folder / "model.safetensors")
    (folder / "modeling.py").write_text("raise SystemExit('remote code ran')")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    return folder


def refusal(path: str = ID) -> str:
    with pytest.raises(InputError) as caught:
        open_model(path)
    message = str(caught.value)
    assert message.startswith(f"model.path: {path.partition('@')[0]!r} is not a local path")
    assert message.endswith("or set it to a local directory")
    assert "\n" not in message
    return message


def test_a_hub_commit_is_fetched_without_code_and_stays_available_when_its_branch_moves(hub, tmp_path):
    old = hub.commit(ID, write_files(tmp_path / "first"))
    files = open_model(ID)
    assert (files.name, files.commit, files.config) == (ID, old, {"version": 1})
    assert {path.name for path in files.path.iterdir()} == {"config.json", "model.safetensors"}
    new = hub.commit(ID, write_files(tmp_path / "second", version=2))
    assert open_model(ID).commit == new
    pinned = open_model(f"{ID}@{old}")
    assert (pinned.commit, pinned.config) == (old, {"version": 1})


def test_a_complete_cached_model_opens_without_a_network(hub, tmp_path, monkeypatch):
    commit = hub.commit(ID, write_files(tmp_path / "first"))
    fetched = open_model(f"{ID}@main")
    use_hub(monkeypatch, None, tmp_path / "cache")
    for path in (ID, f"{ID}@main", f"{ID}@{commit}"):
        assert open_model(path).fingerprint == fetched.fingerprint
    (fetched.path / "model.safetensors").unlink()
    assert "this machine's cache lacks some of its files" in refusal()


def test_hub_access_errors_say_what_to_do(hub, tmp_path, monkeypatch):
    assert "the newest revision cannot be downloaded" in refusal()
    assert "there is no such model, or it is private; check the id, or log in with HF_TOKEN" in refusal()
    hub.commit(ID, write_files(tmp_path / "first"))
    absent = refusal(f"{ID}@v9")
    assert "revision 'v9' cannot be downloaded" in absent
    assert "it has no such revision; what follows the @" in absent
    hub.gated.add(ID)
    gated = refusal(f"{ID}@main")
    assert "revision 'main' cannot be downloaded" in gated and "it is gated" in gated
    assert f"accept its license at https://huggingface.co/{ID} and log in with HF_TOKEN" in gated
    use_hub(monkeypatch, None, tmp_path / "cache")
    assert "HF_HUB_OFFLINE is set, but this machine's cache lacks some of its files; unset it" in refusal()


def test_unreachable_hub_error_says_what_to_do(tmp_path, monkeypatch):
    with serve() as hub:
        gone = hub.url
    use_hub(monkeypatch, gone, tmp_path / "cache")
    message = refusal()
    assert "this machine's cache lacks some of its files. Try again with a network" in message
    assert "an accepted license and HF_TOKEN" in message
