"""Tests that API keys reach the environment of the process and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from settings.loading.secrets import load_secrets, redact

CANARY = "CANARY-0123456789abcdef"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "LD_PRELOAD", "GRPO__RUN__STEPS"):
        monkeypatch.setenv(name, "")  # so that whatever a test leaves behind is undone
        monkeypatch.delenv(name)
    return tmp_path


def write(path: Path, text: str, mode: int = 0o600) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def test_a_dotenv_gives_the_secrets_and_no_other_name(folder: Path) -> None:
    write(folder / ".env", f"export WANDB_API_KEY='{CANARY}'\nLD_PRELOAD=x\nGRPO__RUN__STEPS=3\n")
    assert load_secrets(folder, fallback=folder / "none") == []
    assert os.environ["WANDB_API_KEY"] == CANARY
    assert "LD_PRELOAD" not in os.environ
    assert "GRPO__RUN__STEPS" not in os.environ


def test_the_real_environment_wins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "real")
    write(folder / ".env", f"WANDB_API_KEY={CANARY}\n")
    load_secrets(folder, fallback=folder / "none")
    assert os.environ["WANDB_API_KEY"] == "real"


def test_the_nearest_parent_comes_before_the_last_resort(folder: Path) -> None:
    write(folder / "a/.env", "WANDB_API_KEY=near\n")
    write(folder / ".env", "WANDB_API_KEY=far\nHF_TOKEN=far\n")
    write(folder / "root/.env", "WANDB_API_KEY=last\nHF_TOKEN=last\n")
    (folder / "a/b/c").mkdir(parents=True)
    load_secrets(folder / "a/b/c", fallback=folder / "root/.env")
    assert (os.environ["WANDB_API_KEY"], os.environ["HF_TOKEN"]) == ("near", "last")


def test_a_dollar_in_a_key_is_only_a_dollar(folder: Path) -> None:
    write(folder / ".env", "WANDB_API_KEY=a$HOME${HOME}b\r\n")
    load_secrets(folder, fallback=folder / "none")
    assert os.environ["WANDB_API_KEY"] == "a$HOME${HOME}b"


def test_an_empty_value_is_no_key(folder: Path) -> None:
    write(folder / ".env", "WANDB_API_KEY=\nHF_TOKEN\n")
    load_secrets(folder, fallback=folder / "none")
    assert "WANDB_API_KEY" not in os.environ
    assert "HF_TOKEN" not in os.environ


def test_a_file_that_others_can_read_is_announced_without_its_content(folder: Path) -> None:
    write(folder / ".env", f"WANDB_API_KEY={CANARY}\n", mode=0o644)
    (notice,) = load_secrets(folder, fallback=folder / "none")
    assert "chmod 600" in notice
    assert CANARY not in notice


def test_a_file_that_is_no_text_is_announced_and_ignored(folder: Path) -> None:
    (folder / ".env").write_bytes(b"WANDB_API_KEY=\xff\xfe\n")
    (notice,) = load_secrets(folder, fallback=folder / "none")
    assert "cannot be read (UnicodeDecodeError)" in notice


def test_messages_lose_the_values_of_secrets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    assert redact(f"401 for {CANARY}") == "401 for <HF_TOKEN>"
    monkeypatch.setenv("HF_TOKEN", "abc")
    assert redact("an abc") == "an abc"
