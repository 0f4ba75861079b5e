"""What this program is made of, for processes that must run the same one."""

from __future__ import annotations

import hashlib
from pathlib import Path

CODE = Path(__file__).resolve().parents[1]
"""Where `cli.py`, `app` and `settings` lie: a checkout or site-packages."""


def code_digest() -> str:
    """Of the program's own source files, wherever they lie."""
    digest = hashlib.sha256()
    files = [CODE / "cli.py", *(path for room in ("app", "settings") for path in sorted((CODE / room).rglob("*.py")))]
    for path in files:
        digest.update(f"{path.relative_to(CODE).as_posix()}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
