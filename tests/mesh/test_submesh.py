from __future__ import annotations

import pytest

from app.mesh import submesh
from app.mesh.submesh import assign_worker_devices, host_submesh, make_submesh
from settings.errors import InputError
from settings.schema.rollout import WorkerPoolSettings
from tests.tiny import make_mesh


def pools(fast: WorkerPoolSettings, heavy: WorkerPoolSettings) -> dict[str, WorkerPoolSettings]:
    return {"fast": fast, "heavy": heavy}


@pytest.mark.parametrize(
    ("fast", "heavy", "islands"),
    [
        (WorkerPoolSettings(), WorkerPoolSettings(), [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (WorkerPoolSettings(count=2), WorkerPoolSettings(), [(0, 1), (2, 3), (4, 5)]),
        (WorkerPoolSettings(count=0), WorkerPoolSettings(), [(0, 1, 2, 3, 4, 5, 6, 7)]),
        (WorkerPoolSettings(count=2, devices=(6, 1)), WorkerPoolSettings(), [(6,), (1,), (0, 2, 3, 4, 5, 7)]),
        (WorkerPoolSettings(devices=(0,)), WorkerPoolSettings(count=2, devices=(1, 2, 3, 4)), [(0,), (1, 2), (3, 4)]),
    ],
)
def test_devices_are_shared_out_evenly_and_no_two_workers_have_one(fast, heavy, islands) -> None:
    assert assign_worker_devices(pools(fast, heavy), range(8)) == islands


def test_on_a_single_device_all_workers_share_it() -> None:
    assert assign_worker_devices(pools(WorkerPoolSettings(count=2), WorkerPoolSettings()), range(1)) == [(0,)] * 3


@pytest.mark.parametrize(
    ("fast", "message"),
    [
        (WorkerPoolSettings(devices=(8,)), r"fast\.devices: got 8, but the devices of this host that generate are 0-7"),
        (
            WorkerPoolSettings(count=3, devices=(0, 1)),
            "fast.count: 3 workers need a device each, but there are only 2",
        ),
        (WorkerPoolSettings(count=8), r"fast\.count: 9 workers need a device each, but there are only 8"),
    ],
)
def test_devices_that_do_not_exist_or_suffice_are_refused(fast, message) -> None:
    with pytest.raises(InputError, match=message):
        assign_worker_devices(pools(fast, WorkerPoolSettings()), range(8))


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
    monkeypatch.setattr(submesh, "host_index", lambda device: hosts[device.id])
    monkeypatch.setattr(submesh, "num_hosts", lambda mesh: 2)
    own = host_submesh(mesh)
    assert [device.id for device in own.devices.flat] == [i for i, host in enumerate(hosts) if host == 0]
    assert own.devices.shape == (1, 4 // shape[2], shape[2])
