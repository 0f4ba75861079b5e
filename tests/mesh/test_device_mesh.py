"""Tests the mesh: its shape, hosts, submeshes and generating devices, the placement of arrays, and chips."""

import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh as DeviceMesh
from jax.sharding import PartitionSpec

from app.mesh import device_mesh, placement
from app.mesh.axis_rules import AXES, axis_size, constrain, partition_spec
from app.mesh.chips import TPU_CHIPS, find_chip, parse_pretended
from app.mesh.device_mesh import (
    assign_worker_devices,
    generation_devices,
    host_submesh,
    is_grouped_by_host,
    make_mesh,
    make_submesh,
    num_hosts,
    parse_mesh_shape,
    without_generation_devices,
)
from app.mesh.devices import check_equal_device_counts
from settings.errors import InputError
from settings.schema.mesh import MeshSettings
from tests.tiny import make_mesh as tiny_mesh


@dataclass(frozen=True)
class Device:
    """The attributes of a device that determine its place in a mesh."""

    id: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"


def devices_of(*per_host: int) -> list[Device]:
    hosts = [host for host, count in enumerate(per_host) for _ in range(count)]
    return [Device(i, host) for i, host in enumerate(hosts)]


@pytest.mark.parametrize(
    ("text", "num_devices", "num_processes", "expected"),
    [
        ("2,2,2", 8, 1, (2, 2, 2)),
        ("1,-1,1", 8, 2, (1, 8, 1)),
        ("1,4,-1", 8, 2, (1, 4, 2)),
        ("auto", 8, 1, (1, 8, 1)),
        ("auto", 16, 4, (4, 4, 1)),
    ],
)
def test_a_mesh_shape_uses_every_device(text, num_devices, num_processes, expected):
    assert parse_mesh_shape(text, num_devices=num_devices, num_processes=num_processes) == expected


@pytest.mark.parametrize(("text", "needs"), [("2,8,1", "16 devices"), ("3,-1,1", "a multiple of 3 devices")])
def test_a_mesh_shape_that_does_not_fit_is_refused(text, needs):
    message = f"mesh.shape: {text!r} needs {needs}, but there are 8; set sizes whose product is "
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        parse_mesh_shape(text, num_devices=8, num_processes=1)


def test_hosts_with_different_numbers_of_devices_are_refused():
    check_equal_device_counts(devices_of(4, 4))
    with pytest.raises(InputError, match=r"different numbers of devices \(host 0: 4, host 1: 2\)"):
        check_equal_device_counts(devices_of(4, 2))


@pytest.mark.parametrize("shape", [(2, 4, 1), (1, 4, 2)])
def test_the_mesh_rows_of_each_host_are_contiguous(shape):
    mesh = DeviceMesh(np.array(devices_of(4, 4)).reshape(shape), AXES)
    assert is_grouped_by_host(mesh) and num_hosts(mesh) == 2
    placement.check_tp_within_hosts(mesh)
    first, second, third, fourth = devices_of(2, 2)
    assert not is_grouped_by_host(DeviceMesh(np.array([first, third, second, fourth]).reshape(4, 1, 1), AXES))


@pytest.mark.parametrize(
    ("shape", "per_host", "found"),
    [
        ((1, 2, 4), (2, 2, 2, 2), "tp = 4 spans hosts 0 and 1 with 2 devices each"),
        # Hosts have three devices, so the second of the three tp groups spans both.
        ((1, 3, 2), (3, 3), "tp = 2 spans hosts 0 and 1 with 3 devices each"),
    ],
)
def test_tp_across_hosts_is_refused_with_valid_values(shape, per_host, found):
    mesh = DeviceMesh(np.array(devices_of(*per_host)).reshape(shape), AXES)
    fitting = " or ".join(str(n) for n in range(1, per_host[0] + 1) if per_host[0] % n == 0)
    with pytest.raises(InputError, match=re.escape(f"mesh.shape: {found}")) as caught:
        placement.check_tp_within_hosts(mesh)
    assert str(caught.value).endswith(f"set tp to {fitting}")


