"""`grpo gae --bench`: compares the time of every GAE backend and chunk size with that of copying the same bytes."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from timeit import timeit
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float32, Float64

from app.advantage.gae.backend_choice import choose_backend
from app.advantage.gae.estimate import BACKENDS, generalized_advantages
from app.batching.length_buckets import bucket_length
from app.records.atomic_write import write_atomic
from app.records.jsonl import check_output_path
from app.records.text_format import format_table
from app.report.gae_benchmark_plot import ROW_NAMES, BackendTiming, render_benchmark
from app.stages.gae import start_local_devices
from settings import Resolved
from settings.errors import InputError
from settings.schema.algorithm import AlgorithmSettings

CHUNK_SIZES = (64, 128, 256, 512)
NUM_REPEATS = 21
MIN_REPEAT_S = 1e-3
"""Calls are repeated until they take this long, so that the clock's resolution does not matter."""
MAX_CALL_S = 2.0
"""Slower calls are timed once: their repeats would take most of a minute."""
MAX_TOKENS = 1 << 30
BYTES_PER_TOKEN = 16
"""Reward and value are read, advantage and return are written, in float32; a mask adds one byte."""
MIN_SPEEDUP = 1.1
"""Smallest ratio of two medians that counts as a difference on a shared machine."""
MASKED_FRACTION = 0.1
MASKED_RUN = 64
"""Consecutive tokens that are masked together, as the answer of a tool."""
LENGTH_SIGMA = 0.6
"""Standard deviation of the logarithms of packed samples' lengths."""
CHECKED_ROWS = 16
"""Number of rows, or of packed samples, that are compared with float64: whole ones, as errors add up towards their
starts."""
HEADINGS = ("shape", "rows", "backend", "chunk", "compile s", "median ms", "p90 ms", "GB/s", "% of copy", "max error")


class BenchmarkShape(NamedTuple):
    rows: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.tokens}"


def run_benchmark(resolved: Resolved, *, shapes: str, folder: Path) -> dict[str, Any]:
    """Times all backends, writes bench.json and bench.png to a folder, and returns the content of bench.json.

    Raises:
        InputError: the shapes are malformed, or the folder cannot be written to.
    """
    parsed_shapes, algorithm = parse_shapes(shapes), resolved.settings.algorithm
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--out: cannot create the folder {folder.absolute()} for bench.json and bench.png: {error.strerror}"
        ) from None
    for name in ("bench.json", "bench.png"):
        check_output_path(folder / name)
    start_local_devices(resolved.settings.mesh)
    device = jax.devices()[0].device_kind
    timings = [timing for shape in parsed_shapes for timing in measure_shape(algorithm, shape)]
    report = {
        "machine": {"device": device, "cpu_cores": os.cpu_count(), "jax": jax.__version__, "numpy": np.__version__},
        "settings": {"gamma": algorithm.gamma, "lam": algorithm.lam, "mask_mode": algorithm.mask_mode},
        "cases": [asdict(timing) for timing in timings],
        "conclusion": conclude([timing for timing in timings if timing.backend != "copy"]),
    }
    write_atomic(folder / "bench.json", json.dumps(report, indent=2).encode() + b"\n")
    title = f"GAE on {device}: median of {NUM_REPEATS} warm calls, shaded up to the 90th percentile"
    write_atomic(folder / "bench.png", render_benchmark(timings, title=title))
    return report


def parse_shapes(text: str) -> list[BenchmarkShape]:
    """Parses `16x8192,256x131072` into rows and tokens; repeated shapes are dropped.

    Raises:
        InputError: the text is malformed, or a shape has too many tokens.
    """
    shapes = []
    for part in text.split(","):
        if not re.fullmatch(r"[1-9]\d{0,9}x[1-9]\d{0,9}", part.strip()):
            raise InputError(
                f"--shapes: expected ROWSxTOKENS,..., as in 16x8192,256x131072, got {part.strip() or text!r}"
            )
        shape = BenchmarkShape(*map(int, part.strip().split("x")))
        if shape.rows * shape.tokens > MAX_TOKENS:
            raise InputError(f"--shapes: {shape} has more than {MAX_TOKENS:,} tokens, which is the maximum")
        shapes.append(shape)
    return list(dict.fromkeys(shapes))


