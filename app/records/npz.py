"""NPZ files larger than memory: matrices read and written some rows at a time, and nothing is ever unpickled."""

from __future__ import annotations

import math
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from jaxtyping import Float32, Shaped
from numpy.lib import format as npy

from app.records.atomic_write import open_atomic
from settings.errors import InputError

NUMERIC_KINDS = "fiub"
"""Kinds of NumPy types that are read: floats, signed and unsigned integers, booleans."""
MAX_FORTRAN_BYTES = 1 << 28
"""Of a matrix that is read whole, because it is stored column after column."""
HEADER_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


class NpzMatrix:
    """A member of an NPZ file, read from its first row to its last."""

    def __init__(self, where: str, info: zipfile.ZipInfo, stream: IO[bytes]) -> None:
        self.where = where
        """File and member, to open an error with."""
        self.shape, self.dtype, by_columns = _read_header(where, info, stream)
        self._stream = stream
        self._rows_left = self.shape[0]
        self._whole = self._read_columns() if by_columns else None

    def read_rows(self, count: int) -> Shaped[np.ndarray, "count T"]:
        """The next rows.

        Raises:
            InputError: the file is damaged.
        """
        assert count <= self._rows_left
        first = self.shape[0] - self._rows_left
        self._rows_left -= count
        if self._whole is not None:
            return np.ascontiguousarray(self._whole[first : first + count])
        return self._read(count * self.shape[1], is_last=not self._rows_left).reshape(count, self.shape[1])

    def _read_columns(self) -> Shaped[np.ndarray, "B T"]:
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        if num_bytes > MAX_FORTRAN_BYTES:
            raise InputError(
                f"{self.where}: stored in Fortran order, column after column, which cannot be read row by row, and its "
                f"{num_bytes:,} bytes are too many to be read at once; save np.ascontiguousarray of it"
            )
        return self._read(math.prod(self.shape), is_last=True).reshape(self.shape, order="F")

    def _read(self, count: int, *, is_last: bool) -> Shaped[np.ndarray, "count"]:
        num_bytes = count * self.dtype.itemsize
        with _explain_damage(self.where):
            content = self._stream.read(num_bytes)
            if is_last:
                self._stream.read(1)  # Only behind the last byte is the checksum compared.
        if len(content) != num_bytes:
            raise InputError(f"{self.where}: the file ends in the middle of the array")
        return np.frombuffer(content, self.dtype)


@contextmanager
def open_matrices(path: Path, *, required: Sequence[str], optional: Sequence[str]) -> Iterator[dict[str, NpzMatrix]]:
    """Matrices of an NPZ file by name, those of `optional` where they are there. Only headers are read so far.

    Raises:
        InputError: no NPZ file, a required member is absent, or a member is no matrix of numbers, or a large one in
            Fortran order.
    """
    with ExitStack() as stack:
        archive = stack.enter_context(_open_archive(path))
        members = {name.removesuffix(".npy"): name for name in archive.namelist() if name.endswith(".npy")}
        missing = [name for name in required if name not in members]
        if missing:
            raise InputError(f"{path}: missing {' and '.join(missing)}; it holds {', '.join(members) or 'no arrays'}")
        matrices = {}
        for name in (*required, *(name for name in optional if name in members)):
            where, info = f"{path}: {name}", archive.getinfo(members[name])
            with _explain_damage(where):
                stream = stack.enter_context(archive.open(info))
            matrices[name] = NpzMatrix(where, info, stream)
        yield matrices


@contextmanager
def write_matrices(path: Path, names: Sequence[str], shape: tuple[int, int]) -> Iterator[NpzMatrixWriter]:
    """Writes float32 matrices of one shape side by side; the file appears, whole, when the block ends without error."""
    with ExitStack() as stack:
        # Nameless: a killed program leaves nothing of them. Beside the output, where there is room for as much.
        later = {name: stack.enter_context(tempfile.TemporaryFile(dir=path.parent)) for name in names[1:]}
        file = stack.enter_context(open_atomic(path))
        with zipfile.ZipFile(file, "w") as archive:
            with _member(archive, names[0], shape) as first:
                writer = NpzMatrixWriter({names[0]: first, **later}, shape)
                yield writer
            assert not writer.rows_left, "fewer rows than promised"
            for name, content in later.items():
                content.seek(0)
                with _member(archive, name, shape) as member:
                    shutil.copyfileobj(content, member, 1 << 20)


class NpzMatrixWriter:
    """Takes the rows of all matrices, some at a time."""

    def __init__(self, streams: Mapping[str, IO[bytes]], shape: tuple[int, int]) -> None:
        self.rows_left, self._num_columns = shape
        self._streams = streams

    def write_rows(self, **rows: Float32[np.ndarray, "count T"]) -> None:
        """The next rows of every matrix, by name."""
        assert rows.keys() == self._streams.keys()
        (shape,) = {x.shape for x in rows.values()}
        assert shape[1] == self._num_columns and shape[0] <= self.rows_left
        self.rows_left -= shape[0]
        for name, x in rows.items():
            self._streams[name].write(np.ascontiguousarray(x, "<f4").data)


@contextmanager
def _member(archive: zipfile.ZipFile, name: str, shape: tuple[int, int]) -> Iterator[IO[bytes]]:
    # A ZipInfo of its own has no time stamp of today: the same arrays make the same file.
    with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
        npy.write_array_header_1_0(member, {"descr": "<f4", "fortran_order": False, "shape": shape})
        yield member


def _open_archive(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except FileNotFoundError:
        raise InputError(f"{path.absolute()}: no such file") from None
    except zipfile.BadZipFile as error:
        raise InputError(f"{path}: no NPZ file: {error}; `np.savez` writes them") from None
    except OSError as error:
        raise InputError(f"{path.absolute()}: cannot be read: {error.strerror}") from error


def _read_header(where: str, info: zipfile.ZipInfo, stream: IO[bytes]) -> tuple[tuple[int, int], np.dtype[Any], bool]:
    """Shape, type, and whether it is stored column after column."""
    with _explain_damage(where):
        version = npy.read_magic(stream)
        if version not in HEADER_READERS:
            raise InputError(f"{where}: expected an array of numbers, got version {version} of the NPY format")
        shape, fortran_order, dtype = HEADER_READERS[version](stream)
    if dtype.hasobject:
        raise InputError(f"{where}: an array of Python objects, which only unpickling could read; save it as float32")
    if dtype.kind not in NUMERIC_KINDS:
        raise InputError(f"{where}: expected floats, integers or booleans, got dtype {dtype}; save it as float32")
    if len(shape) != 2:
        raise InputError(f"{where}: expected two dimensions [B, T], got shape {list(shape)}")
    if info.file_size - stream.tell() != math.prod(shape) * dtype.itemsize:
        raise InputError(
            f"{where}: shape {list(shape)} of {dtype} takes {math.prod(shape) * dtype.itemsize:,} bytes, and the file "
            f"holds {info.file_size - stream.tell():,}"
        )
    return shape, dtype, fortran_order


@contextmanager
def _explain_damage(where: str) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
        raise InputError(f"{where}: damaged: {error}") from None
    except (NotImplementedError, RuntimeError) as error:  # compressed in an unknown way, or encrypted
        raise InputError(f"{where}: cannot be read: {error}") from None
