"""Tests the scripts that install a commit and copy API keys to the workers of a TPU VM, and their shared checks."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from settings.secrets import SECRETS, load_secrets
from tests.program import CANARY, DEADLINE_S
from tests.scripts.conftest import SCRIPTS, Tpu, commit, make_checkout

SYNC, SETUP, LAUNCH = "sync_env_to_tpu_vm.sh", "setup_tpu_vm.sh", "launch_on_tpu_vm.sh"
CALLS = {SYNC: (), SETUP: (), LAUNCH: ("--", "true")}
"""Arguments of each script besides name and zone."""

# Replaces `scripts/environment.sh`, which would fetch gigabytes; it records its arguments and installs a stub.
ENVIRONMENT = """make_environment() {
    [ -e unusable ] && { echo "pip could not install the package" >&2; exit 1; }
    mkdir -p .venv/bin
    echo "$1 $PYTHON" >>.venv/arguments
    printf '#!/bin/sh\\necho grpo 1.2.3\\n' >.venv/bin/grpo
    chmod +x .venv/bin/grpo
}
"""


def write_env(tpu: Tpu, text: str = f"WANDB_API_KEY={CANARY}\n", *, mode: int = 0o600) -> Path:
    path = tpu.here / ".env"
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("script", "arguments", "complaint"),
    [
        *((SYNC, ("--name", name), "--name") for name in ("my tpu", "", "TPU", "tpu;id", "a" * 64, "tpu\nx")),
        *((SYNC, ("--zone", zone), "--zone") for zone in ("us central2-b", "", "uscentral", "us-central2-b;id")),
        *((script, ("--name", "-tpu", *CALLS[script]), "--name is -tpu; expected a TPU's name") for script in CALLS),
        (SYNC, ("--project", "my project"), "--project is my\\ project"),
        (SETUP, ("--folder", "../elsewhere"), "--folder is ../elsewhere"),
        (LAUNCH, ("--folder", "/root"), "--folder is /root"),
        *((script, ("stray",), "unknown argument stray") for script in CALLS),
        (SETUP, ("--zone",), "--zone needs a value"),
        (SETUP, ("--extras", "math;id"), "; expected names of extras, such as math,qlora"),
        (SETUP, ("--python", "python3.10"), "--python is python3.10; expected python3.11 or python3.12"),
        (LAUNCH, ("--",), "nothing to run"),
        (LAUNCH, ("--restarts", "-1", "--", "true"), "--restarts is -1; expected a whole number"),
        (LAUNCH, ("--restarts", "1", "--", "grpo", "train", "--resume=never"), "exclude each other"),
    ],
    ids=repr,
)
def test_script_options_are_checked_before_gcloud_is_called(tpu, script, arguments, complaint):
    write_env(tpu)
    done = tpu.run(script, *arguments)
    assert (done.returncode, tpu.calls()) == (2, [])
    assert complaint in done.stderr


@pytest.mark.parametrize("script", CALLS)
def test_missing_tpu_worker_or_gcloud_is_reported(tpu: Tpu, script: str) -> None:
    write_env(tpu)
    tpu.set_state("PREEMPTED\t\n")
    done = tpu.run(script, *CALLS[script])
    assert (done.returncode, [call[3] for call in tpu.calls()]) == (1, ["describe"])
    assert "the TPU tpu-1 is PREEMPTED, not READY" in done.stderr
    if script != LAUNCH:
        tpu.set_state("READY\t10.0.0.2;10.0.0.3\n")
        done = tpu.run(script, "--worker", "2")
        assert done.returncode == 2 and "--worker is 2" in done.stderr
    (tpu.bin / "gcloud").unlink()
    for tool in ("bash", "awk", "basename", "dirname"):
        (tpu.bin / tool).symlink_to(shutil.which(tool) or tool)
    tpu.environment = {"PATH": str(tpu.bin)}
    done = tpu.run(script, *CALLS[script])
    assert done.returncode == 2 and "gcloud is not on PATH" in done.stderr
    shown = subprocess.run(["bash", SCRIPTS / script, "--help"], capture_output=True, text=True, check=True).stdout
    assert f"bash scripts/{script} --name TPU --zone ZONE" in shown and "set -euo" not in shown


def test_sync_copies_api_keys_to_every_worker_where_the_program_reads_them(
    tpu: Tpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = f"export WANDB_API_KEY='{CANARY} $x'\r\n\nHF_TOKEN = {CANARY}-2\n"
    write_env(tpu, f"# mine\n{keys}AWS_SECRET=mine\nbareKey==\n")
    done = tpu.run(SYNC)
    assert done.returncode == 0, done.stderr
    assert "copying WANDB_API_KEY HF_TOKEN from .env" in done.stdout and "bareKey" not in done.stdout
    assert "from a .env: AWS_SECRET 1 other name(s)\n" in done.stdout
    for worker in (0, 1):
        there = tpu.home(worker) / "grpo" / ".env"
        assert there.stat().st_mode & 0o777 == 0o600 and "AWS_SECRET" not in there.read_text()
        assert [path.name for path in tpu.home(worker).rglob("*") if path.is_file()] == [".env"]
        for name in SECRETS:
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        assert load_secrets(there.parent, fallbacks=[]) == []
        assert (os.environ["WANDB_API_KEY"], os.environ["HF_TOKEN"]) == (f"{CANARY} $x", f"{CANARY}-2")
        assert f"worker {worker}: {there}, mode 600" in done.stdout
    assert (tpu.cloud / "modes").read_text() == "600\n" * 2


@pytest.mark.parametrize("broken", [None, "scp", "ssh"])
def test_values_of_api_keys_appear_on_no_command_line_and_in_no_output(tpu: Tpu, broken: str | None) -> None:
    write_env(tpu, f"WANDB_API_KEY={CANARY}\nOTHER_KEY={CANARY}\n")
    if broken:
        tpu.fail(broken, 1, "no route to host")
    else:  # a trace shows no value either
        tpu.program("bash", f'#!/bin/sh\nexec {shutil.which("bash")} -x "$@"\n')
    done = tpu.run(SYNC)
    assert ("+ " in done.stderr) == (broken is None) and CANARY not in done.stdout + done.stderr
    assert not [word for call in tpu.calls() for word in call if CANARY in word]
    assert (tpu.home(0) / "grpo" / ".env").is_file() and done.returncode == bool(broken)
    if broken:
        assert "worker 1: FAILED" in done.stdout and "no route to host" in done.stderr
        assert "failed on worker 1 of tpu-1; 1 of 2 are done" in done.stderr
        (tpu.cloud / f"fail-{broken}-1").unlink()
        assert tpu.run(SYNC, "--worker=1", tpu="root@tpu-1").returncode == 0
        assert (tpu.home(1) / "grpo" / ".env").is_file()


@pytest.mark.parametrize(
    ("text", "mode", "complaint"),
    [
        (f"{CANARY}\n", 0o600, "line 1 of .env is not NAME=VALUE"),
        (f'HF_TOKEN="{CANARY}\nmore"\n', 0o600, "line 1 of .env: a value in quotes must end on its line"),
        ("WANDB_API_KEY=\n", 0o600, "sets none of WANDB_API_KEY HF_TOKEN"),
        (f"HF_TOKEN={CANARY}\n", 0o640, "chmod 600 .env"),
    ],
)
def test_an_env_file_that_is_unusable_or_readable_by_others_is_refused(tpu, text, mode, complaint):
    write_env(tpu, text, mode=mode)
    done = tpu.run(SYNC)
    assert (done.returncode, tpu.calls()) == (2, [])
    assert complaint in done.stderr and CANARY not in done.stdout + done.stderr
    (tpu.here / "link.env").symlink_to(".env")
    assert "link.env is a symbolic link" in tpu.run(SYNC, "--env", "link.env").stderr


@pytest.fixture
def checkout(tpu: Tpu) -> Path:
    """Returns a repository to which a test may commit."""
    folder = make_checkout(tpu, ENVIRONMENT)
    (folder / "old name.txt").write_text("first\n")
    commit(folder)
    return folder


def test_setup_installs_the_newest_commit_on_every_worker_and_keeps_other_files(tpu: Tpu, checkout: Path) -> None:
    script = checkout / "scripts" / SETUP
    done = tpu.run(script)
    assert done.returncode == 0, done.stderr
    for worker in (0, 1):
        there = tpu.home(worker) / "grpo"
        assert (there / "old name.txt").read_text() == "first\n"
        assert (there / ".venv" / "arguments").read_text() == "tpu,gcs python3.11\n"
        assert f"worker {worker}: grpo 1.2.3, commit " in done.stdout
        assert not list(tpu.home(worker).glob(".grpo-incoming*"))
    assert not (tpu.cloud / "sudo").exists()
    there = tpu.home(0) / "grpo"
    for mine in (".env", "runs/metrics.jsonl", "scripts/mine.py"):
        (there / mine).parent.mkdir(exist_ok=True)
        (there / mine).write_text("mine\n")
    (checkout / "old name.txt").rename(checkout / "new name.txt")
    commit(checkout)
    assert tpu.run(script).returncode == 0
    assert not (there / "old name.txt").exists()
    for kept in ("new name.txt", ".env", "runs/metrics.jsonl", "scripts/mine.py", ".venv/bin/grpo"):
        assert (there / kept).is_file()


def test_setup_installs_python_and_names_a_worker_that_fails_or_is_in_use(tpu: Tpu, checkout: Path) -> None:
    for python in ("python3.11", "python3.12"):
        tpu.program(python, "#!/bin/sh\nexit 1\n")
    (tpu.home(1) / "grpo").mkdir()
    (tpu.home(1) / "grpo" / "unusable").touch()
    done = tpu.run(checkout / "scripts" / SETUP, "--python", "python3.12", "--extras", "math,qlora")
    assert "install -y python3.12 python3.12-venv" in (tpu.cloud / "sudo").read_text()
    assert (tpu.home(0) / "grpo" / ".venv" / "arguments").read_text() == "tpu,gcs,math,qlora python3.12\n"
    assert done.returncode == 1 and "worker 1: FAILED" in done.stdout
    assert "pip could not install the package" in done.stderr
    assert "failed on worker 1 of tpu-1; 1 of 2 are done" in done.stderr
    lock = tpu.home(0) / ".grpo-launch"
    lock.touch()
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(["flock", lock, "sh", "-c", "echo held; cat"], **pipes) as holder:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        done = tpu.run(checkout / "scripts" / SETUP)
        holder.communicate(timeout=DEADLINE_S)
    assert done.returncode == 1 and "a launch still runs on this worker" in done.stderr
