"""Tests of the mesh: its shape, and which hosts its rows and groups lie on."""

from __future__ import annotations

import re
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from jax.sharding import Mesh as DeviceMesh

from app.mesh.axis_rules import AXES
from app.mesh.device_mesh import is_grouped_by_host, make_mesh, num_hosts, parse_mesh_shape
from app.mesh.devices import check_equal_device_counts
from app.mesh.placement import check_rows_per_host
from settings.errors import InputError
from settings.schema.mesh import MeshSettings


@pytest.mark.parametrize(
    ("text", "num_devices", "num_processes", "expected"),
    [
        ("1,1,1", 1, 1, (1, 1, 1)),
        ("1,8,1", 8, 1, (1, 8, 1)),
        ("2,2,2", 8, 1, (2, 2, 2)),
        ("1,-1,1", 8, 1, (1, 8, 1)),
        ("-1,2,2", 8, 1, (2, 2, 2)),
        ("1,4,-1", 8, 2, (1, 4, 2)),
        ("-1,1,1", 1, 1, (1, 1, 1)),
        ("auto", 1, 1, (1, 1, 1)),
        ("auto", 8, 1, (1, 8, 1)),
        ("auto", 16, 4, (4, 4, 1)),
        ("1,-1,1", 8, 2, (1, 8, 1)),
    ],
)
def test_a_shape_uses_every_device(text, num_devices, num_processes, expected):
    assert parse_mesh_shape(text, num_devices=num_devices, num_processes=num_processes) == expected


@pytest.mark.parametrize(
    ("text", "num_devices", "needs"),
    [("1,3,1", 8, "3 devices"), ("2,8,1", 8, "16 devices"), ("3,-1,1", 8, "a multiple of 3 devices")],
)
def test_a_shape_that_does_not_fit_says_what_does(text, num_devices, needs):
    message = f"mesh.shape: {text!r} needs {needs}, but there are {num_devices}; set sizes whose product is "
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        parse_mesh_shape(text, num_devices=num_devices, num_processes=1)


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


def test_hosts_with_different_numbers_of_devices_are_refused_with_both_numbers():
    check_equal_device_counts(devices_of(4, 4))
    with pytest.raises(InputError, match=r"different numbers of devices \(host 0: 4, host 1: 2\)"):
        check_equal_device_counts(devices_of(4, 2))


@pytest.mark.parametrize("shape", [(2, 4, 1), (1, 8, 1), (2, 2, 2), (1, 4, 2), (1, 2, 4)])
def test_the_rows_of_each_of_two_hosts_lie_together(shape):
    mesh = DeviceMesh(np.array(devices_of(4, 4)).reshape(shape), AXES)
    assert is_grouped_by_host(mesh)
    assert num_hosts(mesh) == 2
    check_rows_per_host(mesh)


def test_the_rows_of_hosts_that_take_turns_do_not():
    first, second, third, fourth = devices_of(2, 2)
    assert not is_grouped_by_host(DeviceMesh(np.array([first, third, second, fourth]).reshape(4, 1, 1), AXES))


@pytest.mark.parametrize(
    ("shape", "per_host", "found"),
    [
        ((1, 1, 8), (4, 4), "tp = 8 spans hosts 0, 1 with 4 devices each"),
        ((1, 2, 4), (2, 2, 2, 2), "tp = 4 spans hosts 0, 1 with 2 devices each"),
        # As many rows as hosts, and yet two groups out of four lie on two of them.
        ((1, 3, 2), (3, 3), "tp = 2 spans hosts 0, 1 with 3 devices each"),
    ],
)
def test_tp_over_several_hosts_is_refused_with_the_hosts_and_the_tp_that_fit(shape, per_host, found):
    mesh = DeviceMesh(np.array(devices_of(*per_host)).reshape(shape), AXES)
    fitting = " or ".join(str(n) for n in range(1, per_host[0] + 1) if per_host[0] % n == 0)
    with pytest.raises(InputError, match=re.escape(f"mesh.shape: {found}")) as caught:
        check_rows_per_host(mesh)
    assert str(caught.value).endswith(f"keep tp within a host: {fitting}")


def test_the_mesh_holds_every_device_on_three_named_axes():
    mesh = make_mesh(MeshSettings(shape="2,-1,2"))
    assert dict(mesh.shape) == {"dp": 2, "fsdp": 2, "tp": 2}
    assert set(mesh.devices.flat) == set(jax.devices())