class Workload(NamedTuple):
    """Arrays that every backend gets, in the host's memory."""

    rows: str
    row_tokens: int
    """Number of tokens of each row, without padding at its end."""
    rewards: Float32[np.ndarray, "B T"]
    values: Float32[np.ndarray, "B T"]
    mask: Bool[np.ndarray, "B T"] | None = None
    ends: Bool[np.ndarray, "B T"] | None = None

    def estimate(self, algorithm: AlgorithmSettings, backend: str, chunk_size: int | None) -> list[np.ndarray]:
        """Returns the advantages and returns, as `grpo gae` and training take them."""
        result = generalized_advantages(
            self.rewards, self.values, mask=self.mask, ends=self.ends, gamma=algorithm.gamma, lam=algorithm.lam,
            mask_mode=algorithm.mask_mode, backend=backend, chunk_size=chunk_size,
        )  # fmt: skip
        return [np.asarray(part) for part in result]

    def make_check(self, algorithm: AlgorithmSettings) -> Callable[[Sequence[np.ndarray]], float]:
        """Returns a function that returns the largest error of advantages and returns, over max(1, max |A|).

        It compares rows, or samples of a packed row, from the first to the last, each as a whole.
        """
        rows, stops = np.arange(len(self.rewards)), np.full(len(self.rewards), self.row_tokens)
        starts = np.zeros_like(stops)
        if self.ends is not None:
            rows, stops = np.nonzero(self.ends)
            stops = stops + 1
            starts = np.concatenate([[0], stops[:-1]])
        of = np.unique(np.linspace(0, len(rows) - 1, CHECKED_ROWS).astype(int))
        tokens = starts[of, None] + np.arange((stops - starts)[of].max())
        is_own = tokens < stops[of, None]
        # The tokens behind the end of a sample do not affect it.
        places = rows[of, None], np.minimum(tokens, self.row_tokens - 1)
        mask, ends = (None if x is None else x[places] for x in (self.mask, self.ends))
        exact = reference_gae(self.rewards[places], self.values[places], mask, ends, algorithm)[:, is_own]

        def error_of(result: Sequence[np.ndarray]) -> float:
            found = np.stack([part[places] for part in result])[:, is_own]
            return float(np.abs(found - exact).max() / max(1.0, np.abs(exact[0]).max()))

        return error_of


