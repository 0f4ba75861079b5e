"""Tests that API keys reach the environment of the process and nothing else."""

import os
from pathlib import Path

import pytest

from settings.secrets import load_secrets, redact
from tests.program import CANARY


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


def secrets_of(folder: Path) -> tuple[list[str], str | None, str | None]:
    notices = load_secrets(folder, fallbacks=[folder / "checkout" / ".env", folder / "root" / ".env"])
    return notices, os.environ.get("WANDB_API_KEY"), os.environ.get("HF_TOKEN")


def test_a_dotenv_file_sets_only_secrets_and_a_notice_names_other_variables(folder: Path) -> None:
    keys = f"export WANDB_API_KEY='{CANARY}$HOME'\r\nHF_TOKEN=\n{CANARY}\n"
    write(folder / ".env", f"{keys}LD_PRELOAD=x\nGRPO__RUN__STEPS=3\n")
    left = "LD_PRELOAD, GRPO__RUN__STEPS; export what is needed"
    told = f"{folder}/.env: only WANDB_API_KEY and HF_TOKEN are read from it, not {left}"
    assert secrets_of(folder) == ([told], f"{CANARY}$HOME", None)
    assert not {"LD_PRELOAD", "GRPO__RUN__STEPS"} & set(os.environ)


@pytest.mark.parametrize(
    ("names", "told"), [("", "not 2 other name(s);"), ("A=1\nB_2=2\nC=3\nD=4\n", "not A, B_2, C, 3 other name(s);")]
)
def test_what_may_be_a_key_is_counted_in_the_notice_but_not_named(folder: Path, names: str, told: str) -> None:
    write(folder / ".env", f"{CANARY}==\n{CANARY}/+x=\n{names}")
    (notice,) = secrets_of(folder)[0]
    assert told in notice and CANARY not in notice


def test_secrets_are_searched_in_environment_parents_checkout_and_root_in_this_order(folder, monkeypatch):
    write(folder / "a/.env", "WANDB_API_KEY=near\n")
    write(folder / ".env", "WANDB_API_KEY=far\nHF_TOKEN=far\n")
    write(folder / "a/b/root/.env", "WANDB_API_KEY=last\nHF_TOKEN=last\n")
    assert secrets_of(folder / "a/b") == ([], "near", "last")
    monkeypatch.delenv("HF_TOKEN")
    write(folder / "a/b/checkout/.env", "WANDB_API_KEY=checkout\nHF_TOKEN=checkout\n")
    assert secrets_of(folder / "a/b") == ([], "near", "checkout")
    monkeypatch.setenv("HF_TOKEN", "real")
    assert secrets_of(folder)[2] == "real"


def test_unreadable_and_world_readable_dotenv_files_are_announced(folder: Path) -> None:
    write(folder / ".env", f"WANDB_API_KEY={CANARY}\n", mode=0o640)
    (folder / "root").mkdir()
    (folder / "root" / ".env").write_bytes(b"WANDB_API_KEY=\xff\xfe\n")
    readable, unreadable = secrets_of(folder)[0]
    assert "chmod 600" in readable and CANARY not in readable
    assert "is ignored: it cannot be read (UnicodeDecodeError)" in unreadable


def test_secrets_are_redacted_in_messages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, told in (
        (CANARY, "401 for <HF_TOKEN>"),
        ("12345678", "401 for <HF_TOKEN>"),
        ("1234567", "401 for 1234567"),
    ):
        monkeypatch.setenv("HF_TOKEN", value)
        assert redact(f"401 for {value}") == told
