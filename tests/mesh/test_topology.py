from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from jax.sharding import Mesh as DeviceMesh

from app.distributed import cluster_detection
from app.distributed.rendezvous import ClusterMember
from app.mesh import jax_startup
from app.mesh.axis_rules import AXES
from app.mesh.device_mesh import is_grouped_by_host, make_mesh, num_hosts, parse_mesh_shape
from app.mesh.devices import check_equal_device_counts, global_devices
from app.mesh.placement import check_rows_per_host
from settings.errors import InputError
from settings.schema.mesh import MeshSettings as Settings

DEADLINE_S = 120


@pytest.mark.parametrize(
    ("text", "num_devices", "num_processes", "expected"),
    [
        ("1,1,1", 1, 1, (1, 1, 1)),
        ("1,8,1", 8, 1, (1, 8, 1)),
        ("2,2,2", 8, 1, (2, 2, 2)),
        ("1,-1,1", 8, 1, (1, 8, 1)),
        ("-1,2,2", 8, 1, (2, 2, 2)),
        ("1,4,-1", 8, 2, (1, 4, 2)),
        ("-1,1,1", 1, 1, (1, 1, 1)),
        ("auto", 1, 1, (1, 1, 1)),
        ("auto", 8, 1, (1, 8, 1)),
        ("auto", 16, 4, (4, 4, 1)),
        ("1,-1,1", 8, 2, (1, 8, 1)),
    ],
)
def test_a_shape_uses_every_device(text, num_devices, num_processes, expected):
    assert parse_mesh_shape(text, num_devices=num_devices, num_processes=num_processes) == expected


@pytest.mark.parametrize(
    ("text", "num_devices", "needs"),
    [("1,3,1", 8, "3 devices"), ("2,8,1", 8, "16 devices"), ("3,-1,1", 8, "a multiple of 3 devices")],
)
def test_a_shape_that_does_not_fit_says_what_does(text, num_devices, needs):
    message = f"mesh.shape: {text!r} needs {needs}, but there are {num_devices}; set sizes whose product is "
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        parse_mesh_shape(text, num_devices=num_devices, num_processes=1)


@dataclass(frozen=True)
class Device:
    """The attributes of a device that determine its place in a mesh."""

    id: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"


def devices_of(*per_host: int) -> list[Device]:
    hosts = [host for host, count in enumerate(per_host) for _ in range(count)]
    return [Device(i, host) for i, host in enumerate(hosts)]


def test_hosts_with_different_numbers_of_devices_are_refused_with_both_numbers():
    check_equal_device_counts(devices_of(4, 4))
    with pytest.raises(InputError, match=r"different numbers of devices \(host 0: 4, host 1: 2\)"):
        check_equal_device_counts(devices_of(4, 2))


@pytest.mark.parametrize("shape", [(2, 4, 1), (1, 8, 1), (2, 2, 2), (1, 4, 2), (1, 2, 4)])
def test_the_rows_of_each_of_two_hosts_lie_together(shape):
    mesh = DeviceMesh(np.array(devices_of(4, 4)).reshape(shape), AXES)
    assert is_grouped_by_host(mesh)
    assert num_hosts(mesh) == 2
    check_rows_per_host(mesh)


def test_the_rows_of_hosts_that_take_turns_do_not():
    first, second, third, fourth = devices_of(2, 2)
    assert not is_grouped_by_host(DeviceMesh(np.array([first, third, second, fourth]).reshape(4, 1, 1), AXES))


@pytest.mark.parametrize(
    ("shape", "per_host", "found"),
    [
        ((1, 1, 8), (4, 4), "tp = 8 spans hosts 0, 1 with 4 devices each"),
        ((1, 2, 4), (2, 2, 2, 2), "tp = 4 spans hosts 0, 1 with 2 devices each"),
        # As many rows as hosts, and yet two groups out of four lie on two of them.
        ((1, 3, 2), (3, 3), "tp = 2 spans hosts 0, 1 with 3 devices each"),
    ],
)
def test_tp_over_several_hosts_is_refused_with_the_hosts_and_the_tp_that_fit(shape, per_host, found):
    mesh = DeviceMesh(np.array(devices_of(*per_host)).reshape(shape), AXES)
    fitting = " or ".join(str(n) for n in range(1, per_host[0] + 1) if per_host[0] % n == 0)
    with pytest.raises(InputError, match=re.escape(f"mesh.shape: {found}")) as caught:
        check_rows_per_host(mesh)
    assert str(caught.value).endswith(f"keep tp inside a host: {fitting}")


