"""`grpo gae`: advantages and returns of a file of samples or matrices, window by window, never all of it in memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

from app.advantage.gae.choice import Choice
from app.batching.ladder import rung
from app.jsonl import check_output, read_jsonl, write_jsonl
from app.masked import NOTHING, Moments, merged, moments, whiten
from app.mesh import topology
from app.npz_file import Matrix, open_matrices, replacing_matrices
from app.sample_records import Steps, steps_from_record
from app.training.gae_estimator import Estimator, HostCredit, Window
from app.training.metrics import CompilationCounter, peak_memory_bytes
from settings import Resolved
from settings.errors import InputError

NPZ = ".npz"
MATRIX_TOKENS = 1 << 21
"""Of a window of an NPZ file: an array of it takes 8 MiB. A single row may have more."""
SAMPLE_TOKENS = 1 << 17
"""Of a window of samples, whose records take some hundred bytes a token. A single sample may have more."""
SMALLEST_ROW = 1024
"""Tokens of a row of samples: shorter windows are padded to it, so that few lengths are compiled."""
MAX_SAMPLES = 4096
"""Of a window, however short they are."""


def estimate(resolved: Resolved, *, input: Path, out: Path) -> dict[str, Any]:
    """Writes `input` with advantages and returns to `out`, in the same format, and returns the figures to be shown.

    Raises:
        InputError: settings, samples, matrices or output file that cannot be used.
    """
    if (input.suffix == NPZ) != (out.suffix == NPZ):
        raise InputError(
            f"--out: expected the format of --input, {input.name}, got {out.name}; name both *{NPZ} or none"
        )
    check_output(out)
    if input.exists() and not input.is_file():
        raise InputError(f"--input: {input} is no file")
    topology.start(resolved.settings.mesh)
    kind = MatrixFile if input.suffix == NPZ else SampleFile
    file = kind(input, Estimator.of(resolved.settings))
    start = time.perf_counter()
    with closing(CompilationCounter()) as compilations:
        # All advantages are known before the first is whitened: the file is gone through twice.
        over = file.advantage_moments() if resolved.settings.algorithm.whiten_advantages else None
        file.write(out, whitener(over))
    seconds = time.perf_counter() - start
    return {
        **file.tally.figures(file.estimator),
        "whitened": over is not None,
        "compiling seconds": round(compilations.seconds, 2),
        "seconds": round(seconds, 2),
        "tokens/s": round(file.tally.num_tokens / max(seconds, 1e-9)),
        "peak memory MiB": round(peak_memory_bytes() / 2**20),
        "written to": str(out),
    }


Finish = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(advantages, mask) -> the advantages that are written."""


def whitener(over: Moments | None) -> Finish:
    """To mean 0 and variance 1 over the file's tokens, or, without moments, as they are."""
    if over is None:
        return lambda advantages, mask: advantages
    return lambda advantages, mask: whiten(advantages, mask, over)


@dataclass
class Tally:
    """What has gone by."""

    rows: str
    """What the rows are called."""
    num_rows: int = 0
    num_tokens: int = 0
    num_trainable: int = 0
    num_windows: int = 0
    advantages: Moments = NOTHING
    returns: Moments = NOTHING
    choice: Choice | None = None

    def count(self, credit: HostCredit, mask: Bool[np.ndarray, "B T"], *, num_rows: int) -> None:
        self.num_windows += 1
        self.num_rows += num_rows
        self.num_tokens += mask.size
        self.num_trainable += int(mask.sum())
        self.advantages = merged([self.advantages, moments(credit.advantages, mask)])
        self.returns = merged([self.returns, moments(credit.returns, mask)])

    def check(self, path: Path) -> None:
        """Raises InputError where no token counts."""
        if self.num_tokens and not self.num_trainable:
            raise InputError(
                f"{path}: the mask of all {self.num_rows:,} {self.rows} is False throughout; nothing to credit"
            )

    def figures(self, estimator: Estimator) -> dict[str, Any]:
        lam = estimator.lam
        if (alpha := estimator.length_adaptive_lam) is not None:
            lam = f"1 - 1 / ({alpha} x tokens)"
        figures: dict[str, Any] = {
            self.rows: self.num_rows,
            "tokens": self.num_tokens,
            "trainable tokens": self.num_trainable,
            "gamma": estimator.gamma,
            "lambda": lam,
        }
        if estimator.critic_lam is not None:
            figures["lambda of returns"] = estimator.critic_lam
        figures["mask mode"] = estimator.mask_mode
        if self.choice is not None:
            figures["backend"] = f"{self.choice.backend} ({self.choice.why})"
        return figures | {
            "windows": self.num_windows,
            "mean advantage": round(self.advantages.mean, 6),
            "std of advantages": round(self.advantages.population_std, 6),
            "mean return": round(self.returns.mean, 6),
            "std of returns": round(self.returns.population_std, 6),
        }


