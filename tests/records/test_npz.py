"""NPZ files read and written some rows at a time: what NumPy reads and writes, and nothing else."""

from __future__ import annotations

import io
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.records import npz
from app.records.npz import open_matrices, write_matrices
from settings.errors import InputError


def whole(path: Path, *names: str, rows_at_once: int = 3) -> dict[str, np.ndarray]:
    """The members, read in turn."""
    with open_matrices(path, required=names, optional=()) as matrices:
        num_rows = {m.shape[0] for m in matrices.values()}.pop()
        counts = [min(rows_at_once, num_rows - first) for first in range(0, num_rows, rows_at_once)]
        parts = [{name: matrix.read_rows(count) for name, matrix in matrices.items()} for count in counts]
    return {name: np.concatenate([part[name] for part in parts]) for name in names}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("dtype", ["<f4", ">f8", "f2", "i8", "u1", "?"])
def test_rows_read_in_windows_are_those_that_numpy_saved(tmp_path: Path, save: Any, dtype: str) -> None:
    a = np.arange(70).reshape(10, 7).astype(dtype)
    b = np.arange(30).reshape(10, 3).astype(dtype)
    save(tmp_path / "x.npz", a=a, b=b)
    read = whole(tmp_path / "x.npz", "a", "b")
    np.testing.assert_array_equal(read["a"], a)
    np.testing.assert_array_equal(read["b"], b)


def test_what_is_written_in_windows_numpy_loads(tmp_path: Path) -> None:
    a, b = np.arange(40, dtype=np.float32).reshape(2, 10, 2)
    with write_matrices(tmp_path / "x.npz", ("a", "b"), (10, 2)) as output:
        for first in range(0, 10, 4):
            output.write_rows(a=a[first : first + 4], b=b[first : first + 4])
    with np.load(tmp_path / "x.npz", allow_pickle=False) as loaded:
        assert list(loaded) == ["a", "b"]
        assert loaded["a"].dtype == loaded["b"].dtype == np.float32
        np.testing.assert_array_equal(loaded["a"], a)
        np.testing.assert_array_equal(loaded["b"], b)
    assert [path.name for path in tmp_path.iterdir()] == ["x.npz"]


def test_a_failure_half_way_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(b"old")

    def fail_half_way() -> None:
        with write_matrices(tmp_path / "x.npz", ("a", "b"), (10, 2)) as output:
            output.write_rows(a=np.ones((4, 2), np.float32), b=np.ones((4, 2), np.float32))
            raise InputError("row 4")

    with pytest.raises(InputError, match="row 4"):
        fail_half_way()
    assert [path.name for path in tmp_path.iterdir()] == ["x.npz"]
    assert (tmp_path / "x.npz").read_bytes() == b"old"


def test_memory_is_that_of_a_window_and_not_of_the_file(tmp_path: Path) -> None:
    shape, rows_at_once = (2048, 512), 32
    np.savez(tmp_path / "in.npz", a=np.zeros(shape, np.float32))
    window_bytes = rows_at_once * shape[1] * 4
    tracemalloc.start()
    with (
        open_matrices(tmp_path / "in.npz", required=("a",), optional=()) as matrices,
        write_matrices(tmp_path / "out.npz", ("a", "b"), shape) as output,
    ):
        for _ in range(shape[0] // rows_at_once):
            rows = matrices["a"].read_rows(rows_at_once)
            output.write_rows(a=rows, b=rows)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert window_bytes < peak < 40 * window_bytes < (tmp_path / "in.npz").stat().st_size


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def archive(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return path


class Trap:
    """Says so when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (pytest.fail, ("unpickled",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (npy(np.array([[Trap()]])), "a: an array of Python objects, which only unpickling could read"),
        (npy(np.array([["text"]])), "a: expected floats, integers or booleans, got dtype <U4"),
        (npy(np.array([[1j]])), "got dtype complex128"),
        (npy(np.zeros(3)), r"a: expected two dimensions \[B, T\], got shape \[3\]"),
        (npy(np.zeros((3, 2)))[:-8], r"a: shape \[3, 2\] of float64 takes 48 bytes, and the file holds 40"),
        (npy(np.zeros((3, 2))).replace(b"(3, 2)", b"(9, 9)"), "takes 648 bytes, and the file holds 48"),
        (b"no array", "a: damaged: "),
        (b"", "a: damaged: "),
    ],
)
def test_what_is_no_matrix_of_numbers_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = archive(tmp_path / "x.npz", a=content)
    with pytest.raises(InputError, match=message):
        whole(path, "a")


def test_a_missing_member_is_named_beside_those_that_are_there(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.zeros((1, 1)), b=np.zeros((1, 1)))
    with pytest.raises(InputError, match=r"x\.npz: missing c and d; it holds a, b"):
        whole(tmp_path / "x.npz", "a", "c", "d")


def test_what_is_no_npz_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(npy(np.zeros((1, 1))))
    with pytest.raises(InputError, match="no NPZ file"):
        whole(tmp_path / "x.npz", "a")


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.npz", a=npy(np.zeros((3, 2))))
    content = bytearray(path.read_bytes())
    content[content.index(b"\x93NUMPY") + 130] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match="a: damaged: Bad CRC"):
        whole(path, "a")


def test_a_matrix_stored_by_columns_is_read_unless_it_is_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = np.arange(70.0).reshape(10, 7)
    np.savez(tmp_path / "x.npz", a=np.asfortranarray(a))
    np.testing.assert_array_equal(whole(tmp_path / "x.npz", "a")["a"], a)
    monkeypatch.setattr(npz, "MAX_FORTRAN_BYTES", 559)
    with pytest.raises(InputError, match=r"a: stored in Fortran order.* its 560 bytes are too many"):
        whole(tmp_path / "x.npz", "a")
