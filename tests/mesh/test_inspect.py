"""The report of where weights and rows lie."""

from __future__ import annotations

import json

import jax
import pytest

from app.mesh.inspect import MeshReport, mesh_report, weight_placement
from tests.tiny import make_mesh

WEIGHTS = {
    "embedding": ((48, 32), ("vocab", "embed")),
    "blocks.key.kernel": ((2, 32, 3, 8), ("layers", "embed", "kv_heads", "head")),
    "final_norm.scale": ((32,), ("embed",)),
}


@pytest.fixture
def report() -> MeshReport:
    return mesh_report(make_mesh((2, 2, 2)), WEIGHTS, samples_per_step=12, num_row_shards=4)


def test_sizes_are_those_of_one_device(report: MeshReport) -> None:
    assert report.num_parameters == 48 * 32 + 2 * 32 * 3 * 8 + 32
    # embed is split over fsdp, vocab over tp; three heads cannot be split in two.
    assert [weight.bytes_per_device for weight in report.weights] == [
        4 * 48 * 32 // 4,
        4 * 2 * 32 * 3 * 8 // 2,
        4 * 32 // 2,
    ]
    assert report.weight_bytes_per_device == sum(weight.bytes_per_device for weight in report.weights)
    assert report.samples_per_device == 3


def test_the_report_agrees_with_what_jax_does(report: MeshReport) -> None:
    from app.mesh.axis_rules import sharding_tree

    shapes = {name: jax.ShapeDtypeStruct(shape, "float32") for name, (shape, _) in WEIGHTS.items()}
    dims = {name: dims for name, (_, dims) in WEIGHTS.items()}
    shardings = sharding_tree(make_mesh((2, 2, 2)), shapes, dims)
    for weight in report.weights:
        array = jax.device_put(jax.numpy.zeros(weight.shape), shardings[weight.name])
        assert array.addressable_shards[0].data.nbytes == weight.bytes_per_device


def test_every_device_has_its_place(report: MeshReport) -> None:
    assert report.shape == {"dp": 2, "fsdp": 2, "tp": 2}
    places = {tuple(device["coordinates"].values()) for device in report.devices}
    assert len(places) == len(report.devices) == report.num_devices == 8
    assert {device["process"] for device in report.devices} == {0}


def test_what_could_not_be_split_is_named() -> None:
    weight = weight_placement("k", (2, 32, 3, 8), ("layers", "embed", "kv_heads", "head"), make_mesh((1, 4, 2)))
    assert weight.axes == (None, "fsdp", None, None)
    assert weight.replicated_dims == ("kv_heads",)
    whole = weight_placement("k", (2, 32, 4, 8), ("layers", "embed", "kv_heads", "head"), make_mesh((1, 4, 2)))
    assert whole.axes == (None, "fsdp", "tp", None)
    assert whole.replicated_dims == ()


def test_one_device_leaves_nothing_to_note() -> None:
    report = mesh_report(make_mesh(), WEIGHTS, samples_per_step=12, num_row_shards=1)
    assert "note:" not in report.to_text()
    assert report.weight_bytes_per_device == 4 * report.num_parameters


def test_a_person_reads_a_table(report: MeshReport) -> None:
    lines = report.to_text().splitlines()
    assert lines[0] == "8 x cpu (cpu) on 1 host(s); mesh dp 2, fsdp 2, tp 2"
    assert lines[2].split() == ["device", "host", "dp", "fsdp", "tp"]
    assert [line.split() for line in lines[3:5]] == [["0", "0", "0", "0", "0"], ["1", "0", "0", "0", "1"]]
    assert "12 samples a step, 3 a device" in lines
    assert lines[-1] == (
        "note: blocks.key.kernel: kv_heads of (2, 32, 3, 8) is not divisible by its axis and stays whole"
    )


def test_a_program_reads_json(report: MeshReport) -> None:
    back = json.loads(json.dumps(report.to_dict()))
    assert back["num_devices"] == 8
    assert back["weights"][0]["name"] == "embedding"
    assert back["weights"][0]["axes"] == ["tp", "fsdp"]
