from __future__ import annotations

import pytest

from app.mesh import device_mesh
from app.mesh.device_mesh import assign_worker_devices, host_submesh, make_submesh
from settings.errors import InputError
from tests.tiny import make_mesh


@pytest.mark.parametrize(
    ("num_workers", "islands"),
    [
        (1, [(0, 1, 2, 3, 4, 5, 6, 7)]),
        (2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (3, [(0, 1), (2, 3), (4, 5)]),
    ],
)
def test_devices_are_shared_out_evenly_and_no_two_workers_have_one(num_workers, islands) -> None:
    assert assign_worker_devices(num_workers, range(8)) == islands


def test_on_a_single_device_all_workers_share_it() -> None:
    assert assign_worker_devices(3, range(1)) == [(0,)] * 3


def test_more_workers_than_devices_are_refused() -> None:
    with pytest.raises(InputError, match=r"fast\.count.*: 9 workers need a device each, but there are only 8"):
        assign_worker_devices(9, range(8))


def test_an_island_splits_weights_as_the_whole_mesh_does() -> None:
    assert dict(make_submesh((2, 3, 4, 5), template=make_mesh((1, 1, 2))).shape) == {"dp": 1, "fsdp": 2, "tp": 2}
    with pytest.raises(InputError, match=r"has 3 devices, but weights are split over tp=2"):
        make_submesh((0, 1, 2), template=make_mesh((1, 1, 2)))


def test_of_one_host_the_island_is_the_mesh() -> None:
    mesh = make_mesh((2, 2, 2))
    assert host_submesh(mesh) is mesh


@pytest.mark.parametrize(
    ("hosts", "shape"),
    [((0, 0, 0, 0, 1, 1, 1, 1), (1, 8, 1)), ((0, 1, 0, 1, 0, 1, 0, 1), (2, 4, 1)), ((0, 0, 1, 1) * 2, (4, 1, 2))],
)
def test_an_island_has_the_devices_of_its_host_and_keeps_tp_together(hosts, shape, monkeypatch) -> None:
    mesh = make_mesh(shape)
    monkeypatch.setattr(device_mesh, "host_index", lambda device: hosts[device.id])
    monkeypatch.setattr(device_mesh, "num_hosts", lambda mesh: 2)
    own = host_submesh(mesh)
    assert [device.id for device in own.devices.flat] == [i for i, host in enumerate(hosts) if host == 0]
    assert own.devices.shape == (1, 4 // shape[2], shape[2])
