"""Tests of NPZ files for `grpo gae`: files that numpy saves, and errors for all others."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.stages.gae import WrittenAdvantages
from app.stages.gae_npz import GaeMatrixFile, check_finite, load_matrices
from settings import load
from settings.errors import InputError


@pytest.mark.parametrize(("save", "dtype"), [(np.savez, "<f4"), (np.savez_compressed, ">f8"), (np.savez, "?")])
def test_matrices_are_those_that_numpy_saved(tmp_path: Path, save: Any, dtype: str) -> None:
    rewards, values = np.arange(70).reshape(10, 7).astype(dtype), np.arange(80).reshape(10, 8).astype(dtype)
    save(tmp_path / "x.npz", rewards=rewards, values=values)
    loaded = load_matrices(tmp_path / "x.npz")
    np.testing.assert_array_equal(loaded["rewards"], rewards)
    np.testing.assert_array_equal(loaded["values"], values)


def test_matrices_that_are_stored_by_columns_give_the_same_file(tmp_path: Path) -> None:
    rewards, values = np.random.default_rng(0).standard_normal((2, 9, 300), np.float32)
    outputs = []
    for store in (np.ascontiguousarray, np.asfortranarray):
        np.savez(tmp_path / "in.npz", rewards=store(rewards), values=values)
        file = GaeMatrixFile(tmp_path / "in.npz", load(None, [], {}).settings)
        file.check()
        file.write(tmp_path / "out.npz", WrittenAdvantages(None))
        outputs.append((tmp_path / "out.npz").read_bytes())
    assert outputs[0] == outputs[1]


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
    """An object that fails the test if it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (pytest.fail, ("unpickled",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (npy(np.array([[Trap()]])), "Object arrays cannot be loaded when allow_pickle=False"),
        (npy(np.array([["text"]])), r"rewards: expected numbers or booleans of shape \[B, T\], got <U4"),
        (npy(np.zeros(3)), r"got float64 of shape \[3\]"),
        (npy(np.zeros((3, 2))).replace(b"(3, 2)", b"(9, 9)"), "expected an NPZ file"),
        (b"no array", r"got \|S8 of shape \[1\]"),
    ],
)
def test_what_is_no_matrix_of_numbers_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = archive(tmp_path / "x.npz", rewards=content, values=npy(np.zeros((3, 2))))
    with pytest.raises(InputError, match=message):
        load_matrices(path)


@pytest.mark.parametrize("content", [b"", b"no file of arrays", npy(np.zeros((1, 1)))])
def test_what_is_no_npz_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(InputError, match="expected an NPZ file"):
        load_matrices(tmp_path / "x.npz")


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.npz", rewards=npy(np.zeros((3, 2))), values=npy(np.zeros((3, 2))))
    content = bytearray(path.read_bytes())
    content[content.index(b"\x93NUMPY") + 130] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match="Bad CRC"):
        load_matrices(path)


def test_large_numbers_whose_sum_is_infinite_are_numbers() -> None:
    check_finite("rewards", np.full((2, 3), 3e38, np.float32))
