from __future__ import annotations

import functools

import jax
import pytest

from app.update.mini_batches import repeated_mini_batches, select_samples, shuffled_mini_batches
from tests.tiny import make_sample

SAMPLES = [make_sample([i], group_id=i // 2, sample_index=i % 2) for i in range(24)]


def groups_of(epochs) -> list[list[list[int]]]:
    return [[[s.group_id for s in part] for part in epoch] for epoch in epochs]


def drawn(step: int = 1, seed: int = 0) -> list[list[list[int]]]:
    return groups_of(
        select_samples(SAMPLES, shuffled_mini_batches(SAMPLES, step, num_mini_batches=3, epochs=2, seed=seed))
    )


def test_in_order_every_epoch_is_the_same():
    first, second = select_samples(SAMPLES, repeated_mini_batches(SAMPLES, 1, num_mini_batches=3, epochs=2))
    assert all(part is again for part, again in zip(first, second, strict=True))
    assert groups_of([first])[0][0] == [0, 0, 3, 3, 6, 6, 9, 9]


def test_shuffled_epochs_hold_every_group_once_and_whole_in_mini_batches_of_one_size():
    for epoch in drawn():
        assert sorted(g for part in epoch for g in part) == sorted(s.group_id for s in SAMPLES)
        assert [len(part) for part in epoch] == [8, 8, 8]
        assert all(part[i] == part[i + 1] for part in epoch for i in range(0, 8, 2))


def test_which_they_are_follows_from_seed_step_and_epoch_alone():
    assert drawn() == drawn()
    first, second = drawn()
    assert first != second
    assert drawn(step=2) != drawn() != drawn(seed=1)


@pytest.mark.parametrize("num_hosts", [2, 4])
@pytest.mark.parametrize("draw", [repeated_mini_batches, functools.partial(shuffled_mini_batches, seed=7)])
def test_mini_batches_do_not_depend_on_the_number_of_hosts(draw, num_hosts: int, monkeypatch: pytest.MonkeyPatch):
    def mini_batches(samples) -> list[list[list[int]]]:
        return groups_of(select_samples(samples, draw(samples, 3, num_mini_batches=3, epochs=2)))

    expected = mini_batches(SAMPLES)
    per_host = len(SAMPLES) // num_hosts
    joined: list[list[list[int]]] = [[[], [], []] for _ in range(2)]
    for host in range(num_hosts):
        monkeypatch.setattr(jax, "process_index", lambda host=host: host)
        own = mini_batches(SAMPLES[host * per_host : (host + 1) * per_host])
        joined = [[a + b for a, b in zip(*epochs, strict=True)] for epochs in zip(joined, own, strict=True)]
    assert joined == expected