def make_workloads(shape: BenchmarkShape) -> list[Workload]:
    """Returns full rows, rows with a mask, and one row of samples whose lengths differ, as training makes it."""
    rng = np.random.default_rng(0)
    rewards, values = rng.standard_normal((2, *shape), np.float32)
    runs = rng.random((shape.rows, -(-shape.tokens // MASKED_RUN))) >= MASKED_FRACTION
    mask = runs.repeat(MASKED_RUN, axis=1)[:, : shape.tokens]
    lengths = np.clip(rng.lognormal(np.log(shape.tokens / 2), LENGTH_SIGMA, shape.rows), 1, shape.tokens).astype(int)
    num_tokens = int(lengths.sum())
    row = bucket_length(num_tokens)
    packed = [np.pad(x.reshape(-1)[:num_tokens], (0, row - num_tokens))[None] for x in (rewards, values)]
    is_token, ends = np.arange(row)[None] < num_tokens, np.zeros((1, row), bool)
    ends[0, np.cumsum(lengths) - 1] = True
    return [
        Workload("full", shape.tokens, rewards, values),
        Workload("masked", shape.tokens, rewards, values, mask),
        Workload("packed", num_tokens, packed[0], packed[1], is_token, ends),
    ]


def measure_shape(algorithm: AlgorithmSettings, shape: BenchmarkShape) -> list[BackendTiming]:
    """Returns the times of every backend, and of a copy, with the settings' gamma, lambda and mask mode."""
    cases: list[BackendTiming] = []
    calls: list[Callable[[], Any]] = []
    sizes: list[int] = []
    for work in make_workloads(shape):
        print(f"{shape}: {ROW_NAMES[work.rows]}", file=sys.stderr, flush=True)
        num_tokens, error_of = len(work.rewards) * work.row_tokens, work.make_check(algorithm)
        cases.append(BackendTiming(str(shape), work.rows, "copy"))
        calls.append(partial(np.copy, (work.rewards, work.values)))
        sizes.append(num_tokens * BYTES_PER_TOKEN)
        for backend, chunk_size, is_auto in list_cases(algorithm, shape):
            call = partial(work.estimate, algorithm, backend, chunk_size)
            first_call_s, error = timeit(call, number=1), error_of(call())
            cases.append(BackendTiming(str(shape), work.rows, backend, chunk_size, is_auto, first_call_s, error))
            calls.append(call)
            sizes.append(num_tokens * (BYTES_PER_TOKEN + (work.mask is not None)))
    timings, copy_speed = [], 0.0
    for case, num_bytes, seconds in zip(cases, sizes, time_shuffled(calls), strict=True):
        speed = num_bytes / statistics.median(seconds) / 1e9
        copy_speed = speed if case.backend == "copy" else copy_speed
        timing = replace(case, median_s=statistics.median(seconds), p90_s=float(np.percentile(seconds, 90)))
        compile_s = max(0.0, case.first_call_s - timing.median_s)
        share = 100 * speed / copy_speed
        timings.append(replace(timing, gb_per_s=speed, percent_of_copy=share, first_call_s=compile_s))
    return timings


def list_cases(algorithm: AlgorithmSettings, shape: BenchmarkShape) -> Iterator[tuple[str, int | None, bool]]:
    """Yields (backend, chunk size, whether `auto` selects it) for every case."""
    choose = partial(choose_backend, one_decay=True, chunk_size=algorithm.gae_chunk_size)
    auto = choose("auto")
    for backend in BACKENDS:
        has_chunks = choose(backend).chunk_size is not None
        sizes = {*CHUNK_SIZES, algorithm.gae_chunk_size} - {None} if has_chunks else {None}
        for size in sorted(sizes, key=lambda size: size or 0):
            if size is None or size == algorithm.gae_chunk_size or size <= max(shape.tokens, CHUNK_SIZES[0]):
                yield backend, size, (backend, size) == auto[:2]


def time_shuffled(calls: Sequence[Callable[[], Any]]) -> list[list[float]]:
    """Returns the mean seconds of each call in each repeat.

    The calls take turns, so that a disturbance affects all of them, each time in another order, so that none always
    finds what the same other one has left in the caches.
    """
    times = [[timeit(call, number=1)] for call in calls]
    counts = [max(1, math.ceil(MIN_REPEAT_S / max(first, 1e-7))) for [first] in times]
    rng = np.random.default_rng(0)
    for repeat in range(NUM_REPEATS):
        for i in rng.permutation(len(calls)):
            if times[i][0] <= MAX_CALL_S:
                # The first time, of a single call, only counts if it is the only one.
                times[i] = (times[i] if repeat else []) + [timeit(calls[i], number=counts[i]) / counts[i]]
    return times


def reference_gae(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray | None, ends: np.ndarray | None,
    algorithm: AlgorithmSettings,
) -> Float64[np.ndarray, "2 B T"]:  # fmt: skip
    """Returns advantages and returns, computed in float64 one step at a time as in the paper."""
    mask = np.ones(rewards.shape, bool) if mask is None else mask
    goes_on = np.ones(rewards.shape) if ends is None else ~ends
    rewards, values = rewards.astype(np.float64), values.astype(np.float64)
    if algorithm.mask_mode == "zero":
        rewards, values = np.where(mask, rewards, 0), np.where(mask, values, 0)
    is_step = mask if algorithm.mask_mode == "skip" else np.ones(rewards.shape, bool)
    result = np.zeros((2, *rewards.shape))
    advantage, next_value = np.zeros((2, len(rewards)))
    for t in reversed(range(rewards.shape[1])):
        advantage, next_value = advantage * goes_on[:, t], next_value * goes_on[:, t]
        delta = rewards[:, t] + algorithm.gamma * next_value - values[:, t]
        advantage = np.where(is_step[:, t], delta + algorithm.gamma * algorithm.lam * advantage, advantage)
        next_value = np.where(is_step[:, t], values[:, t], next_value)
        result[:, :, t] = np.where(mask[:, t], (advantage, advantage + values[:, t]), 0)
    return result


def conclude(cases: Sequence[BackendTiming]) -> str:
    """Returns, for each shape and kind of rows, whether the chunk scan pays and whether `auto` selects the fastest."""
    lines = []
    for (shape, rows), group in groupby(cases, key=lambda case: (case.shape, case.rows)):
        ranked = sorted(group, key=lambda case: case.median_s)
        scan = next(case for case in ranked if case.backend != "serial")
        serial = next(case for case in ranked if case.backend == "serial")
        auto = next(case for case in ranked if case.is_auto)
        speedup, slowdown = serial.median_s / scan.median_s, auto.median_s / ranked[0].median_s
        verdict = "pays" if speedup >= MIN_SPEEDUP else "makes no difference"
        verdict = "does not pay" if speedup <= 1 / MIN_SPEEDUP else verdict
        compared = ", ".join(f"{case.name}: {1e3 * case.median_s:.3g} ms" for case in (scan, serial))
        line = f"{shape}, {ROW_NAMES[rows]}: chunk-scan {verdict} ({compared}); auto selects {auto.name}"
        if slowdown >= MIN_SPEEDUP:
            line += f", which takes {slowdown:.1f} x as long as the fastest, {ranked[0].name}"
        lines.append(line)
    return "\n".join(lines)


def format_report(report: dict[str, Any]) -> str:
    """Returns the report as a readable table, followed by the conclusion."""
    cells = []
    for case in report["cases"]:
        error = "" if case["max_error"] is None else f"{case['max_error']:.0e}"
        name, chunk = f"{case['backend']}{'*' if case['is_auto'] else ''}", str(case["chunk_size"] or "")
        times = f"{1e3 * case['median_s']:.3f}", f"{1e3 * case['p90_s']:.3f}"
        speeds = f"{case['gb_per_s']:.1f}", f"{case['percent_of_copy']:.0f}"
        cells.append((case["shape"], case["rows"], name, chunk, f"{case['first_call_s']:.2f}", *times, *speeds, error))
    machine = report["machine"]
    head = f"{machine['device']}, {machine['cpu_cores']} CPU cores, jax {machine['jax']}"
    note = f"* selected by auto; {NUM_REPEATS} warm repeats, shuffled; numpy in and out"
    return "\n".join([head, "", format_table(cells, header=HEADINGS, num_left=0), "", note, "", report["conclusion"]])