@pytest.mark.parametrize(
    ("wanted", "num_devices", "found"),
    [(0.5, 8, (4, 5, 6, 7)), (0.75, 4, (1, 2, 3)), (0.33, 3, (2,)), ((2, 5), 8, (2, 5))],
)
def test_a_fraction_selects_the_last_devices_for_generation_and_indices_exactly_those(wanted, num_devices, found):
    assert generation_devices(wanted, num_devices=num_devices) == found


@pytest.mark.parametrize(
    ("wanted", "num_devices", "message"),
    [
        (
            0.3,
            4,
            "0.3 of the 4 devices of a host is not a whole number of devices; set it to 0.25, 0.5 or 0.75",
        ),
        (0.99, 8, "0.99 of the 8 devices"),
        (0.5, 1, "got 0.5, but each host has a single device"),
        ((1, 4), 4, "got 4, but each host has devices 0 to 3"),
    ],
)
def test_generation_devices_that_do_not_fit_the_host_are_refused(wanted, num_devices, message):
    with pytest.raises(InputError, match=f"^{re.escape(f'rollout.devices: {message}')}"):
        generation_devices(wanted, num_devices=num_devices)


def test_the_mesh_excludes_generation_devices():
    assert [one.id for one in without_generation_devices(devices_of(4, 4), (1, 3))] == [0, 2, 4, 6]
    assert dict(make_mesh(MeshSettings(shape="2,-1,2")).shape) == {"dp": 2, "fsdp": 2, "tp": 2}
    mesh = make_mesh(MeshSettings(shape="1,-1,2"), set_aside=(4, 5, 6, 7))
    assert [one.id for one in mesh.devices.flat] == [one.id for one in jax.devices()[:4]]
    assert dict(mesh.shape) == {"dp": 1, "fsdp": 2, "tp": 2}
    with pytest.raises(InputError, match=r"needs 8 devices, but there are 4 besides those of rollout\.devices"):
        make_mesh(MeshSettings(shape="1,8,1"), set_aside=(4, 5, 6, 7))


def test_devices_are_divided_evenly_among_workers():
    assert assign_worker_devices(1, range(8)) == [tuple(range(8))]
    assert assign_worker_devices(3, range(8)) == [(0, 1), (2, 3), (4, 5)]
    assert assign_worker_devices(3, range(1)) == [(0,)] * 3
    with pytest.raises(InputError, match=r"fast\.count.*: 9 workers need a device each, but only 8"):
        assign_worker_devices(9, range(8))


def test_a_submesh_splits_weights_like_the_whole_mesh():
    assert dict(make_submesh((2, 3, 4, 5), template=tiny_mesh((1, 1, 2))).shape) == {"dp": 1, "fsdp": 2, "tp": 2}
    with pytest.raises(InputError, match=r"has 3 devices, but weights are split over tp=2"):
        make_submesh((0, 1, 2), template=tiny_mesh((1, 1, 2)))


