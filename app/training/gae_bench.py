"""`grpo gae --bench`: every backend and chunk size on this machine, against a copy of the same bytes."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from app.advantage.gae.choice import Choice, choose
from app.advantage.gae.estimate import BACKENDS, generalized_advantages
from app.jsonl import check_output
from app.mesh import topology
from app.report.gae_picture import Speed, SpeedPanel, speed_picture
from app.whole_file import write_whole
from settings import Resolved
from settings.errors import InputError
from settings.schema import Algorithm

DEFAULT_SHAPES = "16x8192,128x65536"
DEFAULT_FOLDER = Path("gae-bench")
CHUNK_SIZES = (64, 128, 256, 512)
WITH_CHUNKS = frozenset({"chunked"})
"""Backends whose speed depends on a chunk size."""
NUM_REPEATS = 20
SHORTEST_REPEAT_S = 1e-3
"""A repeat calls as often as fills this, so that the clock and the start of a call do not count."""
LONGEST_CALL_S = 2.0
"""Slower cases are left out: twenty repeats would take most of a minute."""
MAX_TOKENS = 1 << 30
MASKED_FRACTION = 0.1
NUM_CHECKED_ROWS = 2
"""Compared with float64: one step after another in Python, so not all rows."""
BYTES_PER_TOKEN = 16
"""Reward and value in, advantage and return out, float32."""


class Shape(NamedTuple):
    rows: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.tokens}"


@dataclass(frozen=True)
class Measured:
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
    """100 = as fast as a copy of the same bytes, measured in turn with it."""
    max_error: float
    """Of advantages and returns of the first rows against float64, over max(1, max |A|)."""


@dataclass(frozen=True)
class Copied:
    """A pass that reads and writes as many bytes."""

    shape: str
    median_s: float
    p90_s: float
    gb_per_s: float


@dataclass(frozen=True)
class BenchReport:
    machine: dict[str, Any]
    settings: dict[str, Any]
    method: dict[str, Any]
    copies: tuple[Copied, ...]
    cases: tuple[Measured, ...]
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
        rows, repeats = self.method["checked_rows"], self.method["repeats"]
        return [
            f"* what auto takes; {repeats} warm repeats, cases in turn; {BYTES_PER_TOKEN} bytes a token count; "
            f"max error against float64 on the first {rows} rows, over max(1, max |A|)"
        ]


_HEADINGS = (
    *("shape", "decay", "backend", "chunk", "compile s", "median ms", "p90 ms", "GB/s", "% of copy", "max error"),
)


def _cells(case: Measured) -> tuple[str, ...]:
    name = f"{case.backend}{'*' if case.is_auto else ''}"
    chunk = "" if case.chunk_size is None else str(case.chunk_size)
    first = (case.shape, case.decay, name, chunk, f"{case.first_call_s:.2f}")
    if case.median_s is None or case.p90_s is None:
        return (*first, f"> {1e3 * LONGEST_CALL_S:.0f}", "", "", "", f"{case.max_error:.0e}")
    times = (f"{1e3 * case.median_s:.3f}", f"{1e3 * case.p90_s:.3f}")
    return (*first, *times, f"{case.gb_per_s:.1f}", f"{case.percent_of_copy:.0f}", f"{case.max_error:.0e}")


def bench(resolved: Resolved, *, shapes: str | None, out: Path | None) -> BenchReport:
    """Measures, and writes bench.json and bench.png to the folder `out`.

    Raises:
        InputError: shapes that are none, or a folder that cannot be written.
    """
    wanted = parse_shapes(shapes or DEFAULT_SHAPES)
    folder = out or DEFAULT_FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--out: {folder.absolute()}: no folder for bench.json and bench.png: {error.strerror}"
        ) from None
    for name in ("bench.json", "bench.png"):
        check_output(folder / name)
    topology.start(resolved.settings.mesh)
    report = measure(resolved.settings.algorithm, wanted)
    write_whole(folder / "bench.json", json.dumps(report.to_dict(), indent=2).encode() + b"\n")
    title = f"GAE on {report.machine['device']}: median of {NUM_REPEATS} warm calls, shaded up to the 90th percentile"
    write_whole(folder / "bench.png", speed_picture(panels(report), title=title))
    return report


def parse_shapes(text: str) -> list[Shape]:
    """`16x8192,256x131072` -> rows and tokens.

    Raises:
        InputError: something else.
    """
    found = []
    for part in text.split(","):
        if not re.fullmatch(r"[1-9]\d{0,9}x[1-9]\d{0,9}", part.strip()):
            raise InputError(
                f"--shapes: expected ROWSxTOKENS,..., as in {DEFAULT_SHAPES}, got {part.strip() or text!r}"
            )
        shape = Shape(*map(int, part.strip().split("x")))
        if shape.rows * shape.tokens > MAX_TOKENS:
            raise InputError(f"--shapes: {shape} has more than {MAX_TOKENS:,} tokens")
        found.append(shape)
    return list(dict.fromkeys(found))


def measure(algorithm: Algorithm, shapes: Sequence[Shape], *, num_repeats: int = NUM_REPEATS) -> BenchReport:
    """All backends on all shapes, under the settings' gamma, lambda and mask mode."""
    copies: list[Copied] = []
    cases: list[Measured] = []
    for shape in shapes:
        copied, measured = _measure_shape(algorithm, shape, num_repeats)
        copies.append(copied)
        cases += measured
    return BenchReport(
        machine=describe_machine(),
        settings={"gamma": algorithm.gamma, "lam": algorithm.lam, "mask_mode": algorithm.mask_mode},
        method={
            "repeats": num_repeats,
            "bytes_per_token": BYTES_PER_TOKEN,
            "checked_rows": NUM_CHECKED_ROWS,
            "masked_fraction": MASKED_FRACTION,
        },
        copies=tuple(copies),
        cases=tuple(cases),
        conclusion=conclusion(cases),
    )


