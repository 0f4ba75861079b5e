"""Computes GAE for the matrices of an NPZ file, which is loaded as a whole."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Shaped

from app.advantage.token_advantages import TokenAdvantages, TokenRows
from app.records.atomic_write import open_atomic
from app.runtime.advantages import make_gae
from settings import Settings
from settings.errors import InputError

UNREADABLE = (ValueError, EOFError, OSError, KeyError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""Exceptions that NumPy and zipfile raise for damaged archives and for files in other formats."""


class GaeMatrixFile:
    """Computes GAE for an NPZ file with `rewards` [B, T], `values` [B, T] or [B, T+1], and optionally `mask` [B, T]."""

    ROW_NAME = "rows"

    def __init__(self, path: Path, settings: Settings, *, backend: str = "numpy", mask_mode: str = "skip") -> None:
        self._path = path
        self._mask_mode = mask_mode
        self._gae = make_gae(settings, backend=backend, mask_mode=mask_mode)

    def check(self) -> tuple[int, int, int]:
        """Reads and checks the matrices; returns the numbers of rows, of tokens and of unmasked tokens.

        Raises:
            InputError: the matrices are damaged, inconsistent in shape or not finite.
        """
        rewards = self._rows.rewards
        return len(rewards), rewards.size, int(self._mask.sum())

    def estimates(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yields a single tuple: the advantages, the returns and the mask of all rows."""
        yield self._estimates.advantages, self._estimates.returns, self._mask

    def write(self, out: Path, finish: Callable[..., np.ndarray]) -> None:
        """Writes `advantages` and `returns`, [B, T] float32.

        Args:
            finish: returns the advantages to write, possibly whitened; see `WrittenAdvantages`.

        Raises:
            InputError: advantages or returns exceed float32; nothing is written.
        """
        returns = self._estimates.returns
        advantages = finish(self._estimates.advantages, returns, self._mask)
        with open_atomic(out) as file:
            np.savez(file, advantages=advantages, returns=returns)

    def read_rows(self) -> TokenRows:
        """Returns the matrices as rows of tokens, each of which is a complete sample."""
        rows = self._rows
        return rows._replace(values=rows.values[:, : rows.rewards.shape[1]])

    @cached_property
    def _rows(self) -> TokenRows:
        arrays, where = load_matrices(self._path), str(self._path)
        rewards, values, mask = arrays["rewards"], arrays["values"], arrays.get("mask")
        if values.dtype == bool:
            raise InputError(f"{where}: values: expected numbers, got dtype bool; save the mask as `mask`")
        shape = rewards.shape
        for name, allowed in (("values", (shape, (shape[0], shape[1] + 1))), ("mask", (shape,))):
            if name in arrays and arrays[name].shape not in allowed:
                expected = " or ".join(str(list(one)) for one in allowed)
                raise InputError(
                    f"{where}: {name}: shape {list(arrays[name].shape)} does not match rewards of shape "
                    f"{list(shape)}, expected {expected}"
                )
        if mask is not None:
            if ((mask != 0) & (mask != 1)).any():
                row, index = np.argwhere((mask != 0) & (mask != 1))[0]
                raise InputError(f"{where}: mask: row {row}, index {index} is {mask[row, index]}, expected 0 or 1")
            mask = mask.astype(bool)
        # Masked tokens may have any value in the modes that do not read them.
        read_mask = None if self._mask_mode == "through" else mask
        check_finite(f"{where}: rewards", rewards, read_mask=read_mask)
        check_finite(f"{where}: values", values, read_mask=read_mask)
        with np.errstate(over="ignore"):  # Values at masked tokens may overflow.
            rewards, values = rewards.astype(np.float32), values.astype(np.float32)
        counts = np.full((len(rewards), 1), shape[1]) if mask is None else mask.sum(axis=1, keepdims=True)
        return TokenRows(rewards, values, np.broadcast_to(counts.astype(np.float32), shape), mask)

    @property
    def _mask(self) -> Bool[np.ndarray, "B T"]:
        rows = self._rows
        return np.ones(rows.rewards.shape, bool) if rows.mask is None else rows.mask

    @cached_property
    def _estimates(self) -> TokenAdvantages:
        rewards = self._rows.rewards
        estimates = self._gae(self._rows) if rewards.size else TokenAdvantages(rewards, rewards)
        for name, array in estimates._asdict().items():
            check_finite(f"{self._path}: {name}", array, hint="rewards or values are too large; scale them down")
        return estimates


def load_matrices(path: Path) -> dict[str, Shaped[np.ndarray, "B T"]]:
    """Loads `rewards`, `values` and, if present, `mask` from an NPZ file, without unpickling.

    Raises:
        InputError: the file is not an NPZ file, or an array is missing, damaged or not a matrix of numbers.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            names = ("rewards", "values", *(["mask"] if "mask" in archive else []))
            matrices = {name: np.ascontiguousarray(archive[name]) for name in names}
    except FileNotFoundError:
        raise InputError(f"{path.absolute()}: no such file; correct the path") from None
    except UNREADABLE as error:
        raise InputError(
            f"{path}: expected an NPZ file with rewards, values and, optionally, mask, as `np.savez` writes it: {error}"
        ) from error
    for name, array in matrices.items():
        if array.dtype.kind not in "fiub" or array.ndim != 2:
            raise InputError(
                f"{path}: {name}: expected numbers or booleans of shape [B, T], got {array.dtype} of shape "
                f"{list(array.shape)}"
            )
    return matrices


def check_finite(
    name: str,
    x: np.ndarray,
    *,
    read_mask: Bool[np.ndarray, "B T"] | None = None,
    hint: str = "expected a finite float32",
) -> None:
    """Raises InputError for the first NaN or infinity in an array.

    Args:
        name: name of the array in the error message.
        read_mask: True on the numbers to check; further columns are always checked. None checks all.
        hint: end of the error message.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        bad = ~np.isfinite(x.astype(np.float32, copy=False))
    if read_mask is not None:
        bad[:, : read_mask.shape[1]] &= read_mask
    if bad.any():
        row, column = np.argwhere(bad)[0].tolist()
        raise InputError(f"{name}: row {row}, index {column} is {x[row, column]}; {hint}")
