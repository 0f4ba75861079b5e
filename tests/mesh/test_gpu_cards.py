"""Tests of the table of GPU cards."""

from __future__ import annotations

import pytest

from app.mesh.compile_only import compile_only_devices
from app.mesh.gpu_cards import GPU_HOSTS, GpuHost
from app.mesh.tpu_chips import TpuSlice, parse_pretended
from app.tracking.flops import PEAK_FLOPS
from settings.errors import InputError


def test_a_name_is_that_of_a_host_with_gpus_or_of_a_slice():
    host, slice = parse_pretended(" H100-8"), parse_pretended("v4-16")
    assert isinstance(host, GpuHost) and (host.num_chips, host.num_hosts, host.chips_per_host) == (8, 1, 8)
    assert isinstance(slice, TpuSlice) and slice.num_chips == 8


@pytest.mark.parametrize(("name", "nearest"), [("h100-16", "h100-1"), ("h10-8", "h100-8"), ("v4-17", "v4-16")])
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
