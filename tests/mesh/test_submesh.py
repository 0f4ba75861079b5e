from __future__ import annotations

import pytest

from app.mesh import submesh
from app.mesh.submesh import allot, host_island, island
from settings.errors import InputError
from settings.schema.rollout import WorkerPool
from tests.tiny import make_mesh


def pools(fast: WorkerPool, heavy: WorkerPool) -> dict[str, WorkerPool]:
    return {"fast": fast, "heavy": heavy}


@pytest.mark.parametrize(
    ("fast", "heavy", "islands"),
    [
        (WorkerPool(), WorkerPool(), [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (WorkerPool(count=2), WorkerPool(), [(0, 1), (2, 3), (4, 5)]),
        (WorkerPool(count=0), WorkerPool(), [(0, 1, 2, 3, 4, 5, 6, 7)]),
        (WorkerPool(count=2, devices=(6, 1)), WorkerPool(), [(6,), (1,), (0, 2, 3, 4, 5, 7)]),
        (WorkerPool(devices=(0,)), WorkerPool(count=2, devices=(1, 2, 3, 4)), [(0,), (1, 2), (3, 4)]),
    ],
)
def test_devices_are_shared_out_evenly_and_no_two_workers_have_one(fast, heavy, islands) -> None:
    assert allot(pools(fast, heavy), num_devices=8) == islands


def test_on_a_single_device_all_workers_share_it() -> None:
    assert allot(pools(WorkerPool(count=2), WorkerPool()), num_devices=1) == [(0,)] * 3


@pytest.mark.parametrize(
    ("fast", "message"),
    [
        (WorkerPool(devices=(8,)), r"fast\.devices: got 8, and this host has 8 devices, 0 to 7"),
        (WorkerPool(count=3, devices=(0, 1)), r"fast\.count: 2 devices are there for 3 workers"),
        (WorkerPool(count=8), r"fast\.count: 8 devices are there for 9 workers"),
    ],
)
def test_devices_that_do_not_exist_or_suffice_are_refused(fast, message) -> None:
    with pytest.raises(InputError, match=message):
        allot(pools(fast, WorkerPool()), num_devices=8)


def test_an_island_splits_weights_as_the_whole_mesh_does() -> None:
    assert dict(island((2, 3, 4, 5), like=make_mesh((1, 1, 2))).shape) == {"dp": 1, "fsdp": 2, "tp": 2}
    with pytest.raises(InputError, match=r"has 3 devices, and mesh\.shape splits weights over 2"):
        island((0, 1, 2), like=make_mesh((1, 1, 2)))


def test_of_one_host_the_island_is_the_mesh() -> None:
    mesh = make_mesh((2, 2, 2))
    assert host_island(mesh) is mesh


@pytest.mark.parametrize(
    ("hosts", "shape"),
    [((0, 0, 0, 0, 1, 1, 1, 1), (1, 8, 1)), ((0, 1, 0, 1, 0, 1, 0, 1), (2, 4, 1)), ((0, 0, 1, 1) * 2, (4, 1, 2))],
)
def test_an_island_has_the_devices_of_its_host_and_keeps_tp_together(hosts, shape, monkeypatch) -> None:
    mesh = make_mesh(shape)
    monkeypatch.setattr(submesh, "host_of", lambda device: hosts[device.id])
    monkeypatch.setattr(submesh, "num_hosts", lambda mesh: 2)
    own = host_island(mesh)
    assert [device.id for device in own.devices.flat] == [i for i, host in enumerate(hosts) if host == 0]
    assert own.devices.shape == (1, 4 // shape[2], shape[2])
