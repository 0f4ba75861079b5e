"""API keys: only from the real environment or a `.env`, never in settings, logs, argv or run files."""

from __future__ import annotations

import os
from pathlib import Path

from dotenv import dotenv_values

SECRETS = ("WANDB_API_KEY", "HF_TOKEN")
FALLBACK_DOTENV = Path("/root/.env")
"""Where TPU VMs keep theirs."""
MIN_SECRET_LENGTH = 8
"""Characters; anything shorter is a placeholder, and redacting it would only garble messages."""


def load_secrets(directory: Path, *, fallback: Path = FALLBACK_DOTENV) -> list[str]:
    """Puts the secrets of a `.env` into this process' environment, where the libraries look for them.

    Reads the `.env` of `directory` or its nearest parent's, then `last_resort`. The real environment
    wins, and no other name is taken. Returns lines for stderr, which name files, never values.
    """
    notices = []
    for path in (_nearest_dotenv(directory), fallback):
        if path is None or not path.is_file():
            continue
        try:
            values = dotenv_values(path, interpolate=False)
        except (OSError, UnicodeDecodeError) as error:
            notices.append(f"{path} is ignored: it cannot be read ({type(error).__name__})")
            continue
        found = {name: value for name in SECRETS if (value := values.get(name))}
        if found and path.stat().st_mode & 0o077:
            notices.append(f"{path} holds secrets and other users can read it; run: chmod 600 {path}")
        for name, value in found.items():
            os.environ.setdefault(name, value)
    return notices


def redact(text: str) -> str:
    """The text without the value of any secret: a library's error message may quote one."""
    for name in SECRETS:
        value = os.environ.get(name, "")
        if len(value) >= MIN_SECRET_LENGTH:
            text = text.replace(value, f"<{name}>")
    return text


def _nearest_dotenv(directory: Path) -> Path | None:
    resolved = directory.resolve()
    return next((path for folder in (resolved, *resolved.parents) if (path := folder / ".env").is_file()), None)
