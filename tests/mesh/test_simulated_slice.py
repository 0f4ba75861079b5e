from __future__ import annotations

import re

import pytest

from app.mesh.simulated_slice import TPU_CHIPS, find_chip, parse_slice
from settings.errors import InputError


@pytest.mark.parametrize(
    ("name", "num_chips", "num_hosts", "gib"),
    [
        ("v4-8", 4, 1, 32),
        ("v4-16", 8, 2, 32),
        ("v4-512", 256, 64, 32),
        ("v5p-16", 8, 2, 95),
        ("v5e-1", 1, 1, 16),
        ("v5e-4", 4, 1, 16),
        ("v5e-8", 8, 1, 16),
        ("v5litepod-16", 16, 4, 16),
        ("v6e-8", 8, 1, 32),
        ("V6E-256", 256, 64, 32),
    ],
)
def test_a_slice_has_the_chips_hosts_and_memory_of_its_name(name, num_chips, num_hosts, gib):
    found = parse_slice(name)
    assert (found.num_chips, found.num_hosts, found.chip.hbm_bytes) == (num_chips, num_hosts, gib * 2**30)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("v4-17", "v4-16 or v4-32"),
        ("v4-4", "v4-8"),
        ("v5e-1024", "v5e-256"),
        ("v4_16", "v4-16"),
        ("v5-8", "v5e-8 or v5p-8"),
    ],
)
def test_a_name_that_no_slice_has_is_refused_with_the_nearest_and_all_forms(name, meant):
    message = f"mesh.pretend: got {name!r}; did you mean {meant}?; known: v4-N with N cores, one of 8, 16, "
    with pytest.raises(InputError, match=re.escape(message)):
        parse_slice(name)


@pytest.mark.parametrize("name", ["", "eight", "v4-", "--4", "v4-16 v4-16", "h100-8"])
def test_what_is_like_no_slice_is_refused_with_all_forms(name):
    with pytest.raises(InputError, match=r"^mesh\.pretend: got .*; known: v4-N .*v6e-N with N chips, one of 1, 4, 8"):
        parse_slice(name)


def test_a_chip_is_known_by_what_jax_calls_it():
    assert [find_chip(kind) for kind in ("TPU v5 lite", "TPU v5p", "TPU v5", "TPU v6 lite", "cpu")] == [
        TPU_CHIPS["v5e"],
        TPU_CHIPS["v5p"],
        TPU_CHIPS["v5p"],
        TPU_CHIPS["v6e"],
        None,
    ]
