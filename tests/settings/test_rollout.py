from __future__ import annotations

import re

import pytest

from settings import InputError, load
from settings.checks.commands import check_for_rollout, check_for_train


@pytest.mark.parametrize("check", [check_for_rollout, check_for_train])
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rollout.segment.min=128", "rollout.segment.max=64"],
            "rollout.segment.min = 128 (from --set) exceeds rollout.segment.max = 64 (from --set); lower the former",
        ),
        (
            ["rollout.workers.fast.count=0", "rollout.workers.heavy.count=0"],
            "there are no workers; set at least one of them to 1 or more",
        ),
        (
            ["rollout.scheduler=pdsr_v2", "rollout.placement=global"],
            "rollout.placement = 'global' (from --set): one queue over all devices can only be scheduled by sync",
        ),
        (
            ["rollout.scheduler=adaptive", "rollout.slots=8"],
            "rollout.slots = 8 (from --set): with rollout.scheduler = 'adaptive' (from --set) each worker has",
        ),
        (
            ["rollout.workers.fast.max_length=16"],
            "rollout.workers.fast.max_length = 16 (from --set) leaves no token for a completion after a prompt of 16",
        ),
        (
            ["rollout.workers.fast.max_length=20", "rollout.workers.heavy.count=0"],
            "rollout.workers.fast.max_length = 20 (from --set): no worker is left for the longest sample",
        ),
        (
            ["rollout.ray.address=auto"],
            "rollout.ray.address = 'auto' (from --set): Ray runs only workers with a scheduler; set rollout.scheduler",
        ),
        (
            ["rollout.ray.address=auto", "rollout.scheduler=sync", "rollout.placement=global"],
            "Ray runs only workers with a scheduler; set rollout.placement: island",
        ),
    ],
)
def test_a_rollout_that_cannot_be_scheduled_is_refused_in_one_line(check, overrides: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        check(load(None, overrides, {}))
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "override",
    [
        "rollout.ray.address=ray://head:10001",
        "rollout.ray.heavy_resources={large_memory: 0}",
    ],
)
def test_values_out_of_bounds_are_refused(override: str) -> None:
    with pytest.raises(InputError, match=override.partition("=")[0]):
        load(None, [override], {})


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.slots=0", "rollout.slots: expected auto or an integer from 1 to 65536, got 0"),
        ("rollout.slots=null", "rollout.slots: expected auto or an integer from 1 to 65536, got None"),
        (
            "rollout.kv_blocks=true",
            "rollout.kv_blocks: expected auto, null or an integer from 1 to 2147483647, got True",
        ),
        ("rollout.kv_blocks=2147483648", "rollout.kv_blocks: expected auto, null or an integer from 1 to 2147483647"),
    ],
)
def test_what_is_neither_a_count_nor_auto_is_refused_in_one_line(override: str, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        load(None, [override], {})
    assert str(caught.value).startswith(expected) and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("check", [check_for_rollout, check_for_train])
def test_the_defaults_can_be_scheduled(check) -> None:
    check(load(None, [], {}))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.max_staleness=0"], "rollout.devices = 0.5 (from --set) would wait for training"),
        (
            ["rollout.ray.address=auto"],
            "with rollout.ray.address = 'auto' (from --set) no device of this host generates",
        ),
    ],
)
def test_devices_that_would_idle_are_refused(overrides: list[str], message: str) -> None:
    chosen = ["rollout.scheduler=adaptive", "rollout.devices=0.5"]
    chosen += [] if "rollout.max_staleness=0" in overrides else ["rollout.max_staleness=1"]
    with pytest.raises(InputError, match=re.escape(message)):
        check_for_train(load(None, [*chosen, *overrides], {}))


@pytest.mark.parametrize("value", ["0", "1", "[]", "[0, 1]", "[2, 2]", "half"])
def test_devices_that_only_generate_are_a_share_or_a_list(value: str) -> None:
    with pytest.raises(InputError, match=r"rollout\.devices"):
        load(None, [f"rollout.devices={value}"], {})


def test_actors_may_generate_during_training_on_machines_of_their_own() -> None:
    chosen = ["rollout.ray.address=auto", "rollout.scheduler=adaptive", "rollout.max_staleness=1"]
    resolved = load(None, [*chosen, "rollout.ray.heavy_resources={large_memory: 1}"], {})
    check_for_train(resolved)
    assert resolved.settings.rollout.ray.fast_resources == {"CPU": 1.0}
    assert resolved.settings.rollout.ray.heavy_resources == {"large_memory": 1.0}
