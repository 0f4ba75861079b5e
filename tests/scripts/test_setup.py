"""Tests that the last commit is installed on every worker, and that other files there remain."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.scripts.conftest import SCRIPTS, Tpu

# In the place of `scripts/environment.sh`, which would fetch some gigabytes: what it is asked for, and what it leaves.
ENVIRONMENT = """make_environment() {
    [ -e unusable ] && { echo "pip could not install the package" >&2; exit 1; }
    mkdir -p .venv/bin
    echo "$1 $PYTHON" >>.venv/arguments
    printf '#!/bin/sh\\necho grpo 1.2.3\\n' >.venv/bin/grpo
    chmod +x .venv/bin/grpo
}
"""


@pytest.fixture
def checkout(tpu: Tpu) -> Path:
    """A repository to which a test may commit."""
    folder = tpu.here / "checkout"
    (folder / "scripts").mkdir(parents=True)
    for name in ("setup_tpu_vm.sh", "tpu_vm.sh"):
        shutil.copy(SCRIPTS / name, folder / "scripts" / name)
    (folder / "scripts" / "environment.sh").write_text(ENVIRONMENT)
    (folder / "old name.txt").write_text("first\n")
    git(folder, "init", "--quiet")
    commit(folder)
    for python in ("python3.11", "python3.12"):
        tpu.program(python, "#!/bin/sh\nexit 0\n")
    tpu.program("sudo", f'#!/bin/sh\necho "$*" >>{tpu.cloud}/sudo\n')
    return folder


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=T", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", folder, *who, *arguments], check=True)


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "a commit")


def set_up(tpu: Tpu, checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return tpu.run(checkout / "scripts" / "setup_tpu_vm.sh", *arguments)


def test_every_worker_gets_the_commit_and_an_environment(tpu: Tpu, checkout: Path) -> None:
    done = set_up(tpu, checkout)
    assert done.returncode == 0, done.stderr
    for worker in (0, 1):
        there = tpu.home(worker) / "grpo"
        assert (there / "old name.txt").read_text() == "first\n"
        assert (there / ".venv" / "arguments").read_text() == "tpu python3.11\n"
        assert f"worker {worker}: grpo 1.2.3, commit " in done.stdout
        assert not list(tpu.home(worker).glob(".grpo-incoming*"))
    assert not (tpu.cloud / "sudo").exists()


def test_the_next_commit_replaces_the_files_of_the_last_and_no_others(tpu: Tpu, checkout: Path) -> None:
    assert set_up(tpu, checkout).returncode == 0
    there = tpu.home(0) / "grpo"
    for mine in (".env", "runs/metrics.jsonl", "scripts/mine.py"):
        (there / mine).parent.mkdir(exist_ok=True)
        (there / mine).write_text("mine\n")
    (checkout / "old name.txt").rename(checkout / "new name.txt")
    commit(checkout)
    done = set_up(tpu, checkout)
    assert done.returncode == 0, done.stderr
    assert not (there / "old name.txt").exists()
    for kept in ("new name.txt", ".env", "runs/metrics.jsonl", "scripts/mine.py", ".venv/bin/grpo"):
        assert (there / kept).is_file()


def test_python_is_installed_where_there_is_none_that_will_do(tpu: Tpu, checkout: Path) -> None:
    for python in ("python3.11", "python3.12"):
        tpu.program(python, "#!/bin/sh\nexit 1\n")
    assert set_up(tpu, checkout, "--python", "python3.12").returncode == 0
    assert "install -y python3.12 python3.12-venv" in (tpu.cloud / "sudo").read_text()
    assert (tpu.home(0) / "grpo" / ".venv" / "arguments").read_text() == "tpu python3.12\n"


def test_a_worker_that_fails_is_named(tpu: Tpu, checkout: Path) -> None:
    (tpu.home(1) / "grpo").mkdir()
    (tpu.home(1) / "grpo" / "unusable").touch()
    done = set_up(tpu, checkout)
    assert done.returncode == 1
    assert "worker 1: FAILED" in done.stdout
    assert "pip could not install the package" in done.stderr
    assert "failed on worker 1 of tpu-1; 1 of 2 are done" in done.stderr


def test_a_running_launch_is_not_pulled_from_under(tpu: Tpu, checkout: Path) -> None:
    lock = tpu.home(1) / ".grpo-launch"
    lock.touch()
    with subprocess.Popen(["flock", lock, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin
        assert holder.stdout
        holder.stdin.write(b"held\n")
        holder.stdin.flush()
        holder.stdout.readline()
        done = set_up(tpu, checkout)
        holder.stdin.close()
    assert done.returncode == 1
    assert "a launch still runs on this worker" in done.stderr
    assert (tpu.home(0) / "grpo").exists()
    assert not (tpu.home(1) / "grpo").exists()


def test_another_python_is_refused(tpu: Tpu, checkout: Path) -> None:
    done = set_up(tpu, checkout, "--python", "python3.10")
    assert (done.returncode, tpu.calls()) == (2, [])
    assert "--python is python3.10; expected python3.11 or python3.12" in done.stderr
