"""Tests of `rollout.devices`: which devices of a host only generate, and which are left to train."""

from __future__ import annotations

import re

import jax
import pytest

from app.mesh.device_mesh import generation_devices, make_mesh, without_generation_devices
from app.mesh.devices import first_devices
from settings.errors import InputError
from settings.schema.mesh import MeshSettings
from tests.mesh.test_device_mesh import Device


@pytest.mark.parametrize(
    ("wanted", "num_devices", "found"),
    [
        (0.5, 8, (4, 5, 6, 7)),
        (0.25, 4, (3,)),
        (0.75, 4, (1, 2, 3)),
        (0.33, 3, (2,)),
        (0.125, 8, (7,)),
        ((2, 5), 8, (2, 5)),
    ],
)
def test_a_share_takes_the_last_devices_of_a_host_and_a_list_those_that_it_names(wanted, num_devices, found) -> None:
    assert generation_devices(wanted, num_devices=num_devices) == found


@pytest.mark.parametrize(
    ("wanted", "num_devices", "message"),
    [
        (0.3, 4, "rollout.devices: 0.3 of the 4 devices of a host is not a whole number of devices; possible shares: "
         "0.25, 0.5, 0.75"),
        (0.01, 8, "rollout.devices: 0.01 of the 8 devices"),
        (0.99, 8, "rollout.devices: 0.99 of the 8 devices"),
        (0.5, 1, "rollout.devices: got 0.5, but each host has a single device"),
        ((1,), 1, "rollout.devices: got [1], but each host has a single device"),
        ((1, 4), 4, "rollout.devices: got 4, but each host has devices 0 to 3"),
    ],
)  # fmt: skip
def test_shares_that_leave_a_side_empty_or_split_a_device_are_refused(wanted, num_devices, message) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        generation_devices(wanted, num_devices=num_devices)


def test_every_host_sets_the_same_devices_aside() -> None:
    devices = [Device(id=i, process_index=i // 4) for i in range(8)]
    assert [one.id for one in without_generation_devices(devices, (1, 3))] == [0, 2, 4, 6]


def test_the_mesh_has_the_devices_that_train() -> None:
    mesh = make_mesh(MeshSettings(shape="1,-1,2"), set_aside=(4, 5, 6, 7))
    assert [one.id for one in mesh.devices.flat] == [one.id for one in jax.devices()[:4]]
    assert dict(mesh.shape) == {"dp": 1, "fsdp": 2, "tp": 2}
    assert first_devices([Device(id=i, process_index=i // 4) for i in range(8)]) == [Device(0, 0), Device(4, 1)]
    with pytest.raises(InputError, match=r"needs 8 devices, but there are 4 besides those of rollout\.devices"):
        make_mesh(MeshSettings(shape="1,8,1"), set_aside=(4, 5, 6, 7))