@pytest.mark.parametrize(("platform", "extra"), [("cuda", ".[cuda]"), ("tpu", ".[tpu]")])
def test_a_platform_without_its_library_is_refused_at_once(monkeypatch, platform, extra):
    monkeypatch.setattr(jax_startup, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(InputError, match=re.escape(f"mesh.platform: {platform} is not available")) as e:
        jax_startup.initialize_distributed(Settings(platform=platform))
    assert extra in str(e.value)


def test_devices_of_another_platform_than_asked_for_are_refused():
    assert global_devices(Settings(platform="cpu"))[0].platform == "cpu"
    with pytest.raises(InputError, match=r"mesh.platform: cuda is not available: JAX has started with cpu devices"):
        make_mesh(Settings(platform="cuda"))


def test_an_absent_platform_is_never_replaced_by_the_cpu():
    script = "from app.mesh.devices import global_devices; from settings.schema.mesh import MeshSettings; import jax; "
    script += "jax.config.update('jax_platforms', 'cuda'); global_devices(MeshSettings(platform='cuda'))"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "InputError: mesh.platform: cuda is not available: JAX found no device of it" in process.stderr


@pytest.mark.parametrize("address", [None, "auto"])
def test_a_host_that_expects_others_does_not_start_alone(address):
    expected = r"mesh.expect_processes: expected 3 processes, but this host runs alone; missing: 1, 2\. On every host"
    with pytest.raises(InputError, match=expected):
        jax_startup.initialize_distributed(Settings(coordinator_address=address, expect_processes=3))
    jax_startup.initialize_distributed(Settings(coordinator_address=address, expect_processes=1))


@pytest.mark.parametrize(
    ("expected", "said"), [(4, "2 processes join at 10.0.0.2:8482; missing: 2, 3"), (1, "2 processes join at 10.")]
)
def test_a_platform_with_another_number_of_hosts_than_expected_is_refused(monkeypatch, expected, said):
    monkeypatch.setattr(jax_startup, "is_cloud_tpu_vm", lambda: True)
    monkeypatch.setattr(jax_startup, "detect_cluster", lambda **_: ClusterMember("10.0.0.2:8482", 2, 0))
    with pytest.raises(InputError, match=f"expected {expected} processes, but {re.escape(said)}"):
        jax_startup.initialize_distributed(Settings(expect_processes=expected))
    assert jax_startup.expects_other_hosts(Settings())
    # With CPU devices it is nobody's pod.
    assert not jax_startup.expects_other_hosts(Settings(platform="cpu"))
    jax_startup.initialize_distributed(Settings(platform="cpu", expect_processes=1))


@pytest.mark.parametrize(
    ("found", "member"),
    [
        (("10.0.0.2:8482", 2, 1, None), ClusterMember("10.0.0.2:8482", 2, 1)),
        (("10.0.0.2:8482", 1, 0, None), None),
        ((None, None, None, None), None),
    ],
)
def test_the_platform_says_who_the_hosts_are(monkeypatch, found, member):
    monkeypatch.setattr(cluster_detection.ClusterEnv, "auto_detect_unset_distributed_params", lambda *_: found)
    assert cluster_detection.detect_cluster(timeout_s=1) == member


@pytest.mark.parametrize(("error", "refused"), [(ConnectionError("no metadata"), False), (ValueError("odd"), True)])
def test_tpus_without_metadata_work_alone_and_metadata_that_cannot_be_read_are_an_error(monkeypatch, error, refused):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(cluster_detection.ClusterEnv, "auto_detect_unset_distributed_params", fail)
    if refused:
        with pytest.raises(InputError, match=r"the platform's description of its hosts cannot be read \(odd\); set"):
            cluster_detection.detect_cluster(timeout_s=1)
    else:
        assert cluster_detection.detect_cluster(timeout_s=1) is None
        with pytest.raises(InputError, match=r"auto, and the platform does not answer \(no metadata\); set"):
            cluster_detection.detect_cluster(timeout_s=1, required=True)


def test_the_mesh_holds_every_device_on_three_named_axes():
    mesh = make_mesh(Settings(shape="2,-1,2"))
    assert dict(mesh.shape) == {"dp": 2, "fsdp": 2, "tp": 2}
    assert set(mesh.devices.flat) == set(jax.devices())


FREED_ARRAYS = """
import resource
import numpy as np
from app.mesh import jax_startup
from settings.schema.mesh import MeshSettings

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

jax_startup.initialize_distributed(MeshSettings())
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
