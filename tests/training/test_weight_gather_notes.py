"""Tests of gathering weights across hosts, on meshes of fake devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from jax.sharding import Mesh

from app.mesh.axis_rules import AXES
from app.runtime.tensor_parallel_checks import check_decode_layout
from app.training.weight_gather_notes import num_hosts_per_weight, weight_gather_notes
from settings import InputError, load
from tests.rollout.test_decode_layout import DEFINITION


@dataclass(frozen=True)
class Device:
    """The attributes of a device that are read."""

    id: int
    process_index: int
    device_kind: str = "TPU v4"
    platform: str = "tpu"


def mesh_of(*shape: int) -> Mesh:
    """Returns a mesh of 8 devices on two hosts."""
    devices: list[Any] = [Device(i, i // 4) for i in range(8)]
    return Mesh(np.asarray(devices, object).reshape(shape), AXES)


@pytest.mark.parametrize(
    ("shape", "hosts"), [((1, 8, 1), 2), ((2, 4, 1), 1), ((1, 4, 2), 2), ((2, 2, 2), 1), ((8, 1, 1), 1)]
)
def test_weights_are_gathered_across_hosts_where_fsdp_spans_them(shape: tuple[int, int, int], hosts: int):
    assert num_hosts_per_weight(mesh_of(*shape)) == hosts


def test_a_launch_says_what_crosses_hosts():
    settings = load(None, ["rollout.decode_layout=fsdp", "rollout.placement=global"], {}).settings
    decoding, training = weight_gather_notes(settings, DEFINITION, mesh_of(1, 8, 1))
    assert "at every token step, across 2 hosts; gathered moves none" in decoding
    assert training.startswith("mesh.shape: fsdp 8 spans 2 hosts") and "with 2 times the weights" in training
    (inside,) = weight_gather_notes(settings, DEFINITION, mesh_of(2, 4, 1))
    assert "hosts" not in inside


def test_hosts_that_generate_alone_hold_whole_weights():
    settings = load(None, ["rollout.decode_layout=fsdp"], {}).settings
    with pytest.raises(InputError, match=r"over the 2 hosts.*rollout\.placement: global"):
        check_decode_layout(settings, mesh_of(1, 8, 1))
