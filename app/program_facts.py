"""What this program is made of, for processes that must run the same one."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

DRAWING = ("jax", "jaxlib", "flax", "numpy")
"""Packages that decide what is drawn from the same weights."""
TRAINING = ("grpo", *DRAWING, "libtpu", "optax", "orbax-checkpoint", "tokenizers", "transformers")
"""Those that decide what a run becomes."""

CODE = Path(__file__).resolve().parents[1]
"""Where `cli.py`, `verbs`, `app` and `settings` lie: a checkout or site-packages."""


def code_digest() -> str:
    """Of the program's own source files, wherever they lie."""
    digest = hashlib.sha256()
    rooms = (CODE / room for room in ("verbs", "app", "settings"))
    files = [CODE / "cli.py", *(path for room in rooms for path in sorted(room.rglob("*.py")))]
    for path in files:
        digest.update(f"{path.relative_to(CODE).as_posix()}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def program_facts(packages: Iterable[str]) -> dict[str, str]:
    """What it is -> which version or digest of it this process runs."""
    return {
        "version of Python": platform.python_version(),
        **{f"version of {name}": _version(name) for name in packages},
        "code of grpo": code_digest(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
