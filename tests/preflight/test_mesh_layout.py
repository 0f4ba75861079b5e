"""The report of the placement of weights and rows on a mesh."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from app.mesh import devices
from app.mesh.axis_rules import sharding_tree
from app.mesh.chips import TPU_CHIPS, parse_slice
from app.mesh.placement import row_sharding
from app.preflight.mesh_layout import DevicePlace, MeshReport, Topology, device_places, mesh_report, weight_placement
from tests.tiny import make_mesh

WEIGHTS = {
    "embedding": (jax.ShapeDtypeStruct((48, 32), "float32"), ("vocab", "embed")),
    "blocks.key.kernel": (jax.ShapeDtypeStruct((2, 32, 3, 8), "float32"), ("layers", "embed", "kv_heads", "head")),
    "blocks.up.codes": (jax.ShapeDtypeStruct((2, 16, 48), "uint8"), ("layers", "embed", "mlp")),
    "final_norm.scale": (jax.ShapeDtypeStruct((32,), "float32"), ("embed",)),
}
NUM_PARAMETERS = 48 * 32 + 2 * 32 * 3 * 8 + 2 * 32 * 48 + 32
"""Two codes of a quantized kernel share a byte."""


def make_report(shape: tuple[int, int, int], *, memory_bytes: int | None) -> MeshReport:
    mesh = make_mesh(shape)
    return mesh_report(mesh, WEIGHTS, num_parameters=NUM_PARAMETERS, samples_per_step=12, memory_bytes=memory_bytes)


@pytest.fixture
def report() -> MeshReport:
    return make_report((2, 2, 2), memory_bytes=2**30)


def test_the_bytes_equal_those_of_real_arrays(report: MeshReport) -> None:
    shapes = {name: shape for name, (shape, _) in WEIGHTS.items()}
    dims = {name: dims for name, (_, dims) in WEIGHTS.items()}
    shardings = sharding_tree(make_mesh((2, 2, 2)), shapes, dims)
    for weight in report.weights:
        array = jax.device_put(jax.numpy.zeros(weight.shape, shapes[weight.name].dtype), shardings[weight.name])
        assert array.addressable_shards[0].data.nbytes == weight.bytes_per_device
    # embed is split over fsdp and vocab over tp; three heads cannot be split in two.
    assert report.weights[0].bytes_per_device == 4 * 48 * 32 // 4
    assert report.weights[1].bytes_per_device == 4 * 2 * 32 * 3 * 8 // 2
    assert report.weight_bytes_per_device == sum(weight.bytes_per_device for weight in report.weights)
    assert report.num_parameters == NUM_PARAMETERS and report.samples_per_device == 3


def test_the_shards_equal_those_that_jax_gives_each_device() -> None:
    mesh = make_mesh((2, 2, 2))
    rows = row_sharding(mesh).devices_indices_map((4,))
    weights = NamedSharding(mesh, PartitionSpec("fsdp", "tp")).devices_indices_map((2, 2))
    by_id = {device.id: device for device in mesh.devices.flat}
    for place in device_places(mesh):
        device = by_id[place.id]
        assert rows[device] == (slice(place.row_shard, place.row_shard + 1, None),)
        assert weights[device] == tuple(slice(part, part + 1, None) for part in place.weight_shard)


def test_a_simulated_slice_is_reported_like_real_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_simulated_slice", parse_slice("v4-16"))
    report = make_report((2, 4, 1), memory_bytes=2**35)
    assert (report.topology.platform, report.topology.device_kind) == ("tpu", "TPU v4")
    assert (report.topology.num_hosts, report.topology.local_devices) == (2, (0, 1, 2, 3))
    assert report.topology.chip == TPU_CHIPS["v4"]
    lines = report.to_text().splitlines()
    assert lines[0] == "8 x TPU v4 (tpu), 32.00 GiB each, on 2 host(s)"
    assert lines[1] == "host 0 of a simulated v4-16: devices 0-3"
    assert lines[5].split() == ["0", "0-3", "0-3", "0-3", "0"]
    assert lines[6].split() == ["1", "4-7", "4-7", "0-3", "0"]


def test_the_text_lists_few_of_many_hosts() -> None:
    places = [DevicePlace(i, i // 2, {}, i, (i % 2, 0)) for i in range(20)]
    hosts = Topology("tpu", "TPU v4", None, 20, 10, 0, (0, 1), None, None)
    report = MeshReport(hosts, {"dp": 10, "fsdp": 2, "tp": 1}, places, [], 0, 0, 20, 1.0)
    rows = [line.split() for line in report.to_text().splitlines()[5:9]]
    assert [row[:2] for row in rows] == [["0", "0-1"], ["1", "2-3"], ["...", "..."], ["9", "18-19"]]


def test_a_dim_that_its_axis_does_not_divide_is_replicated() -> None:
    dims, mesh = ("layers", "embed", "kv_heads", "head"), make_mesh((1, 4, 2))
    weight = weight_placement("k", jax.ShapeDtypeStruct((2, 32, 3, 8), "float32"), dims, mesh)
    assert weight.axes == (None, "fsdp", None, None) and weight.replicated_dims == ("kv_heads",)


def test_the_text_is_a_table(report: MeshReport) -> None:
    lines = report.to_text().splitlines()
    assert lines[0] == "8 x cpu (cpu), 1.00 GiB each, on 1 host(s)"
    assert lines[1] == "host 0: devices 0-7"
    assert lines[3] == "mesh dp 2 x fsdp 2 x tp 2"
    assert lines[4].startswith("host  devices  parts of rows (of 4)")
    assert lines[5].split() == ["0", "0-7", "0-3", "0-1", "0-1"]
    assert "12 samples per step, 3 per device" in lines
    assert lines[-1] == "note: blocks.key.kernel: kv_heads of (2, 32, 3, 8) is replicated: not divisible by its axis"
