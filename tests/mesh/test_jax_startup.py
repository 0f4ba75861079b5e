"""Tests of the start of JAX: its platform, its hosts, and the memory that it gives back."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from app.distributed import rendezvous
from app.distributed.rendezvous import ClusterMember
from app.mesh import devices, jax_startup
from app.mesh.device_mesh import make_mesh
from app.mesh.devices import global_devices, unused_accelerator
from settings.errors import InputError
from settings.schema.mesh import MeshSettings
from tests.program import REPOSITORY

DEADLINE_S = 120


@pytest.mark.parametrize(("platform", "extra"), [("cuda", ".[cuda]"), ("tpu", ".[tpu]")])
def test_a_platform_without_its_library_is_refused_at_once(monkeypatch, platform, extra):
    monkeypatch.setattr(jax_startup, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(InputError, match=re.escape(f"mesh.platform: {platform} is not available")) as e:
        jax_startup.initialize_distributed(MeshSettings(platform=platform))
    assert extra in str(e.value)


def test_devices_of_another_platform_than_asked_for_are_refused():
    assert global_devices(MeshSettings(platform="cpu"))[0].platform == "cpu"
    with pytest.raises(InputError, match=r"mesh.platform: cuda is not available: JAX has started with cpu devices"):
        make_mesh(MeshSettings(platform="cuda"))


@pytest.mark.parametrize(("command", "platform"), [("gae", "nonsense"), ("train", "tpu")])
def test_a_platform_that_the_environment_asks_for_and_that_is_absent_is_one_clear_error(command, platform, tmp_path):
    np.savez(tmp_path / "in.npz", rewards=np.ones((1, 2)), values=np.ones((1, 2)))
    files = ("--input", tmp_path / "in.npz", "--out", tmp_path / "out.npz")
    options = files if command == "gae" else ("--set", f"run.dir={tmp_path / 'runs'}")
    process = subprocess.run(
        [sys.executable, "-c", "import cli; cli.main()", command, *options],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=REPOSITORY,
        env={**os.environ, "JAX_PLATFORMS": platform},
    )
    assert process.returncode == 2, process.stderr
    assert f"error: JAX_PLATFORMS: '{platform}' is not available: JAX found no such device" in process.stderr
    assert "unset JAX_PLATFORMS" in process.stderr and "Traceback" not in process.stderr


def test_a_run_on_the_cpu_of_a_machine_with_an_accelerator_warns_and_names_the_extra_to_install(
    tmp_path, monkeypatch, caplog
):
    files = {str(tmp_path / "nvidia0"): "cuda", str(tmp_path / "vfio" / "0"): "tpu"}
    monkeypatch.setattr(devices, "ACCELERATOR_FILES", files)
    devices._warn_once.cache_clear()
    assert unused_accelerator(MeshSettings(), "cpu") is None
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio" / "0").touch()
    assert unused_accelerator(MeshSettings(), "cpu") == "tpu"
    (tmp_path / "nvidia0").touch()
    assert unused_accelerator(MeshSettings(), "cpu") == "cuda"
    assert unused_accelerator(MeshSettings(), "gpu") is None
    for settings in (MeshSettings(platform="cpu"), MeshSettings(cpu_devices=8)):
        global_devices(settings)
    assert not caplog.messages
    for _ in range(2):
        global_devices(MeshSettings())
    (message,) = caplog.messages
    assert "but JAX runs on the CPU; run pip install -e '.[cuda]'" in message
    devices._warn_once.cache_clear()


@pytest.mark.parametrize("address", [None, "auto"])
def test_a_host_that_expects_others_does_not_start_alone(address):
    expected = r"mesh.expect_processes: expected 3 processes, but this host runs alone; missing: 1 to 2\. On every host"
    with pytest.raises(InputError, match=expected):
        jax_startup.initialize_distributed(MeshSettings(coordinator_address=address, expect_processes=3))
    jax_startup.initialize_distributed(MeshSettings(coordinator_address=address, expect_processes=1))


@pytest.mark.parametrize(
    ("expected", "said"), [(4, "2 processes join at 10.0.0.2:8482; missing: 2 to 3"), (1, "2 processes join at 10.")]
)
def test_a_platform_with_another_number_of_hosts_than_expected_is_refused(monkeypatch, expected, said):
    monkeypatch.setattr(jax_startup, "is_cloud_tpu_vm", lambda: True)
    monkeypatch.setattr(jax_startup, "detect_cluster", lambda **_: ClusterMember("10.0.0.2:8482", 2, 0))
    with pytest.raises(InputError, match=f"expected {expected} processes, but {re.escape(said)}"):
        jax_startup.initialize_distributed(MeshSettings(expect_processes=expected))
    assert jax_startup.expects_other_hosts(MeshSettings())
    # With CPU devices it is nobody's pod.
    assert not jax_startup.expects_other_hosts(MeshSettings(platform="cpu"))
    jax_startup.initialize_distributed(MeshSettings(platform="cpu", expect_processes=1))


@pytest.mark.parametrize(
    ("found", "member"),
    [
        (("10.0.0.2:8482", 2, 1, None), ClusterMember("10.0.0.2:8482", 2, 1)),
        (("10.0.0.2:8482", 1, 0, None), None),
        ((None, None, None, None), None),
    ],
)
def test_the_platform_says_who_the_hosts_are(monkeypatch, found, member):
    monkeypatch.setattr(rendezvous.ClusterEnv, "auto_detect_unset_distributed_params", lambda *_: found)
    assert rendezvous.detect_cluster(timeout_s=1) == member


@pytest.mark.parametrize(("error", "refused"), [(ConnectionError("no metadata"), False), (ValueError("odd"), True)])
def test_tpus_without_metadata_work_alone_and_metadata_that_cannot_be_read_are_an_error(monkeypatch, error, refused):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(rendezvous.ClusterEnv, "auto_detect_unset_distributed_params", fail)
    if refused:
        with pytest.raises(InputError, match=r"the platform's description of its hosts cannot be read \(odd\); set"):
            rendezvous.detect_cluster(timeout_s=1)
    else:
        assert rendezvous.detect_cluster(timeout_s=1) is None
        with pytest.raises(InputError, match=r"auto, but the platform does not answer \(no metadata\); set"):
            rendezvous.detect_cluster(timeout_s=1, required=True)


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


@pytest.mark.slow
def test_a_libtpu_that_is_installed_only_to_compile_does_not_complain() -> None:
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install -e '.[tpu]'")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TPU_", "JAX_PLATFORMS"))}
    command = [sys.executable, "-c", "import sys; from cli import main; sys.exit(main())", "inspect-mesh"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=REPOSITORY, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert "TPU" not in done.stderr
