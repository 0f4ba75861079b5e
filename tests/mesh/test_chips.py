from __future__ import annotations

import pytest

from app.mesh.chips import GPU_HOSTS, TPU_CHIPS, GpuHost, TpuSlice, find_chip, parse_pretended, parse_slice
from app.mesh.devices import compile_only_devices
from app.tracking.performance import PEAK_FLOPS
from settings.errors import InputError


@pytest.mark.parametrize(
    ("name", "num_chips", "num_hosts", "gib"),
    [
        ("v4-8", 4, 1, 32),
        ("v4-16", 8, 2, 32),
        ("v5p-16", 8, 2, 95),
        ("v5e-1", 1, 1, 16),
        ("v5e-8", 8, 1, 16),
        ("v5litepod-16", 16, 4, 16),
        ("v6e-8", 8, 1, 32),
        ("V6E-256", 256, 64, 32),
    ],
)
def test_a_slice_has_the_chips_hosts_and_memory_of_its_name(name, num_chips, num_hosts, gib):
    found = parse_slice(name)
    assert (found.num_chips, found.num_hosts, found.chip.hbm_bytes) == (num_chips, num_hosts, gib * 2**30)


def test_a_chip_is_known_by_what_jax_calls_it():
    assert [find_chip(kind) for kind in ("TPU v5 lite", "TPU v5p", "TPU v5", "TPU v6 lite", "cpu")] == [
        TPU_CHIPS["v5e"],
        TPU_CHIPS["v5p"],
        TPU_CHIPS["v5p"],
        TPU_CHIPS["v6e"],
        None,
    ]


def test_a_name_is_that_of_a_host_with_gpus_or_of_a_slice():
    host, slice = parse_pretended(" H100-8"), parse_pretended("v4-16")
    assert isinstance(host, GpuHost) and (host.num_chips, host.num_hosts, host.chips_per_host) == (8, 1, 8)
    assert isinstance(slice, TpuSlice) and slice.num_chips == 8


@pytest.mark.parametrize(
    ("name", "nearest"), [("h100-16", "h100-1"), ("h10-8", "h100-8"), ("v4-17", "v4-16"), ("v4_16", "v4-16")]
)
def test_an_unknown_name_gets_the_nearest_of_cards_and_slices(name: str, nearest: str):
    with pytest.raises(InputError, match=rf"^mesh\.pretend: got '{name}'; known: v4-8, .*h100-8.*{nearest}") as error:
        parse_pretended(name)
    assert str(error.value).endswith(f"did you mean {nearest}?")


@pytest.mark.parametrize("name", GPU_HOSTS)
def test_the_compiler_describes_every_host_of_the_table(name: str):
    pytest.importorskip("jax_plugins.xla_cuda13", reason="JAX for CUDA is not installed: pip install -e '.[cuda]'")
    host = GPU_HOSTS[name]
    found = compile_only_devices(host)
    assert [(device.id, device.platform, device.process_index) for device in found] == [
        (i, "gpu", 0) for i in range(host.num_chips)
    ]
    assert {device.device_kind for device in found} == {host.chip.device_kind}
    # The speed of a step is given in relation to the card's peak.
    assert any(host.chip.device_kind.startswith(kind) for kind in PEAK_FLOPS)
