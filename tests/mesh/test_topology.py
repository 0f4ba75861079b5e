from __future__ import annotations

import ctypes
import re
import subprocess
import sys

import jax
import pytest

from app.mesh.topology import make_mesh, parse_shape
from settings.errors import InputError
from settings.mesh_section import Mesh as Settings


@pytest.mark.parametrize(
    ("text", "num_devices", "num_processes", "expected"),
    [
        ("1,1,1", 1, 1, (1, 1, 1)),
        ("1,8,1", 8, 1, (1, 8, 1)),
        (" 2, 2 ,2 ", 8, 1, (2, 2, 2)),
        ("1,-1,1", 8, 1, (1, 8, 1)),
        ("-1,2,2", 8, 1, (2, 2, 2)),
        ("1,4,-1", 8, 2, (1, 4, 2)),
        ("-1,1,1", 1, 1, (1, 1, 1)),
        ("auto", 1, 1, (1, 1, 1)),
        ("auto", 8, 1, (1, 8, 1)),
        ("auto", 16, 4, (4, 4, 1)),
    ],
)
def test_a_shape_uses_every_device(text, num_devices, num_processes, expected):
    assert parse_shape(text, num_devices=num_devices, num_processes=num_processes) == expected


@pytest.mark.parametrize("text", ["", "8", "1,8", "1,2,2,2", "a,b,c", "1,8.0,1", "0,8,1", "-2,4,1", "-1,-1,1"])
def test_what_is_no_shape_is_refused_with_what_was_got_and_what_is_expected(text):
    message = f"mesh.shape: got {text!r}; expected `auto` or three comma-separated sizes"
    with pytest.raises(InputError, match=re.escape(message)):
        parse_shape(text, num_devices=8, num_processes=1)


@pytest.mark.parametrize(
    ("text", "wants"),
    [("1,3,1", "3 devices"), ("1,4,1", "4 devices"), ("2,8,1", "16 devices"), ("3,-1,1", "a multiple of 3 devices")],
)
def test_a_shape_that_does_not_fit_says_what_does(text, wants):
    message = f"mesh.shape: {text!r} asks for {wants} and there are 8; sizes that fit divide 8: 1, 2, 4, 8"
    with pytest.raises(InputError, match=re.escape(message)):
        parse_shape(text, num_devices=8, num_processes=1)


def test_the_mesh_holds_every_device_on_three_named_axes():
    mesh = make_mesh(Settings(shape="2,-1,2"))
    assert dict(mesh.shape) == {"dp": 2, "fsdp": 2, "tp": 2}
    assert set(mesh.devices.flat) == set(jax.devices())


FREED_ARRAYS = """
import resource
import numpy as np
from app.mesh import topology
from settings.mesh_section import Mesh

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

topology.start(Mesh())
del_first = np.ones(24 << 20, np.uint8)
del del_first  # glibc now keeps arrays up to this size in its heap, unless told otherwise
before = resident()
arrays = [np.ones(2 << 20, np.uint8) for _ in range(64)]
last = arrays.pop()  # pins the top of the heap
del arrays
print(resident() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_freed_arrays_go_back_to_the_system():
    process = subprocess.run([sys.executable, "-c", FREED_ARRAYS], capture_output=True, text=True, check=True)
    assert int(process.stdout) < 16 << 20