class MatrixFile:
    """`rewards` [B, T], `values` [B, T] or [B, T+1] and perhaps `mask` [B, T] in an NPZ file."""

    def __init__(self, path: Path, estimator: Estimator, *, window_tokens: int = MATRIX_TOKENS) -> None:
        self.estimator = estimator
        self.tally = Tally("rows")
        self._path = path
        self._window_tokens = window_tokens

    def advantage_moments(self) -> Moments:
        """Over the tokens of the mask, in the whole file."""
        with open_matrices(self._path, required=("rewards", "values"), optional=("mask",)) as matrices:
            credits = (moments(credit.advantages, mask) for credit, mask in self._credits(matrices, Tally("rows")))
            return merged(credits)

    def write(self, out: Path, finish: Finish) -> None:
        """Writes `advantages` and `returns`, [B, T] float32.

        Raises:
            InputError: matrices that are damaged, disagree in shape or hold what is no number; nothing is written.
        """
        with open_matrices(self._path, required=("rewards", "values"), optional=("mask",)) as matrices:
            check_shapes(matrices)
            shape = matrices["rewards"].shape
            with replacing_matrices(out, ("advantages", "returns"), shape) as output:
                for credit, mask in self._credits(matrices, self.tally):
                    output.write_rows(advantages=finish(credit.advantages, mask), returns=credit.returns)
                self.tally.check(self._path)

    def _credits(
        self, matrices: dict[str, Matrix], tally: Tally
    ) -> Iterator[tuple[HostCredit, Bool[np.ndarray, "B T"]]]:
        check_shapes(matrices)
        for first, window in matrix_windows(
            matrices, self._window_tokens, reads_masked=self.estimator.reads_where_masked()
        ):
            credit = self.estimator.credit(window) if window.rewards.size else HostCredit(*[window.rewards] * 2)
            mask = np.ones(window.rewards.shape, bool) if window.mask is None else window.mask
            for name, array in credit._asdict().items():
                check_finite(f"{self._path}: {name}", array, first, hint="the inputs are too large for float32")
            tally.choice = tally.choice or self.estimator.choice(window)
            tally.count(credit, mask, num_rows=len(mask))
            yield credit, mask


def check_shapes(matrices: dict[str, Matrix]) -> None:
    """Raises InputError where values or mask do not belong to the rewards."""
    rewards = matrices["rewards"]
    num_rows, num_tokens = rewards.shape
    allowed = {"values": ((num_rows, num_tokens), (num_rows, num_tokens + 1)), "mask": ((num_rows, num_tokens),)}
    for name, shapes in allowed.items():
        if name in matrices and matrices[name].shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise InputError(
                f"{matrices[name].where}: shape {list(matrices[name].shape)} beside rewards of shape "
                f"{list(rewards.shape)}, expected {expected}"
            )


