"""The report of the placement of weights and rows on a mesh."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from app.mesh import devices
from app.mesh.axis_rules import partition_spec
from app.mesh.chips import parse_slice
from app.mesh.placement import row_sharding
from app.preflight.inspect_mesh import HostParts, build_mesh_inspection, host_parts, open_step_outline, weight_placement
from settings import load
from tests.program import of_tiny
from tests.tiny import make_mesh

WEIGHTS = {
    # embed is split over fsdp and vocab over tp; three heads cannot be split in two.
    "embedding": (jax.ShapeDtypeStruct((48, 32), "float32"), ("vocab", "embed"), ("tp", "fsdp")),
    "blocks.key.kernel": (
        *(jax.ShapeDtypeStruct((2, 32, 3, 8), "float32"), ("layers", "embed", "kv_heads", "head")),
        (None, "fsdp", None, None),
    ),
    # Two codes of a quantized kernel share a byte.
    "blocks.up.codes": (
        *(jax.ShapeDtypeStruct((2, 16, 48), "uint8"), ("layers", "embed", "mlp")),
        (None, "fsdp", "tp"),
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_bytes_equal_those_of_real_arrays(name: str) -> None:
    (shape, dims, axes), mesh = WEIGHTS[name], make_mesh((2, 2, 2))
    found = weight_placement(name, shape, dims, mesh)
    array = jax.device_put(jax.numpy.zeros(shape.shape, shape.dtype), NamedSharding(mesh, PartitionSpec(*axes)))
    assert partition_spec(dims, shape.shape, mesh) == PartitionSpec(*found.axes) == PartitionSpec(*axes)
    assert array.addressable_shards[0].data.nbytes == found.bytes_per_device


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


def test_the_text_is_a_table_that_lists_few_of_many_hosts(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_simulated_slice", None)
    resolved = load(None, [*of_tiny(tiny_model)[1::2], "mesh.pretend=v4-16"], {})
    report = build_mesh_inspection(open_step_outline(resolved, compiles=False), compiles=False)
    lines = report.to_text().splitlines()
    assert lines[:2] == [
        "8 x TPU v4 (tpu), 32.00 GiB each, on 2 host(s)",
        "host 0 of a simulated v4-16: devices 0-3",
    ]
    assert lines[3] == "mesh dp 2 x fsdp 4 x tp 1"
    assert lines[4].startswith("host  devices  parts of rows (of 8)")
    assert [line.split() for line in lines[5:7]] == [["0", "0-3", "0-3", "0-3", "0"], ["1", "4-7", "4-7", "0-3", "0"]]
    assert "32 samples per step, 4 per device" in lines
    hosts = [HostParts(i, (2 * i, 2 * i + 1), (2 * i, 2 * i + 1), (0, 1), (0, 0)) for i in range(10)]
    rows = [line.split() for line in replace(report, hosts=hosts).to_text().splitlines()[5:9]]
    assert [row[:2] for row in rows] == [["0", "0-1"], ["1", "2-3"], ["...", "..."], ["9", "18-19"]]
