"""What `grpo gae --bench` has measured: as a table, as the panels of a picture, and in a sentence for each shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from app.report.gae_benchmark_plot import BenchmarkPanel, PlottedTiming

MAX_CALL_S = 2.0
"""Slower cases are left out: twenty repeats would take most of a minute."""
BYTES_PER_TOKEN = 16
"""Reward and value in, advantage and return out, float32; a mask is one more."""
MIN_SPEEDUP = 1.1
"""Times as fast from which on it is a difference: medians of a shared machine vary by less."""


@dataclass(frozen=True)
class BackendTiming:
    """One backend on one shape; times are of a warm call."""

    shape: str
    decay: str
    """`scalar`, or `masked`: a decay of each token."""
    backend: str
    chunk_size: int | None
    is_auto: bool
    """What `auto` takes for this shape and decay."""
    first_call_s: float
    """Tracing and compiling, less a warm call."""
    median_s: float | None
    """None where a call took longer than is waited for."""
    p90_s: float | None
    num_repeats: int
    gb_per_s: float | None
    percent_of_copy: float | None
    """100 = as many bytes a second as a copy, measured in turn with it."""
    max_error: float
    """Of advantages and returns of some rows against float64, over max(1, max |A|)."""


@dataclass(frozen=True)
class CopyTiming:
    """A pass that reads two matrices of the shape and writes two."""

    shape: str
    median_s: float
    p90_s: float
    gb_per_s: float


@dataclass(frozen=True)
class BenchmarkReport:
    machine: dict[str, Any]
    settings: dict[str, Any]
    method: dict[str, Any]
    copies: tuple[CopyTiming, ...]
    cases: tuple[BackendTiming, ...]
    conclusion: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        head = f"{self.machine['device']}, {self.machine['cpu_cores']} CPU cores, jax {self.machine['jax']}"
        return "\n".join([head, "", *self._table(), "", *self._notes(), "", self.conclusion])

    def _table(self) -> list[str]:
        table = [_HEADINGS]
        for copied in self.copies:
            times = (f"{1e3 * copied.median_s:.3f}", f"{1e3 * copied.p90_s:.3f}", f"{copied.gb_per_s:.1f}")
            table.append((copied.shape, "", "copy", "", "", *times, "100", ""))
            table += [_cells(case) for case in self.cases if case.shape == copied.shape]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return ["  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in table]

    def _notes(self) -> list[str]:
        method = self.method
        return [
            f"* what auto takes; {method['repeats']} warm repeats, cases in turn; {method['timing']}, arrays "
            f"{method['arrays']}; {BYTES_PER_TOKEN} bytes a token count, with a mask {BYTES_PER_TOKEN + 1}; max error "
            f"against float64 on {method['checked_rows']} rows, over max(1, max |A|)"
        ]


_HEADINGS = (
    *("shape", "decay", "backend", "chunk", "compile s", "median ms", "p90 ms", "GB/s", "% of copy", "max error"),
)


def _cells(case: BackendTiming) -> tuple[str, ...]:
    name = f"{case.backend}{'*' if case.is_auto else ''}"
    chunk = "" if case.chunk_size is None else str(case.chunk_size)
    first = (case.shape, case.decay, name, chunk, f"{case.first_call_s:.2f}")
    if case.median_s is None or case.p90_s is None:
        return (*first, f"> {1e3 * MAX_CALL_S:.0f}", "", "", "", f"{case.max_error:.0e}")
    times = (f"{1e3 * case.median_s:.3f}", f"{1e3 * case.p90_s:.3f}")
    return (*first, *times, f"{case.gb_per_s:.1f}", f"{case.percent_of_copy:.0f}", f"{case.max_error:.0e}")


def conclusion(cases: Sequence[BackendTiming]) -> str:
    """Whether chunks pay, shape by shape, and whether `auto` takes the best."""
    parts = []
    for shape, of_shape in groupby(cases, key=lambda case: case.shape):
        for decay, of_decay in groupby(of_shape, key=lambda case: case.decay):
            parts.append(f"{shape} {_DECAY_TEXT[decay]}: {_verdict(list(of_decay))}")
    return "\n".join(parts)


_DECAY_TEXT = {"scalar": "with one decay", "masked": "with a mask"}


def _verdict(cases: Sequence[BackendTiming]) -> str:
    chunked = min((c for c in cases if c.chunk_size is not None), key=_median_seconds, default=None)
    other = min((c for c in cases if c.chunk_size is None), key=_median_seconds, default=None)
    best = min(cases, key=_median_seconds)
    auto = next((c for c in cases if c.is_auto), None)
    return f"{_describe_chunking(chunked, other)}; {_describe_auto(auto, best)}."


def _describe_chunking(chunked: BackendTiming | None, other: BackendTiming | None) -> str:
    """Of the best cases with chunks and without."""
    if chunked is None or chunked.median_s is None:
        return f"chunk-scan does not pay, it takes over {MAX_CALL_S:g} s"
    if other is None or other.median_s is None:
        return f"chunk-scan pays, in chunks of {chunked.chunk_size}: the others take over {MAX_CALL_S:g} s"
    ratio = other.median_s / chunked.median_s
    if ratio >= MIN_SPEEDUP:
        return f"chunk-scan pays, in chunks of {chunked.chunk_size}: {ratio:.1f} x as fast as {other.backend}"
    if ratio <= 1 / MIN_SPEEDUP:
        at_its_best = f"chunk-scan at its best, in chunks of {chunked.chunk_size}"
        return f"chunk-scan does not pay, {other.backend} is {1 / ratio:.1f} x as fast as {at_its_best}"
    return f"chunk-scan makes no difference, in chunks of {chunked.chunk_size} it takes as long as {other.backend}"


def _describe_auto(auto: BackendTiming | None, best: BackendTiming) -> str:
    if auto is None:
        return "auto takes another"
    if auto.median_s is None or best.median_s is None:
        return f"auto takes {_case_name(auto)}, over {MAX_CALL_S:g} s"
    told = f"auto takes {_case_name(auto)} ({1e3 * auto.median_s:.3g} ms)"
    ratio = auto.median_s / best.median_s
    if ratio < MIN_SPEEDUP:
        return told
    options = f"--backend {best.backend}{'' if best.chunk_size is None else f' --chunk-size {best.chunk_size}'}"
    return f"{told}, {ratio:.1f} x slower than the best: take {options}"


def _case_name(case: BackendTiming) -> str:
    return case.backend if case.chunk_size is None else f"{case.backend} in chunks of {case.chunk_size}"


def _median_seconds(case: BackendTiming) -> float:
    return math.inf if case.median_s is None else case.median_s


def speed_panels(report: BenchmarkReport) -> list[BenchmarkPanel]:
    """What is drawn, a panel for each shape and decay."""
    copy_s = {copied.shape: copied.median_s for copied in report.copies}
    drawn = []
    for (shape, decay), of_panel in groupby(report.cases, key=lambda case: (case.shape, case.decay)):
        speeds = tuple(
            PlottedTiming(c.backend, c.chunk_size, c.median_s, c.p90_s, c.is_auto)
            for c in of_panel
            if c.median_s is not None and c.p90_s is not None
        )
        rows, tokens = map(int, shape.split("x"))
        drawn.append(BenchmarkPanel(rows, tokens, decay, copy_s[shape], speeds))
    return drawn