def matrix_windows(
    matrices: dict[str, Matrix], window_tokens: int, *, reads_masked: bool
) -> Iterator[tuple[int, Window]]:
    """(number of its first row, window) of at most `window_tokens` tokens, or one row where that has more.

    Raises:
        InputError: damage, a NaN or infinity that would be read, or a mask of other numbers than 0 and 1.
    """
    num_rows, num_tokens = matrices["rewards"].shape
    size = max(1, window_tokens // max(num_tokens, 1))
    for first in range(0, num_rows, size):
        rows = {name: matrix.read_rows(min(size, num_rows - first)) for name, matrix in matrices.items()}
        mask = _as_mask(rows["mask"], matrices["mask"].where, first) if "mask" in rows else None
        with np.errstate(over="ignore"):  # an infinity in float32 is looked for below
            rewards, values = (rows[name].astype(np.float32) for name in ("rewards", "values"))
        read = None if mask is None or reads_masked else mask
        check_finite(matrices["rewards"].where, rewards, first, read=read)
        check_finite(matrices["values"].where, values, first, read=read)
        counts = np.full((len(rewards), 1), num_tokens) if mask is None else mask.sum(axis=1, keepdims=True)
        lengths = np.broadcast_to(counts.astype(np.float32), rewards.shape)
        yield first, Window(rewards, values, mask, lengths)


def _as_mask(numbers: np.ndarray, where: str, first_row: int) -> Bool[np.ndarray, "B T"]:
    if numbers.dtype == bool:
        return numbers
    other = (numbers != 0) & (numbers != 1)
    if other.any():
        row, index = np.argwhere(other)[0]
        raise InputError(f"{where}: row {first_row + row}, index {index} is {numbers[row, index]}, expected 0 or 1")
    return numbers.astype(bool)


def check_finite(
    where: str,
    x: np.ndarray,
    first_row: int,
    *,
    read: np.ndarray | None = None,
    hint: str = "expected a finite float32",
) -> None:
    """Raises InputError that names the first NaN or infinity. Columns of `x` behind those of `read` are always read."""
    bad = ~np.isfinite(x)
    if read is not None:
        bad[:, : read.shape[1]] &= read
    if bad.any():
        row, index = np.argwhere(bad)[0]
        raise InputError(f"{where}: row {first_row + row}, index {index} is {x[row, index]}; {hint}")


class SampleFile:
    """Samples in a JSON Lines file."""

    def __init__(self, path: Path, estimator: Estimator, *, window_tokens: int = SAMPLE_TOKENS) -> None:
        self.estimator = estimator
        self.tally = Tally("samples")
        self._path = path
        self._window_tokens = window_tokens

    def advantage_moments(self) -> Moments:
        """Over the tokens that the policy wrote, in the whole file."""
        return merged(moments(c.advantages, mask) for c, mask, _ in self._credits(Tally("samples")))

    def write(self, out: Path, finish: Finish) -> None:
        """Writes every record as it came, with `advantages` and `returns`.

        Raises:
            InputError: a line that cannot be used, named; nothing is written.
        """
        write_jsonl(out, self._credited(finish))

    def _credited(self, finish: Finish) -> Iterator[dict[str, Any]]:
        for credit, mask, placed in self._credits(self.tally):
            advantages = finish(credit.advantages, mask)[0]
            start = 0
            for one in placed:
                own = slice(start, start + len(one.steps.rewards))
                yield one.record | {"advantages": advantages[own].tolist(), "returns": credit.returns[0, own].tolist()}
                start = own.stop
        if not self.tally.num_rows:
            raise InputError(f"--input: {self._path} holds no samples")
        self.tally.check(self._path)

    def _credits(self, tally: Tally) -> Iterator[tuple[HostCredit, Bool[np.ndarray, "1 T"], list[Placed]]]:
        for placed in sample_windows(placed_samples(self._path), self._window_tokens):
            window = packed([one.steps for one in placed])
            num_tokens = sum(len(one.steps.rewards) for one in placed)
            credit = HostCredit(*(x[:, :num_tokens] for x in self.estimator.credit(window)))
            assert window.mask is not None
            mask = window.mask[:, :num_tokens]
            self._check_finite(credit, placed)
            tally.choice = tally.choice or self.estimator.choice(window)
            tally.count(credit, mask, num_rows=len(placed))
            yield credit, mask, placed

    def _check_finite(self, credit: HostCredit, placed: list[Placed]) -> None:
        if all(np.isfinite(part).all() for part in credit):
            return
        # An infinity spreads over its whole row: whose it is shows where every sample has a row of its own.
        for one in placed:
            if not all(np.isfinite(part).all() for part in self.estimator.credit(packed([one.steps]))):
                raise InputError(f"{one.where}: rewards or values are too large: its advantages leave float32")


class Placed(NamedTuple):
    """A sample, and where it stands in its file."""

    where: str
    record: dict[str, Any]
    steps: Steps


def placed_samples(path: Path) -> Iterator[Placed]:
    """The samples of a file, in order.

    Raises:
        InputError: a line that cannot be used, named.
    """
    for line, record in read_jsonl(path):
        where = f"{path}:{line}"
        yield Placed(where, record, steps_from_record(record, where=where))


def sample_windows(samples: Iterable[Placed], window_tokens: int) -> Iterator[list[Placed]]:
    """Neighbouring samples of at most `window_tokens` tokens together, or one that has more."""
    window: list[Placed] = []
    num_tokens = 0
    for one in samples:
        length = len(one.steps.rewards)
        if window and (num_tokens + length > window_tokens or len(window) == MAX_SAMPLES):
            yield window
            window, num_tokens = [], 0
        window.append(one)
        num_tokens += length
    if window:
        yield window


def packed(samples: list[Steps]) -> Window:
    """Samples one behind the other in a single row, padded to a rung of a ladder with tokens that nobody wrote."""
    counts = np.array([len(one.rewards) for one in samples])
    num_tokens = int(counts.sum())
    padding = (0, rung(num_tokens, smallest=SMALLEST_ROW) - num_tokens)

    def row(parts: Iterable[np.ndarray]) -> np.ndarray:
        return np.pad(np.concatenate(list(parts)), padding)[None]

    ends = np.zeros((1, num_tokens + padding[1]), bool)
    bootstrap = np.zeros(ends.shape, np.float32)
    last = np.cumsum(counts)[counts > 0] - 1
    ends[0, last] = True
    bootstrap[0, last] = np.array([one.bootstrap for one in samples], np.float32)[counts > 0]
    return Window(
        rewards=row(one.rewards for one in samples),
        values=row(one.values for one in samples),
        mask=row(one.mask for one in samples),
        lengths=row(np.full(len(one.mask), one.mask.sum(), np.float32) for one in samples),
        ends=ends,
        bootstrap=bootstrap,
    )