def describe_machine() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "jax": jax.__version__,
        "numpy": np.__version__,
    }


class _Case(NamedTuple):
    measured: Measured
    """Without its times."""
    call: Callable[[], Any]


def _measure_shape(algorithm: Algorithm, shape: Shape, num_repeats: int) -> tuple[Copied, list[Measured]]:
    rng = np.random.default_rng(0)
    rewards, values = rng.standard_normal((2, *shape), np.float32)
    mask = rng.random(shape, np.float32) >= MASKED_FRACTION
    one = jnp.float32(1.0)
    on_device = (jnp.asarray(rewards), jnp.asarray(values))
    # Times a number that the compiler does not know: else no byte would be moved.
    copy = partial(jax.jit(lambda rewards, values, one: (rewards * one, values * one)), *on_device, one)
    jax.block_until_ready(copy())
    cases = []
    for decay, of_decay in (("scalar", None), ("masked", mask)):
        exact = oracle(rewards, values, of_decay, algorithm)
        call = partial(
            generalized_advantages, *on_device, gamma=algorithm.gamma, lam=algorithm.lam,
            mask=None if of_decay is None else jnp.asarray(of_decay), mask_mode=algorithm.mask_mode,
        )  # fmt: skip
        for backend, chunk_size, is_auto in _sweep(algorithm, shape, per_token_decay=of_decay is not None):
            _tell(f"{shape} {decay}: {backend}{f', chunks of {chunk_size}' if chunk_size else ''}")
            run = partial(call, backend=backend, chunk_size=chunk_size)
            blank = Measured(str(shape), decay, backend, chunk_size, is_auto, 0.0, None, None, 0, None, None, 0.0)
            cases.append(_warmed(blank, run, exact))
    _tell(f"{shape}: {num_repeats} repeats of each in turn")
    quick = [case for case in cases if case.measured.median_s is not None]
    copy_times, *times = interleaved([copy, *(case.call for case in quick)], num_repeats)
    num_bytes = BYTES_PER_TOKEN * shape.rows * shape.tokens
    copy_s = statistics.median(copy_times)
    copied = Copied(str(shape), copy_s, p90(copy_times), num_bytes / copy_s / 1e9)
    timed = dict(zip(map(id, quick), times, strict=True))
    return copied, [_timed(case.measured, timed.get(id(case), []), copy_s, num_bytes) for case in cases]


def _sweep(algorithm: Algorithm, shape: Shape, *, per_token_decay: bool) -> Iterator[tuple[str, int | None, bool]]:
    """(backend, chunk size, whether auto takes it) of every case."""
    auto: Choice = choose("auto", shape, one_leak=not per_token_decay, chunk_size=algorithm.gae_chunk_size)
    asked = {algorithm.gae_chunk_size} if algorithm.gae_chunk_size else set()
    sizes = {*CHUNK_SIZES, *asked, *({auto.chunk_size} if auto.backend in WITH_CHUNKS else ())}
    for backend in BACKENDS:
        if backend not in WITH_CHUNKS:
            yield backend, None, backend == auto.backend
        else:
            for size in sorted(sizes):
                is_auto = (backend, size) == auto[:2]
                if is_auto or size <= shape.tokens:
                    yield backend, size, is_auto


def _warmed(blank: Measured, call: Callable[[], Any], exact: np.ndarray) -> _Case:
    """The case compiled and checked; `median_s` is what one warm call took, None where that is too long."""
    start = time.perf_counter()
    credit = jax.block_until_ready(call())
    first = time.perf_counter() - start
    got = np.stack([np.asarray(part[:NUM_CHECKED_ROWS], np.float64) for part in credit])
    error = float(np.abs(got - exact).max() / max(1.0, np.abs(exact[0]).max()))
    del credit, got
    start = time.perf_counter()
    jax.block_until_ready(call())
    warm = time.perf_counter() - start
    return _Case(
        replace(
            blank,
            first_call_s=max(first - warm, 0.0),
            median_s=warm if warm <= LONGEST_CALL_S else None,
            max_error=error,
        ),
        call,
    )


