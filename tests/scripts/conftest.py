"""Provides a fake `gcloud` for a TPU VM of two workers, which runs commands in a home folder per worker."""

import fcntl
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.program import DEADLINE_S, REPOSITORY

SCRIPTS = REPOSITORY / "scripts"

# Records its arguments, one file a call. `create` brings two workers with empty disks. `ssh` runs the command through
# the login shell, and once more where the connection broke, as gcloud does.
GCLOUD = """#!/usr/bin/env bash
cloud=@CLOUD@
printf '%s\\0' "$@" >"$(mktemp "$cloud/calls/XXXXXX")"
[ "$1 $2 $3" = "compute tpus tpu-vm" ] || { echo "unknown group: $*" >&2; exit 2; }
subcommand=$4
shift 4
worker='' command='' places=()
for word in "$@"; do
    case $word in
        --worker=*) worker=${word#*=} ;;
        --command=*) command=${word#*=} ;;
        -*) ;;
        *) places+=("$word") ;;
    esac
done
if [ -e "$cloud/fail-$subcommand-${worker:-0}" ]; then
    cat "$cloud/fail-$subcommand-${worker:-0}" >&2
    exit 1
fi
home=$cloud/home-$worker
case $subcommand in
    create)
        rm -rf "$cloud"/home-*
        mkdir "$cloud/home-0" "$cloud/home-1"
        printf 'READY\\t10.0.0.2;10.0.0.3\\n' >"$cloud/describe"
        ;;
    delete) rm -rf "$cloud"/home-* "$cloud/describe" ;;
    describe) cat "$cloud/describe" ;;
    scp)
        stat -c %a "${places[0]}" >>"$cloud/modes"
        cp --preserve=mode -- "${places[0]}" "$home/${places[1]#*:}"
        ;;
    ssh)
        cd "$home" || exit 1
        if [ -e "$cloud/break-$worker" ]; then
            rm "$cloud/break-$worker"
            HOME=$home setsid bash -c "$command" >/dev/null 2>&1 &
            while [ ! -s "$home/.grpo-launch" ]; do sleep 0.05; done
            echo "Retrying: SSH command error" >&2
        fi
        HOME=$home bash -c "$command"
        ;;
esac
"""


class Tpu:
    """The environment of the scripts: two workers with empty home folders."""

    def __init__(self, folder: Path) -> None:
        self.cloud, self.bin, self.here = folder / "cloud", folder / "bin", folder / "here"
        for path in (self.cloud / "calls", self.bin, self.here, *(self.home(worker) for worker in (0, 1))):
            path.mkdir(parents=True)
        self.environment = {**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}"}
        self.set_state("READY\t10.0.0.2;10.0.0.3\n")
        self.program("gcloud", GCLOUD.replace("@CLOUD@", str(self.cloud)))

    def home(self, worker: int) -> Path:
        return self.cloud / f"home-{worker}"

    def set_state(self, described: str) -> None:
        (self.cloud / "describe").write_text(described)

    def fail(self, subcommand: str, worker: int, message: str = "") -> None:
        (self.cloud / f"fail-{subcommand}-{worker}").write_text(message)

    def program(self, name: str, text: str, *, folder: Path | None = None) -> None:
        path = (folder or self.bin) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def calls(self) -> list[list[str]]:
        return [path.read_text().split("\0")[:-1] for path in (self.cloud / "calls").iterdir()]

    def start(
        self, script: str | Path, *arguments: str, tpu: str = "tpu-1", zone: str = "us-central2-b"
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(SCRIPTS / script), "--name", tpu, "--zone", zone, *arguments],
            cwd=self.here,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str | Path, *arguments: str, **place: str) -> subprocess.CompletedProcess[str]:
        with self.start(script, *arguments, **place) as process:
            try:
                output = process.communicate(timeout=DEADLINE_S)
            finally:
                process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, *output)

    def running(self, worker: int) -> int | None:
        """Returns the process group that holds the lock of a launch on the worker."""
        lock = self.home(worker) / ".grpo-launch"
        if not lock.exists():
            return None
        with lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read().split()[0])
        return None


def make_checkout(tpu: Tpu, environment: str) -> Path:
    """Makes a repository with the scripts, and with another text in place of `scripts/environment.sh`."""
    folder = tpu.here / "checkout"
    (folder / "scripts").mkdir(parents=True)
    for script in SCRIPTS.glob("*tpu_vm.sh"):
        shutil.copy(script, folder / "scripts")
    (folder / "scripts" / "environment.sh").write_text(environment)
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    commit(folder)
    for python in ("python3.11", "python3.12"):
        tpu.program(python, "#!/bin/sh\nexit 0\n")
    tpu.program("sudo", f'#!/bin/sh\necho "$*" >>{tpu.cloud}/sudo\n')
    return folder


def commit(folder: Path) -> None:
    who = ("-c", "user.name=T", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    for command in (("add", "--all"), (*who, "commit", "--quiet", "--message", "a commit")):
        subprocess.run(["git", *command], cwd=folder, check=True)


@pytest.fixture
def tpu(tmp_path: Path) -> Iterator[Tpu]:
    if not all(shutil.which(tool) for tool in ("bash", "flock", "setsid", "timeout", "git")):
        pytest.skip("needs bash, flock, setsid, timeout and git, as a TPU VM has them")
    machines = Tpu(tmp_path)
    yield machines
    left = [pid for worker in (0, 1) if (pid := machines.running(worker))]
    for pid in left:
        os.killpg(pid, signal.SIGKILL)
    assert not left, "a launch has left processes behind"
