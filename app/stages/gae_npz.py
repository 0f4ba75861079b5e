"""`grpo gae` on an NPZ file: some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from jaxtyping import Bool

from app.advantage.gae.input_checks import check_finite, check_inputs, check_shapes
from app.advantage.token_advantages import TokenAdvantages, TokenRows
from app.records.moments import Moments, compute_moments, merge_moments
from app.records.npz import NpzMatrix, open_matrices, write_matrices
from app.runtime.advantages import make_gae
from app.stages.gae_summary import AdvantageTransform, GaeSummary, ProgressPrinter, check_trainable, choose_gae_backend
from settings import Settings
from settings.errors import InputError

WINDOW_TOKENS = 1 << 21
"""Of a window: an array of it takes 8 MiB. A single row may have more."""


class GaeMatrixFile:
    """`rewards` [B, T], `values` [B, T] or [B, T+1] and perhaps `mask` [B, T] in an NPZ file."""

    has_logprobs = False

    def __init__(self, path: Path, settings: Settings, *, window_tokens: int = WINDOW_TOKENS) -> None:
        self.summary = GaeSummary("rows")
        self._path = path
        self._algorithm = settings.algorithm
        self._gae = make_gae(settings)
        self._window_tokens = window_tokens
        self._progress = ProgressPrinter()

    def check(self) -> None:
        """Reads all of it.

        Raises:
            InputError: matrices that are damaged, disagree in shape or hold what is no number, or a mask of none.
        """
        algorithm = self._algorithm
        num_rows = num_tokens = num_trainable = 0
        for rows in self._windows():
            with self._errors_with_path():
                check_inputs(
                    rows.rewards,
                    rows.values,
                    gamma=algorithm.gamma,
                    lam=algorithm.lam,
                    mask=rows.mask,
                    mask_mode=algorithm.mask_mode,
                    chunk_size=algorithm.gae_chunk_size,
                    first_row=num_rows,
                )
            num_rows += len(rows.rewards)
            num_tokens += rows.rewards.size
            num_trainable += rows.rewards.size if rows.mask is None else int(rows.mask.sum())
            self._progress.print_line(f"checked {num_rows:,} rows")
        check_trainable(self._path, "rows", num_rows=num_rows, num_tokens=num_tokens, num_trainable=num_trainable)

    def advantage_moments(self) -> Moments:
        """Over the tokens of the mask, in the whole file."""
        return merge_moments(compute_moments(credit.advantages, mask) for credit, mask in self._advantage_windows())

    def write(self, out: Path, transform: AdvantageTransform) -> None:
        """Writes `advantages` and `returns`, [B, T] float32.

        Raises:
            InputError: numbers that are too large; nothing is written.
        """
        with self._open() as matrices:
            shape = matrices["rewards"].shape
        with write_matrices(out, ("advantages", "returns"), shape) as output:
            for credit, mask in self._advantage_windows():
                advantages = transform(credit.advantages, mask)
                output.write_rows(advantages=advantages, returns=credit.returns)
                self.summary.add(advantages, credit.returns, mask, num_rows=len(mask))
                if self.summary.num_rows < shape[0]:
                    self._progress.print_line(f"estimated {self.summary.num_rows:,} of {shape[0]:,} rows")

    def _advantage_windows(self) -> Iterator[tuple[TokenAdvantages, Bool[np.ndarray, "B T"]]]:
        first_row = 0
        for rows in self._windows():
            credit = self._gae(rows) if rows.rewards.size else TokenAdvantages(*[rows.rewards] * 2)
            for name, array in credit._asdict().items():
                with self._errors_with_path():
                    check_finite(name, array, first_row=first_row, hint="the inputs are too large for float32")
            first_row += len(rows.rewards)
            if self.summary.choice is None:
                self.summary.choice = choose_gae_backend(
                    self._algorithm, rows.rewards.shape, is_masked=rows.mask is not None
                )
            yield credit, np.ones(rows.rewards.shape, bool) if rows.mask is None else rows.mask

    def _windows(self) -> Iterator[TokenRows]:
        """Rows of at most `window_tokens` tokens, or one row where that has more, from the first to the last."""
        with self._open() as matrices:
            num_rows, num_tokens = matrices["rewards"].shape
            size = max(1, self._window_tokens // max(num_tokens, 1))
            for first in range(0, num_rows, size):
                rows = {name: matrix.read_rows(min(size, num_rows - first)) for name, matrix in matrices.items()}
                mask = as_mask(rows["mask"], matrices["mask"].where, first) if "mask" in rows else None
                with np.errstate(over="ignore"):  # an infinity in float32 is looked for by the check
                    rewards, values = (rows[name].astype(np.float32, copy=False) for name in ("rewards", "values"))
                counts = np.full((len(rewards), 1), num_tokens) if mask is None else mask.sum(axis=1, keepdims=True)
                yield TokenRows(rewards, values, np.broadcast_to(counts.astype(np.float32), rewards.shape), mask)

    @contextmanager
    def _open(self) -> Iterator[dict[str, NpzMatrix]]:
        with open_matrices(self._path, required=("rewards", "values"), optional=("mask",)) as matrices:
            if matrices["values"].dtype == bool:
                raise InputError(f"{matrices['values'].where}: expected numbers, got dtype bool; is it the mask?")
            mask = matrices.get("mask")
            with self._errors_with_path():
                check_shapes(matrices["rewards"].shape, matrices["values"].shape, mask.shape if mask else None)
            yield matrices

    @contextmanager
    def _errors_with_path(self) -> Iterator[None]:
        try:
            yield
        except InputError:
            raise
        except ValueError as error:
            raise InputError(f"{self._path}: {error}") from None


def as_mask(numbers: np.ndarray, where: str, first_row: int) -> Bool[np.ndarray, "B T"]:
    """Raises InputError where they are not 0 and 1."""
    if numbers.dtype == bool:
        return numbers
    other = (numbers != 0) & (numbers != 1)
    if other.any():
        row, index = np.argwhere(other)[0]
        raise InputError(f"{where}: row {first_row + row}, index {index} is {numbers[row, index]}, expected 0 or 1")
    return numbers.astype(bool)
