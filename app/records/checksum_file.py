"""`SHA256SUMS`: the digests of the files beside it, in the format of `sha256sum --check`."""

from __future__ import annotations

import hashlib
from pathlib import Path

from app.records.atomic_write import write_atomic

CHECKSUM_FILE = "SHA256SUMS"


def write_with_checksum(path: Path, content: bytes) -> None:
    """Writes a file atomically, and then its digest."""
    write_atomic(path, content)
    checksums = read_checksums(path.parent) | {path.name: hashlib.sha256(content).hexdigest()}
    lines = "".join(f"{checksum}  {name}\n" for name, checksum in sorted(checksums.items()))
    write_atomic(path.with_name(CHECKSUM_FILE), lines.encode())


def read_checksums(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of files by name, in hexadecimal; none if the folder has no list of them."""
    path = folder / CHECKSUM_FILE
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return {name: checksum for checksum, _, name in (line.partition("  ") for line in text.splitlines())}
