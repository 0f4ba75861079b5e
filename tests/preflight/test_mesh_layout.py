"""Tests of the report of the placement of weights and rows."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from app.mesh import topology
from app.mesh.placement import row_sharding
from app.mesh.simulated_slice import TPU_CHIPS, parse_slice
from app.preflight.mesh_layout import DevicePlace, MeshReport, Topology, device_places, mesh_report, weight_placement
from tests.tiny import make_mesh

WEIGHTS = {
    "embedding": (jax.ShapeDtypeStruct((48, 32), "float32"), ("vocab", "embed")),
    "blocks.key.kernel": (jax.ShapeDtypeStruct((2, 32, 3, 8), "float32"), ("layers", "embed", "kv_heads", "head")),
    "blocks.up.codes": (jax.ShapeDtypeStruct((2, 16, 48), "uint8"), ("layers", "embed", "mlp")),
    "final_norm.scale": (jax.ShapeDtypeStruct((32,), "float32"), ("embed",)),
}
NUM_PARAMETERS = 48 * 32 + 2 * 32 * 3 * 8 + 2 * 32 * 48 + 32
"""Number of parameters; two codes share a byte."""


def reported(shape: tuple[int, int, int], *, memory_bytes: int | None) -> MeshReport:
    mesh = make_mesh(shape)
    return mesh_report(mesh, WEIGHTS, num_parameters=NUM_PARAMETERS, samples_per_step=12, memory_bytes=memory_bytes)


@pytest.fixture
def report() -> MeshReport:
    return reported((2, 2, 2), memory_bytes=2**30)


def test_sizes_are_those_of_one_device(report: MeshReport) -> None:
    assert report.num_parameters == NUM_PARAMETERS
    # embed is split over fsdp, vocab over tp; three heads cannot be split in two.
    assert [weight.bytes_per_device for weight in report.weights] == [
        4 * 48 * 32 // 4,
        4 * 2 * 32 * 3 * 8 // 2,
        2 * 16 * 48 // 4,
        4 * 32 // 2,
    ]
    assert report.weight_bytes_per_device == sum(weight.bytes_per_device for weight in report.weights)
    assert report.samples_per_device == 3


def test_the_report_agrees_with_what_jax_does(report: MeshReport) -> None:
    from app.mesh.axis_rules import sharding_tree

    shapes = {name: shape for name, (shape, _) in WEIGHTS.items()}
    dims = {name: dims for name, (_, dims) in WEIGHTS.items()}
    shardings = sharding_tree(make_mesh((2, 2, 2)), shapes, dims)
    for weight in report.weights:
        array = jax.device_put(jax.numpy.zeros(weight.shape, shapes[weight.name].dtype), shardings[weight.name])
        assert array.addressable_shards[0].data.nbytes == weight.bytes_per_device


def test_the_picture_shows_the_shards_that_jax_gives_each_device() -> None:
    mesh = make_mesh((2, 2, 2))
    rows = row_sharding(mesh).devices_indices_map((4,))
    weights = NamedSharding(mesh, PartitionSpec("fsdp", "tp")).devices_indices_map((2, 2))
    by_id = {device.id: device for device in mesh.devices.flat}
    for place in device_places(mesh):
        device = by_id[place.id]
        assert rows[device] == (slice(place.row_shard, place.row_shard + 1, None),)
        assert weights[device] == tuple(slice(part, part + 1, None) for part in place.weight_shard)


@pytest.fixture
def pretended_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the eight virtual devices stand for two hosts of four."""
    monkeypatch.setattr(topology, "_simulated_slice", parse_slice("v4-16"))


def test_a_pretended_slice_is_told_as_if_it_were_there(pretended_hosts: None) -> None:
    report = reported((2, 4, 1), memory_bytes=2**35)
    assert (report.topology.platform, report.topology.device_kind) == ("tpu", "TPU v4")
    assert (report.topology.num_hosts, report.topology.local_devices) == (2, (0, 1, 2, 3))
    assert report.topology.chip == TPU_CHIPS["v4"]
    lines = report.to_text().splitlines()
    assert lines[0] == "8 x TPU v4 (tpu), 32.0 GiB each, on 2 host(s), one process each"
    assert lines[1].startswith("host 0 of v4-16 (pretended: none of it is there)")
    assert lines[5].split() == ["0", "0-3", "0-3", "0-3", "0"]
    assert lines[6].split() == ["1", "4-7", "4-7", "0-3", "0"]


def test_many_hosts_are_drawn_as_few_lines() -> None:
    places = [DevicePlace(i, i // 2, {}, i, (i % 2, 0)) for i in range(20)]
    here = Topology("tpu", "TPU v4", None, 20, 10, 0, (0, 1), None, None)
    report = MeshReport(here, {"dp": 10, "fsdp": 2, "tp": 1}, places, [], 0, 0, 20, 1.0)
    drawn = [line.split() for line in report.to_text().splitlines()[5:9]]
    assert [line[:2] for line in drawn] == [["0", "0-1"], ["1", "2-3"], ["...", "..."], ["9", "18-19"]]


def test_what_could_not_be_split_is_named() -> None:
    dims, mesh = ("layers", "embed", "kv_heads", "head"), make_mesh((1, 4, 2))
    weight = weight_placement("k", jax.ShapeDtypeStruct((2, 32, 3, 8), "float32"), dims, mesh)
    assert weight.axes == (None, "fsdp", None, None)
    assert weight.replicated_dims == ("kv_heads",)
    whole = weight_placement("k", jax.ShapeDtypeStruct((2, 32, 4, 8), "float32"), dims, mesh)
    assert whole.axes == (None, "fsdp", "tp", None)
    assert whole.replicated_dims == ()


def test_a_person_reads_a_table(report: MeshReport) -> None:
    lines = report.to_text().splitlines()
    assert lines[0] == "8 x cpu (cpu), 1.0 GiB each, on 1 host(s), one process each"
    assert lines[1] == "host 0 here: devices 0-7"
    assert lines[3] == "mesh dp 2 x fsdp 2 x tp 2"
    assert lines[4].startswith("host  devices  parts of rows (of 4)")
    assert lines[5].split() == ["0", "0-7", "0-3", "0-1", "0-1"]
    assert "12 samples a step, 3 a device" in lines
    assert lines[-1] == (
        "note: blocks.key.kernel: kv_heads of (2, 32, 3, 8) is not divisible by its axis and stays whole"
    )
