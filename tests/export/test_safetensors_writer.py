"""Tests that the library and transformers read the written safetensors files and shards."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from app.export.hf_tensors import write_sharded_safetensors
from app.model.io.model_files import INDEX_FILE, SafetensorsFiles
from tests.model.io.test_hf_weights import Held, Watched

FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


def random_tensors() -> dict[str, np.ndarray]:
    """Returns tensors of odd sizes, one without dims, and one that is not contiguous in memory."""
    rng = np.random.default_rng(0)
    shapes = {"a": (5, 7), "b.weight": (3,), "c": (2, 3, 4), "d": (11, 2)}
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    tensors["d"] = np.asfortranarray(tensors["d"])
    return tensors


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_the_library_reads_back_what_was_written(tmp_path, dtype):
    tensors = random_tensors()
    assert write_sharded_safetensors(tmp_path, Held(tensors), dtype) == ["model.safetensors"]
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(read[name], tensor.astype(dtype), err_msg=name, strict=True)
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
    assert int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little") % 8 == 0


def test_shards_are_no_larger_than_asked_and_the_index_finds_every_tensor(tmp_path):
    tensors = random_tensors()
    files = write_sharded_safetensors(tmp_path, Held(tensors), FLOAT32, shard_bytes=160)
    assert files == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert {path.name for path in tmp_path.iterdir()} == {*files, INDEX_FILE}
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
    assert [sorted(load_file(tmp_path / file)) for file in files] == [["a", "b.weight"], ["c"], ["d"]]
    read = SafetensorsFiles(tmp_path)
    assert read.shapes == Held(tensors).shapes
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(read.read(name), tensor, strict=True)


def test_each_tensor_is_read_once_and_gone_when_the_next_is_read(tmp_path):
    source = Watched(random_tensors())
    write_sharded_safetensors(tmp_path, source, FLOAT32, shard_bytes=160)
    assert source.num_reads == dict.fromkeys(source.tensors, 1)
    assert source.num_alive == [0] * len(source.tensors)
