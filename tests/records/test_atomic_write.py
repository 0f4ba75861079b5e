import os
import signal
from pathlib import Path

import numpy as np
import pytest

from app.records.atomic_write import create_folder_atomic, is_partial_file, open_atomic, write_atomic
from app.records.jsonl import write_jsonl
from tests.program import here, of_tiny, run_python, settings, succeeded


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_bytes(b"old")
    return path


def test_an_atomic_write_replaces_a_file_only_when_complete(path: Path) -> None:
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


def test_a_program_killed_during_a_write_leaves_the_old_file(path: Path) -> None:
    program = (
        "import os, signal, sys, pathlib\n"
        "from app.records.atomic_write import open_atomic\n"
        "with open_atomic(pathlib.Path(sys.argv[1])) as file:\n"
        "    file.write(b'x' * 1_000_000)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert run_python("-c", program, path).returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    (partial,) = set(path.parent.iterdir()) - {path}
    assert is_partial_file(partial, target=path)


def test_no_command_writes_its_output_in_place(tmp_path, monkeypatch, finished, sampled, tiny_model):
    monkeypatch.chdir(tmp_path)
    np.savez("in.npz", rewards=np.ones((1, 2)), values=np.ones((1, 2)))
    write_jsonl(Path("in.jsonl"), [{"values": [1.0, 2.0], "reward": 1.0}])
    outputs = ("a.npz", "a.jsonl", "bench.json", "bench.png", "scored.jsonl", "picture.png", "drawn.jsonl", "time.html")
    for name in outputs:
        Path(name).write_text("old")
        os.link(name, f"kept {name}")
    evaluated = (finished / "eval" / f"step_00000{step}.jsonl" for step in (0, 4))
    drawing = (*of_tiny(tiny_model), *settings("rollout.scheduler=adaptive"))
    for command in (
        *(("gae", "--input", f"in.{kind}", "--out", f"a.{kind}") for kind in ("npz", "jsonl")),
        ("gae", "--bench", "--shapes", "1x2", "--out", "."),
        ("score", "--role", "reward", "--input", sampled, "--out", "scored.jsonl"),
        ("evaluate", "--compare", *evaluated, "--picture", "picture.png"),
        ("rollout", *drawing, "--limit", "2", "--out", "drawn.jsonl", "--timeline", "time.html"),
    ):
        succeeded(here(*command, "--overwrite"))
    for name in outputs:
        assert Path(name).read_bytes() != b"old" == Path(f"kept {name}").read_bytes(), name


def test_an_atomically_created_folder_appears_only_when_complete(tmp_path: Path) -> None:
    new = tmp_path / "new"
    with create_folder_atomic(new) as folder:
        (folder / "a").write_text("a")
        assert list(tmp_path.iterdir()) == [folder] and is_partial_file(folder, target=new)
    assert list(tmp_path.iterdir()) == [new] and (new / "a").read_text() == "a"


def test_an_unfinished_folder_is_removed(tmp_path: Path) -> None:
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
