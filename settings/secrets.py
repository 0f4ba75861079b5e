"""Loads API keys from the environment or a `.env`, and keeps them out of settings, logs, argv and run files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from dotenv import dotenv_values

SECRETS = ("WANDB_API_KEY", "HF_TOKEN")
FALLBACK_DOTENVS = (Path(__file__).parents[1] / ".env", Path("/root/.env"))
"""The `.env` files read after the nearest one: in the checkout, and on TPU VMs in the home directory of root."""
MIN_SECRET_LENGTH = 8
"""Minimum length, in characters, of a value to redact; shorter values are taken for placeholders."""
PRINTABLE_NAME = re.compile("[A-Z][A-Z0-9_]*")
"""Pattern of names in a `.env` that notices may show. Others may be parts of keys and are only counted."""
_further_secrets: set[str] = set()


def load_secrets(directory: Path, *, fallbacks: Sequence[Path] = FALLBACK_DOTENVS) -> list[str]:
    """Adds the secrets in a `.env` to the environment of this process, where libraries look for them.

    Reads the `.env` of `directory` or of its nearest parent, then `fallbacks`. Existing environment variables take
    precedence, and other names in the file are ignored. Returns notices for stderr, which never contain values.
    """
    notices = []
    for path in dict.fromkeys((_nearest_dotenv(directory), *fallbacks)):
        if path is None or not path.is_file():
            continue
        try:
            values = dotenv_values(path, interpolate=False)
        except (OSError, UnicodeDecodeError) as error:
            notices.append(f"{path} is ignored: it cannot be read ({type(error).__name__})")
            continue
        if others := [name for name, value in values.items() if value is not None and name not in SECRETS]:
            named = [name for name in others if PRINTABLE_NAME.fullmatch(name)][:3]
            num_others = len(others) - len(named)
            listed = ", ".join([*named, f"{num_others} other name(s)"] if num_others else named)
            notices.append(
                f"{path}: only {' and '.join(SECRETS)} are read from it, not {listed}; export what is needed"
            )
        secrets = {name: value for name in SECRETS if (value := values.get(name))}
        if secrets and path.stat().st_mode & 0o077:
            notices.append(f"{path} contains secrets and is readable by other users; run: chmod 600 {path}")
        for name, value in secrets.items():
            os.environ.setdefault(name, value)
    return notices


def redact_also(names: Iterable[str]) -> None:
    """Makes `redact` replace the values of further environment variables, such as keys passed to reward functions."""
    _further_secrets.update(names)


def redact(text: str) -> str:
    """Replaces the values of secrets in a text, because error messages of libraries may quote them."""
    for name in (*SECRETS, *_further_secrets):
        value = os.environ.get(name, "")
        if len(value) >= MIN_SECRET_LENGTH:
            text = text.replace(value, f"<{name}>")
    return text


def _nearest_dotenv(directory: Path) -> Path | None:
    resolved = directory.resolve()
    return next((path for folder in (resolved, *resolved.parents) if (path := folder / ".env").is_file()), None)