def interleaved(calls: Sequence[Callable[[], Any]], num_repeats: int) -> list[list[float]]:
    """Seconds of each call, repeat after repeat, the calls in turn: what disturbs the machine disturbs all of them."""
    counts = []
    for call in calls:
        start = time.perf_counter()
        jax.block_until_ready(call())
        counts.append(max(1, math.ceil(SHORTEST_REPEAT_S / max(time.perf_counter() - start, 1e-7))))
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(num_repeats):
        for call, count, taken in zip(calls, counts, times, strict=True):
            start = time.perf_counter()
            results = [call() for _ in range(count)]
            jax.block_until_ready(results)
            taken.append((time.perf_counter() - start) / count)
            del results
    return times


def _timed(measured: Measured, times: Sequence[float], copy_s: float, num_bytes: int) -> Measured:
    if not times:
        return replace(measured, median_s=None)
    median = statistics.median(times)
    return replace(
        measured,
        median_s=median,
        p90_s=p90(times),
        num_repeats=len(times),
        gb_per_s=num_bytes / median / 1e9,
        percent_of_copy=100 * copy_s / median,
    )


def p90(times: Sequence[float]) -> float:
    return float(np.percentile(times, 90))


def oracle(rewards: np.ndarray, values: np.ndarray, mask: np.ndarray | None, algorithm: Algorithm) -> np.ndarray:
    """Advantages and returns of the first rows in float64, [2, rows, T], one step after another as in the paper."""
    rewards, values = (np.asarray(x[:NUM_CHECKED_ROWS], np.float64) for x in (rewards, values))
    written = np.ones(rewards.shape, bool) if mask is None else mask[:NUM_CHECKED_ROWS]
    if algorithm.mask_mode == "zero":
        rewards, values = np.where(written, rewards, 0), np.where(written, values, 0)
    is_step = written if algorithm.mask_mode == "skip" else np.ones(rewards.shape, bool)
    result = np.zeros((2, *rewards.shape))
    advantage, next_value = np.zeros((2, len(rewards)))
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + algorithm.gamma * next_value - values[:, t]
        advantage = np.where(is_step[:, t], delta + algorithm.gamma * algorithm.lam * advantage, advantage)
        next_value = np.where(is_step[:, t], values[:, t], next_value)
        result[:, :, t] = np.where(written[:, t], (advantage, advantage + values[:, t]), 0)
    return result


def conclusion(cases: Sequence[Measured]) -> str:
    """Whether chunks pay, shape by shape, and what `auto` takes."""
    parts = []
    for shape, of_shape in groupby(cases, key=lambda case: case.shape):
        for decay, of_decay in groupby(of_shape, key=lambda case: case.decay):
            parts.append(f"{shape} {_WITH[decay]}: {_verdict(list(of_decay))}")
    return "\n".join(parts)


_WITH = {"scalar": "with one decay", "masked": "with a mask"}


def _verdict(cases: Sequence[Measured]) -> str:
    chunked = min((c for c in cases if c.backend in WITH_CHUNKS), key=_speed, default=None)
    serial = next(c for c in cases if c.backend == "serial")
    auto = next((c for c in cases if c.is_auto), None)
    if chunked is None or chunked.median_s is None:
        pays = "chunk-scan does not pay"
    elif serial.median_s is None:
        pays = f"chunk-scan pays, best in chunks of {chunked.chunk_size}: serial takes over {LONGEST_CALL_S:g} s"
    else:
        ratio = serial.median_s / chunked.median_s
        pays = f"chunk-scan {'pays' if ratio > 1 else 'does not pay'}, {ratio:.1f} x as fast as serial"
        pays += f" at its best chunk size, {chunked.chunk_size}"
    taken = "another" if auto is None else auto.backend
    if auto is not None and auto.chunk_size is not None:
        taken += f" in chunks of {auto.chunk_size}"
    time_of_auto = "" if auto is None or auto.median_s is None else f" ({1e3 * auto.median_s:.3g} ms)"
    return f"{pays}; auto takes {taken}{time_of_auto}."


def _speed(case: Measured) -> float:
    return math.inf if case.median_s is None else case.median_s


def panels(report: BenchReport) -> list[SpeedPanel]:
    """What is drawn, a panel for each shape and decay."""
    copy_s = {copied.shape: copied.median_s for copied in report.copies}
    drawn = []
    for (shape, decay), of_panel in groupby(report.cases, key=lambda case: (case.shape, case.decay)):
        speeds = tuple(
            Speed(c.backend, c.chunk_size, c.median_s, c.p90_s, c.is_auto)
            for c in of_panel
            if c.median_s is not None and c.p90_s is not None
        )
        rows, tokens = map(int, shape.split("x"))
        drawn.append(SpeedPanel(rows, tokens, decay, copy_s[shape], speeds))
    return drawn


def _tell(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)
