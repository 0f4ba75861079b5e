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


def test_a_file_is_replaced_when_the_new_one_is_whole(path: Path) -> None:
    with open_atomic(path) as file:
        file.write(b"n" * 1_000_000)
        assert path.read_bytes() == b"old"
        (partial,) = set(path.parent.iterdir()) - {path}
        assert is_partial_file(partial, target=path) and not is_partial_file(path, target=path)
        assert not is_partial_file(partial, target=path.with_name("b.txt"))
    assert path.read_bytes() == b"n" * 1_000_000 and list(path.parent.iterdir()) == [path]
    write_atomic(path, b"")
    assert path.read_bytes() == b"" and list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_only_the_old_file(path: Path) -> None:
    with pytest.raises(KeyError), open_atomic(path) as file:
        file.write(b"new")
        raise KeyError
    assert path.read_bytes() == b"old" and list(path.parent.iterdir()) == [path]
    path.unlink()
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomic(path, b"new")
    assert list(path.parent.iterdir()) == [path]


def test_a_program_killed_while_it_writes_keeps_the_old_file(path: Path) -> None:
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
    (partial,) = set(path.parent.iterdir()) - {path}
    assert is_partial_file(partial, target=path)


def test_a_folder_appears_when_all_of_it_is_written(tmp_path: Path) -> None:
    new = tmp_path / "new"
    with create_folder_atomic(new) as folder:
        (folder / "a").write_text("a")
        assert list(tmp_path.iterdir()) == [folder] and is_partial_file(folder, target=new)
    assert list(tmp_path.iterdir()) == [new] and (new / "a").read_text() == "a"


def test_a_folder_that_is_not_finished_leaves_nothing(tmp_path: Path) -> None:
    new = tmp_path / "new"
    with pytest.raises(KeyError), create_folder_atomic(new) as folder:
        (folder / "a").write_text("a")
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileExistsError), create_folder_atomic(new) as folder:
        (folder / "a").write_text("a")
        new.mkdir()
    assert list(tmp_path.iterdir()) == [new] and list(new.iterdir()) == []


def test_concurrent_atomic_writes_use_separate_temporary_files(tmp_path: Path) -> None:
    with open_atomic(tmp_path / "new") as first, open_atomic(tmp_path / "new") as second:
        first.write(b"same")
        second.write(b"same")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("new", b"same")]
