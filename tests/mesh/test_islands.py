from __future__ import annotations

import pytest

from app.mesh.islands import allot, island
from settings.errors import InputError
from settings.rollout_section import WorkerPool
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
