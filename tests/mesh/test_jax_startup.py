"""Tests the start of JAX: its platform, its hosts, and that it frees memory."""

import ctypes
import os
import re
import subprocess
import sys

import jax
import pytest

from app.distributed import rendezvous
from app.distributed.rendezvous import ClusterMember
from app.mesh import jax_startup
from app.mesh.device_mesh import make_mesh
from app.mesh.devices import global_devices, unused_accelerator
from settings.errors import InputError
from settings.loading import backends
from settings.schema.mesh import MeshSettings
from tests.program import DEADLINE_S, REPOSITORY


@pytest.mark.parametrize(("platform", "extra"), [("cuda", ".[cuda]"), ("tpu", ".[tpu]")])
def test_a_platform_without_its_library_is_refused(monkeypatch, platform, extra):
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(InputError, match=re.escape(f"mesh.platform: {platform} is not available")) as e:
        jax_startup.initialize_distributed(MeshSettings(platform=platform))
    assert extra in str(e.value)


def test_devices_of_another_platform_are_refused():
    assert global_devices(MeshSettings(platform="cpu"))[0].platform == "cpu"
    with pytest.raises(InputError, match=r"mesh.platform: cuda is not available: JAX has started with cpu devices"):
        make_mesh(MeshSettings(platform="cuda"))


@pytest.mark.parametrize("error", [RuntimeError("Unknown backend nonsense\nmore"), AssertionError()])
def test_a_platform_unknown_to_jax_is_refused(error, monkeypatch):
    def fail() -> None:
        raise error

    monkeypatch.setattr(jax, "devices", fail)
    monkeypatch.setenv("JAX_PLATFORMS", "nonsense")
    with pytest.raises(InputError, match=r"^JAX_PLATFORMS: 'nonsense' is not available: JAX found no such device"):
        global_devices(MeshSettings())
    with pytest.raises(InputError, match=r"^mesh.platform: tpu is not available: JAX found no such device"):
        global_devices(MeshSettings(platform="tpu"))


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("TPU_", "JAX_PLATFORMS"))}
    command, env = [sys.executable, *arguments], {**outer, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, cwd=REPOSITORY, env=env)


def test_installed_libtpu_prints_no_warning_on_a_host_without_a_tpu() -> None:
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install -e '.[tpu]'")
    done = run("-m", "cli", "inspect-mesh")
    assert done.returncode == 0, done.stderr
    assert "TPU" not in done.stderr


def test_an_unused_accelerator_is_reported_by_one_warning(tmp_path, monkeypatch, caplog):
    for platform, name in (("cuda", "nvidia[0-9]*"), ("tpu", "accel*")):
        monkeypatch.setitem(backends.DEVICE_FILES, platform, (str(tmp_path / name),))
    assert unused_accelerator(MeshSettings(), "cpu") is None
    (tmp_path / "accel0").touch()
    assert unused_accelerator(MeshSettings(), "cpu") == "tpu"
    (tmp_path / "nvidia0").touch()
    assert unused_accelerator(MeshSettings(), "cpu") == "cuda"
    assert unused_accelerator(MeshSettings(), "gpu") is None
    for settings in (MeshSettings(platform="cpu"), MeshSettings(cpu_devices=8), MeshSettings(), MeshSettings()):
        global_devices(settings)
    (message,) = caplog.messages
    assert "but JAX runs on the CPU; run pip install -e '.[cuda]'" in message


@pytest.mark.parametrize("address", [None, "auto"])
def test_a_host_that_expects_others_does_not_start_alone(address):
    expected = r"mesh.expect_processes: got 3, but this host runs alone; missing process ids: 1 to 2\. On every host"
    with pytest.raises(InputError, match=expected):
        jax_startup.initialize_distributed(MeshSettings(coordinator_address=address, expect_processes=3))
    jax_startup.initialize_distributed(MeshSettings(coordinator_address=address, expect_processes=1))


@pytest.mark.parametrize(
    ("expected", "said"),
    [(4, "2 processes join at 10.0.0.2:8482; missing process ids: 2 to 3"), (1, "2 processes join")],
)
def test_an_unexpected_number_of_hosts_is_refused(monkeypatch, expected, said):
    monkeypatch.setattr(jax_startup, "is_cloud_tpu_vm", lambda: True)
    monkeypatch.setattr(jax_startup, "detect_cluster", lambda **_: ClusterMember("10.0.0.2:8482", 2, 0))
    with pytest.raises(InputError, match=f"got {expected}, but {re.escape(said)}"):
        jax_startup.initialize_distributed(MeshSettings(expect_processes=expected))
    assert jax_startup.expects_other_hosts(MeshSettings())
    # A host that uses CPU devices is not part of a pod.
    assert not jax_startup.expects_other_hosts(MeshSettings(platform="cpu"))


def test_cluster_members_are_detected_from_the_platform(monkeypatch):
    def detect(found: object, *, required: bool = False) -> ClusterMember | None:
        def answer(*_: object) -> object:
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(rendezvous.ClusterEnv, "auto_detect_unset_distributed_params", answer)
        return rendezvous.detect_cluster(timeout_s=1, required=required)

    assert detect(("10.0.0.2:8482", 2, 1, None)) == ClusterMember("10.0.0.2:8482", 2, 1)
    assert detect(("10.0.0.2:8482", 1, 0, None)) is detect((None, None, None, None)) is None
    with pytest.raises(InputError, match=r"the platform's description of its hosts cannot be read \(odd\); set"):
        detect(ValueError("odd"))
    assert detect(ConnectionError("no metadata")) is None
    with pytest.raises(InputError, match=r"auto, but the platform does not answer \(no metadata\); set"):
        detect(ConnectionError("no metadata"), required=True)


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
def test_freed_arrays_are_returned_to_the_operating_system():
    assert int(run("-c", FREED_ARRAYS, JAX_PLATFORMS="cpu").stdout) < 16 << 20
