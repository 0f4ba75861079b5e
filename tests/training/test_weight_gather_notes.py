"""Tests of gathering weights across hosts, on meshes of fake devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from jax.sharding import Mesh

from app.mesh.axis_rules import AXES
from app.training.weight_gather_notes import num_hosts_per_weight, weight_gather_notes


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
    (note,) = weight_gather_notes(mesh_of(1, 8, 1))
    assert note.startswith("mesh.shape: fsdp 8 spans 2 hosts") and "with 2 times the weights" in note
    assert weight_gather_notes(mesh_of(2, 4, 1)) == ()
