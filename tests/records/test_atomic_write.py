from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from app.records.atomic_write import create_folder_atomic, is_partial_file, open_atomic, write_atomic

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_bytes(b"old")
    return path


def test_a_file_is_replaced_and_nothing_stays_beside_it(path: Path) -> None:
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new" and list(path.parent.iterdir()) == [path]
    write_atomic(path.with_name("b.txt"), b"")
    assert path.with_name("b.txt").read_bytes() == b""


def test_the_old_file_is_there_until_the_new_one_is_whole(path: Path) -> None:
    with open_atomic(path) as file:
        file.write(b"n" * 1_000_000)
        assert path.read_bytes() == b"old"
        (unfinished,) = set(path.parent.iterdir()) - {path}
        assert is_partial_file(unfinished, target=path) and not is_partial_file(
            unfinished, target=path.with_name("b.txt")
        )
        assert not is_partial_file(path, target=path)
    assert path.read_bytes() == b"n" * 1_000_000


def test_a_failure_keeps_the_old_file_and_leaves_nothing_else(path: Path) -> None:
    with pytest.raises(KeyError), open_atomic(path) as file:
        file.write(b"new")
        raise KeyError
    assert path.read_bytes() == b"old" and list(path.parent.iterdir()) == [path]


def test_a_file_that_cannot_take_its_name_leaves_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomic(folder, b"new")
    assert list(tmp_path.iterdir()) == [folder]


def test_a_program_that_is_killed_while_it_writes_keeps_the_old_file(path: Path) -> None:
    program = (
        "import os, signal, sys, pathlib\n"
        "from app.records.atomic_write import open_atomic\n"
        "with open_atomic(pathlib.Path(sys.argv[1])) as file:\n"
        "    file.write(b'x' * 1_000_000)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run([sys.executable, "-c", program, str(path)], check=False, env=environ)
    assert result.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    (unfinished,) = set(path.parent.iterdir()) - {path}
    assert is_partial_file(unfinished, target=path)


def test_a_folder_appears_when_all_of_it_is_written(tmp_path: Path) -> None:
    with create_folder_atomic(tmp_path / "new") as folder:
        (folder / "a").write_text("a")
        assert [path.name for path in tmp_path.iterdir()] == [folder.name]
        assert is_partial_file(folder, target=tmp_path / "new")
    assert list(tmp_path.iterdir()) == [tmp_path / "new"] and (tmp_path / "new" / "a").read_text() == "a"


@pytest.mark.parametrize("fails", [True, False], ids=["a_failure", "a_name_taken_meanwhile"])
def test_a_folder_that_is_not_finished_leaves_nothing(tmp_path: Path, fails: bool) -> None:
    with pytest.raises(KeyError if fails else FileExistsError), create_folder_atomic(tmp_path / "new") as folder:
        (folder / "a").write_text("a")
        if fails:
            raise KeyError
        (tmp_path / "new").mkdir()
    left = [] if fails else [tmp_path / "new"]
    assert list(tmp_path.iterdir()) == left and not any(path for one in left for path in one.iterdir())


def test_two_hosts_may_write_the_same_file_at_once(tmp_path: Path) -> None:
    with open_atomic(tmp_path / "new") as first, open_atomic(tmp_path / "new") as second:
        first.write(b"same")
        second.write(b"same")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("new", b"same")]
