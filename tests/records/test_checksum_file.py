from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from app.records.checksum_file import CHECKSUM_FILE, read_checksums, write_with_checksum


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_sha256sum_reads_the_list_of_what_was_written_last(tmp_path: Path) -> None:
    assert read_checksums(tmp_path) == {}
    for name, content in (("b", b"1"), ("a", b"2"), ("b", b"3")):
        write_with_checksum(tmp_path / name, content)
    check = ["sha256sum", "--check", "--strict", CHECKSUM_FILE]
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, check=True).stdout == "a: OK\nb: OK\n"
    assert list(read_checksums(tmp_path)) == ["a", "b"]
    (tmp_path / "b").write_bytes(b"1")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode == 1
