"""Tests that API keys reach every worker, readable only by their owner, and are never shown."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from settings.loading.secrets import SECRETS, load_secrets
from tests.scripts.conftest import Tpu

SCRIPT = "sync_env_to_tpu_vm.sh"
CANARY = "canary-5f2b81c0"


def write_env(tpu: Tpu, text: str = f"WANDB_API_KEY={CANARY}\n", *, mode: int = 0o600) -> Path:
    path = tpu.here / ".env"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_every_worker_gets_the_keys_where_the_program_reads_them(tpu: Tpu, monkeypatch: pytest.MonkeyPatch) -> None:
    write_env(tpu, f"# mine\nexport WANDB_API_KEY='{CANARY} $x'\r\n\nHF_TOKEN = {CANARY}-2")
    done = tpu.run(SCRIPT)
    assert done.returncode == 0, done.stderr
    for worker in (0, 1):
        there = tpu.home(worker) / "grpo" / ".env"
        assert there.stat().st_mode & 0o777 == 0o600
        assert [path.name for path in tpu.home(worker).rglob("*") if path.is_file()] == [".env"]
        for name in SECRETS:
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        assert load_secrets(there.parent, fallback=Path("/nowhere")) == []
        assert (os.environ["WANDB_API_KEY"], os.environ["HF_TOKEN"]) == (f"{CANARY} $x", f"{CANARY}-2")
        assert f"worker {worker}: {there}, mode 600" in done.stdout
    assert "copying WANDB_API_KEY HF_TOKEN from .env" in done.stdout
    assert (tpu.cloud / "modes").read_text() == "600\n" * 2


@pytest.mark.parametrize("broken", [None, "scp", "ssh"])
def test_values_are_on_no_command_line_and_in_no_output(tpu: Tpu, broken: str | None) -> None:
    write_env(tpu, f"WANDB_API_KEY={CANARY}\nOTHER_KEY={CANARY}\n")
    if broken:
        tpu.fail(broken, 0, "no route to host")
    traced = tpu.run(SCRIPT)
    assert CANARY not in traced.stdout + traced.stderr
    assert not [word for call in tpu.calls() for word in call if CANARY in word]
    assert "--quiet" in tpu.calls()[0]


def test_a_trace_of_the_script_shows_no_value(tpu: Tpu) -> None:
    write_env(tpu)
    tpu.program("bash", f'#!/bin/sh\nexec {shutil.which("bash")} -x "$@"\n')
    done = tpu.run(SCRIPT)
    assert done.returncode == 0, done.stderr
    assert "+ " in done.stderr
    assert CANARY not in done.stdout + done.stderr


def test_names_that_the_program_does_not_take_stay_here(tpu: Tpu) -> None:
    write_env(tpu, f"HF_TOKEN=abc\nAWS_SECRET={CANARY}\nWANDB_API_KEY=\n")
    done = tpu.run(SCRIPT)
    assert done.returncode == 0, done.stderr
    assert "from a .env: AWS_SECRET" in done.stdout
    assert (tpu.home(1) / "grpo" / ".env").read_text() == "HF_TOKEN=abc\n"


@pytest.mark.parametrize("subcommand", ["scp", "ssh"])
def test_a_worker_that_fails_is_named_and_the_others_are_done(tpu: Tpu, subcommand: str) -> None:
    write_env(tpu)
    tpu.fail(subcommand, 1, "no route to host")
    done = tpu.run(SCRIPT)
    assert done.returncode == 1
    assert "worker 1: FAILED" in done.stdout
    assert "no route to host" in done.stderr
    assert "failed on worker 1 of tpu-1; 1 of 2 are done" in done.stderr
    assert (tpu.home(0) / "grpo" / ".env").is_file()


def test_a_single_worker_can_be_chosen(tpu: Tpu) -> None:
    write_env(tpu)
    assert tpu.run(SCRIPT, "--worker=1", "--project", "my-project-1", tpu="root@tpu-1").returncode == 0
    assert not (tpu.home(0) / "grpo").exists()
    assert all("--project=my-project-1" in call for call in tpu.calls())
    assert "root@tpu-1" in next(call for call in tpu.calls() if call[3] == "ssh")
    assert "tpu-1" in next(call for call in tpu.calls() if call[3] == "describe")


def test_names_are_those_that_the_program_takes() -> None:
    text = Path(__file__).resolve().parents[2].joinpath("scripts", SCRIPT).read_text()
    assert f"TAKEN=({' '.join(SECRETS)})" in text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (f"{CANARY}\n", "line 1 of .env is not NAME=VALUE"),
        (f"HF_TOKEN=a\n1BAD={CANARY}\n", "line 2 of .env is not NAME=VALUE"),
        (f"BAD-NAME={CANARY}\n", "line 1 of .env is not NAME=VALUE"),
        (f'HF_TOKEN="{CANARY}\nmore"\n', "line 1 of .env, HF_TOKEN: a value in quotes must end on its line"),
        ("", "sets none of WANDB_API_KEY HF_TOKEN"),
        ("WANDB_API_KEY=\n", "sets none of WANDB_API_KEY HF_TOKEN"),
    ],
)
def test_a_file_with_unusable_lines_is_refused_unquoted(tpu: Tpu, text: str, complaint: str) -> None:
    write_env(tpu, text)
    done = tpu.run(SCRIPT)
    assert (done.returncode, tpu.calls()) == (2, [])
    assert complaint in done.stderr
    assert CANARY not in done.stdout + done.stderr


@pytest.mark.parametrize("mode", [0o640, 0o602])
def test_a_file_that_others_may_use_is_refused(tpu: Tpu, mode: int) -> None:
    write_env(tpu, mode=mode)
    done = tpu.run(SCRIPT)
    assert (done.returncode, tpu.calls()) == (2, [])
    assert "chmod 600 .env" in done.stderr


def test_what_is_no_file_of_its_own_is_refused(tpu: Tpu) -> None:
    write_env(tpu).rename(tpu.here / "real.env")
    (tpu.here / "link.env").symlink_to("real.env")
    (tpu.here / "folder.env").mkdir()
    os.mkfifo(tpu.here / "pipe.env", 0o600)
    complaints = {
        "missing.env": "does not exist",
        "link.env": "is a symbolic link",
        "folder.env": "is not a regular file",
        "pipe.env": "is not a regular file",
    }
    for name, complaint in complaints.items():
        done = tpu.run(SCRIPT, "--env", name)
        assert (done.returncode, tpu.calls()) == (2, [])
        assert f"{name} {complaint}" in done.stderr