@pytest.mark.parametrize(
    ("hosts", "shape"),
    [((0, 0, 0, 0, 1, 1, 1, 1), (1, 8, 1)), ((0, 1, 0, 1, 0, 1, 0, 1), (2, 4, 1)), ((0, 0, 1, 1) * 2, (4, 1, 2))],
)
def test_a_host_submesh_has_the_devices_of_its_host(hosts, shape, monkeypatch):
    mesh = tiny_mesh(shape)
    assert host_submesh(mesh) is mesh
    monkeypatch.setattr(device_mesh, "host_index", lambda device: hosts[device.id])
    own = host_submesh(mesh)
    assert [device.id for device in own.devices.flat] == [i for i, host in enumerate(hosts) if host == 0]
    assert own.devices.shape == (1, 4 // shape[2], shape[2])


def test_a_dim_is_split_over_its_mesh_axis_only_if_the_axis_divides_it():
    mesh = tiny_mesh((1, 4, 2))
    assert partition_spec(("layers", "embed", "mlp"), (2, 32, 48), mesh) == PartitionSpec(None, "fsdp", "tp")
    assert partition_spec(("rows", "vocab"), (8, 53), mesh) == PartitionSpec(("dp", "fsdp"), None)
    with pytest.raises(KeyError, match="hidden"):
        partition_spec(("hidden",), (8,), mesh)


def test_constrain_shards_an_array_only_under_a_current_mesh():
    mesh, x = tiny_mesh((2, 2, 2)), jnp.zeros((8, 6))
    assert [axis_size(mesh, axes) for axes in (None, "tp", ("dp", "fsdp"))] == [1, 2, 4]
    assert constrain(x, "rows", "vocab") is x
    with jax.set_mesh(mesh):
        split = jax.jit(lambda x: constrain(x, "rows", "vocab"))(x)
    assert split.sharding.shard_shape(x.shape) == (2, 3)


@pytest.mark.parametrize(("shape", "row_dim"), [((1, 8, 1), 0), ((2, 2, 2), 1), ((1, 1, 8), 0)])
def test_to_local_restores_the_rows_that_to_global_has_placed(shape, row_dim):
    mesh = tiny_mesh(shape)
    assert placement.num_local_row_shards(mesh) == placement.num_row_shards(mesh) == shape[0] * shape[1]
    rows = np.arange(8 * 16 * 3).reshape((16, 8, 3) if row_dim == 0 else (8, 16, 3))
    tree = placement.to_global(mesh, {"rows": rows}, row_dim=row_dim)
    np.testing.assert_array_equal(placement.to_local(tree["rows"], row_dim=row_dim), rows)
    assert tree["rows"].sharding.shard_shape(rows.shape)[row_dim] == 16 // placement.num_row_shards(mesh)


def test_arrays_are_unchanged_after_moving_to_host_memory_and_back():
    mesh = tiny_mesh((2, 2, 2))
    tree = {"x": placement.to_global(mesh, np.arange(32.0).reshape(8, 4)), "y": jnp.float32(3)}
    assert placement.supports_host_memory(mesh)
    waiting = placement.to_host_memory(tree)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(waiting)} == {"pinned_host"}
    back = placement.to_device_memory(waiting)
    assert jax.tree.map(lambda x: x.sharding, back) == jax.tree.map(lambda x: x.sharding, tree)
    jax.tree.map(np.testing.assert_array_equal, back, tree)


@pytest.mark.parametrize(
    ("name", "num_chips", "num_hosts", "gib"),
    [
        ("v4-16", 8, 2, 32),
        ("v5p-16", 8, 2, 95),
        ("v5e-8", 8, 1, 16),
        ("v5litepod-16", 16, 4, 16),
        ("V6E-256", 256, 64, 32),
    ],
)
def test_a_slice_name_determines_chips_hosts_and_memory(name, num_chips, num_hosts, gib):
    found = parse_pretended(name)
    assert (found.num_chips, found.num_hosts, found.chip.hbm_bytes) == (num_chips, num_hosts, gib * 2**30)


def test_a_chip_is_found_by_its_jax_device_kind():
    kinds = {"TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5p": "v5p", "TPU v5": "v5p", "TPU v6 lite": "v6e"}
    assert {kind: find_chip(kind) for kind in kinds} == {kind: TPU_CHIPS[name] for kind, name in kinds.items()}
    assert find_chip("cpu") is None


@pytest.mark.parametrize(("name", "nearest"), [("h100-16", "h100-1"), ("v4-17", "v4-16"), ("v4_16", "v4-16")])
def test_error_about_an_unknown_slice_suggests_the_nearest_name(name: str, nearest: str):
    with pytest.raises(
        InputError, match=rf"^mesh\.pretend: got '{name}', expected one of v4-8, .*h100-8.*{nearest}"
    ) as error:
        parse_pretended(name)
    assert str(error.value).endswith(f"did you mean {nearest}?")
