"""The report of the placement of weights and rows on a mesh."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from app.mesh import devices
from app.mesh.axis_rules import sharding_tree
from app.mesh.chips import parse_slice
from app.mesh.placement import row_sharding
from app.preflight.mesh_layout import HostParts, MeshLayout, host_parts, mesh_layout
from tests.tiny import make_mesh

WEIGHTS = {
    "embedding": (jax.ShapeDtypeStruct((48, 32), "float32"), ("vocab", "embed")),
    "blocks.key.kernel": (jax.ShapeDtypeStruct((2, 32, 3, 8), "float32"), ("layers", "embed", "kv_heads", "head")),
    "blocks.up.codes": (jax.ShapeDtypeStruct((2, 16, 48), "uint8"), ("layers", "embed", "mlp")),
    "final_norm.scale": (jax.ShapeDtypeStruct((32,), "float32"), ("embed",)),
}
NUM_PARAMETERS = 48 * 32 + 2 * 32 * 3 * 8 + 2 * 32 * 48 + 32
"""Two codes of a quantized kernel share a byte."""


def make_layout(shape: tuple[int, int, int], *, memory_bytes: int | None) -> MeshLayout:
    mesh = make_mesh(shape)
    return mesh_layout(mesh, WEIGHTS, num_parameters=NUM_PARAMETERS, samples_per_step=12, memory_bytes=memory_bytes)


@pytest.fixture
def layout() -> MeshLayout:
    return make_layout((2, 2, 2), memory_bytes=2**30)


def test_the_bytes_equal_those_of_real_arrays(layout: MeshLayout) -> None:
    shapes = {name: shape for name, (shape, _) in WEIGHTS.items()}
    dims = {name: dims for name, (_, dims) in WEIGHTS.items()}
    shardings = sharding_tree(make_mesh((2, 2, 2)), shapes, dims)
    for weight in layout.weights:
        array = jax.device_put(jax.numpy.zeros(weight.shape, shapes[weight.name].dtype), shardings[weight.name])
        assert array.addressable_shards[0].data.nbytes == weight.bytes_per_device
    # embed is split over fsdp and vocab over tp; three heads cannot be split in two.
    assert [weight.axes for weight in layout.weights[:2]] == [("tp", "fsdp"), (None, "fsdp", None, None)]
    assert layout.weights[1].bytes_per_device == 4 * 2 * 32 * 3 * 8 // 2
    assert layout.weight_bytes_per_device == sum(weight.bytes_per_device for weight in layout.weights)


def test_the_parts_equal_those_that_jax_gives_the_devices_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    # Virtual devices of two hosts with four each.
    monkeypatch.setattr(devices, "_simulated_slice", parse_slice("v4-16"))
    mesh = make_mesh((2, 2, 2))
    rows = row_sharding(mesh).devices_indices_map((4,))
    weights = NamedSharding(mesh, PartitionSpec("fsdp", "tp")).devices_indices_map((2, 2))
    for parts in host_parts(mesh):
        of_host = [device for device in mesh.devices.flat if device.id in parts.devices]
        assert len(of_host) == 4
        assert {rows[device][0].start for device in of_host} == {*parts.rows}
        assert {(one.start, two.start) for one, two in (weights[device] for device in of_host)} == {
            *zip(parts.fsdp, parts.tp, strict=True)
        }


def test_a_simulated_slice_is_reported_like_real_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_simulated_slice", parse_slice("v4-16"))
    lines = make_layout((2, 4, 1), memory_bytes=2**35).to_text().splitlines()
    assert lines[0] == "8 x TPU v4 (tpu), 32.00 GiB each, on 2 host(s)"
    assert lines[1] == "host 0 of a simulated v4-16: devices 0-3"
    assert lines[5].split() == ["0", "0-3", "0-3", "0-3", "0"]
    assert lines[6].split() == ["1", "4-7", "4-7", "0-3", "0"]


def test_the_text_is_a_table_that_lists_few_of_many_hosts(layout: MeshLayout) -> None:
    lines = layout.to_text().splitlines()
    assert lines[:2] == ["8 x cpu (cpu), 1.00 GiB each, on 1 host(s)", "host 0: devices 0-7"]
    assert lines[3] == "mesh dp 2 x fsdp 2 x tp 2"
    assert lines[4].startswith("host  devices  parts of rows (of 4)")
    assert lines[5].split() == ["0", "0-7", "0-3", "0-1", "0-1"]
    assert lines[-1] == "12 samples per step, 3 per device"
    hosts = [HostParts(i, (2 * i, 2 * i + 1), (2 * i, 2 * i + 1), (0, 1), (0, 0)) for i in range(10)]
    rows = [line.split() for line in replace(layout, hosts=hosts).to_text().splitlines()[5:9]]
    assert [row[:2] for row in rows] == [["0", "0-1"], ["1", "2-3"], ["...", "..."], ["9", "18-19"]]
