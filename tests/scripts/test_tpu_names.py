"""Tests that all scripts check the name of a TPU before they call gcloud."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.conftest import DEADLINE_S, SCRIPTS, Tpu

CALLS = {
    "sync_env_to_tpu_vm.sh": (),
    "setup_tpu_vm.sh": (),
    "launch_on_tpu_vm.sh": ("--", "true"),
}


@pytest.fixture(params=CALLS)
def script(request: pytest.FixtureRequest, tpu: Tpu) -> str:
    env = tpu.here / ".env"
    env.write_text("HF_TOKEN=token\n")
    env.chmod(0o600)
    return request.param


@pytest.mark.parametrize("name", ["my tpu", "-tpu", "", "TPU", "tpu;id", "a" * 64, "tpu\nx"])
def test_a_name_that_is_none_is_refused(tpu: Tpu, name: str) -> None:
    done = tpu.run("sync_env_to_tpu_vm.sh", tpu=name)
    assert (done.returncode, tpu.calls()) == (2, [])
    assert "--name" in done.stderr


@pytest.mark.parametrize("zone", ["us central2-b", "", "uscentral", "us-central2-b;id"])
def test_a_zone_that_is_none_is_refused(tpu: Tpu, zone: str) -> None:
    done = tpu.run("sync_env_to_tpu_vm.sh", zone=zone)
    assert (done.returncode, tpu.calls()) == (2, [])
    assert "--zone" in done.stderr


def test_every_script_checks_names_first(tpu: Tpu, script: str) -> None:
    done = tpu.run(script, *CALLS[script], tpu="-tpu")
    assert (done.returncode, tpu.calls()) == (2, [])
    assert f"{script}: --name is -tpu; expected a TPU's name" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--project", "my project"), "--project is my\\ project"),
        (("--folder", "../elsewhere"), "--folder is ../elsewhere"),
        (("--folder", "/root"), "--folder is /root"),
        (("--zones", "x"), "unknown argument --zones"),
        (("stray",), "unknown argument stray"),
        (("--zone",), "--zone needs a value"),
    ],
)
def test_other_options_are_checked_alike(tpu: Tpu, script: str, arguments: tuple[str, ...], complaint: str) -> None:
    done = tpu.run(script, *arguments)
    assert (done.returncode, tpu.calls()) == (2, [])
    assert complaint in done.stderr


def test_without_gcloud_each_says_what_to_install(tpu: Tpu, script: str) -> None:
    (tpu.bin / "gcloud").unlink()
    for tool in ("bash", "awk", "basename", "dirname"):
        (tpu.bin / tool).symlink_to(shutil.which(tool) or tool)
    done = subprocess.run(
        tpu.command(script, *CALLS[script]),
        cwd=tpu.here,
        env={"PATH": str(tpu.bin)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 2
    assert "gcloud is not on PATH" in done.stderr


def test_a_tpu_that_is_not_ready_is_told(tpu: Tpu, script: str) -> None:
    tpu.set_state("PREEMPTED\t\n")
    done = tpu.run(script, *CALLS[script])
    assert (done.returncode, tpu.subcommands()) == (1, ["describe"])
    assert "the TPU tpu-1 is PREEMPTED, not READY" in done.stderr


@pytest.mark.parametrize("worker", ["2", "one"])
def test_a_worker_that_is_not_there_is_refused(tpu: Tpu, worker: str) -> None:
    done = tpu.run("setup_tpu_vm.sh", "--worker", worker)
    assert done.returncode == 2
    assert f"--worker is {worker}" in done.stderr


def test_help_is_the_head_of_the_script(script: str) -> None:
    done = subprocess.run(["bash", SCRIPTS / script, "--help"], capture_output=True, text=True, check=True)
    assert f"bash scripts/{script} --name TPU --zone ZONE" in done.stdout
    assert "set -euo" not in done.stdout


def test_shellcheck_finds_nothing() -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (the dev extra brings it)")
    files = sorted(str(path) for path in Path(SCRIPTS).glob("*.sh"))
    done = subprocess.run([shellcheck, *files], cwd=SCRIPTS.parent, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
