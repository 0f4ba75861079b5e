"""`grpo gae --bench`: compares the time of every GAE backend and chunk size with that of copying the same bytes."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float32, Float64, Int

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
"""Cases with slower calls are left out: their repeats would take most of a minute."""
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
NUM_CHECKED_ROWS = 16
"""Number of rows compared with float64 results, evenly spaced from the first to the last."""
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
    parsed_shapes = parse_shapes(shapes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--out: cannot create the folder {folder.absolute()} for bench.json and bench.png: {error.strerror}"
        ) from None
    for name in ("bench.json", "bench.png"):
        check_output_path(folder / name)
    settings = resolved.settings
    algorithm = settings.algorithm
    start_local_devices(settings.mesh)
    device = jax.devices()[0]
    machine = {
        "device": device.device_kind,
        "platform": device.platform,
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "jax": jax.__version__,
        "numpy": np.__version__,
    }
    timings = [timing for shape in parsed_shapes for timing in measure_shape(algorithm, shape, num_repeats=NUM_REPEATS)]
    cases = [timing for timing in timings if timing.backend != "copy"]
    report = {
        "machine": machine,
        "settings": {"gamma": algorithm.gamma, "lam": algorithm.lam, "mask_mode": algorithm.mask_mode},
        "method": {
            "repeats": NUM_REPEATS,
            "order": "shuffled",
            "arrays": "numpy in and out",
            "bytes_per_token": BYTES_PER_TOKEN,
            "bytes_of_mask_per_token": 1,
            "checked_rows": NUM_CHECKED_ROWS,
            "masked_fraction": MASKED_FRACTION,
            "masked_run": MASKED_RUN,
            "sigma_of_log_lengths": LENGTH_SIGMA,
        },
        "copies": [asdict(timing) for timing in timings if timing.backend == "copy"],
        "cases": [asdict(case) for case in cases],
        "conclusion": conclude(cases),
    }
    write_atomic(folder / "bench.json", json.dumps(report, indent=2).encode() + b"\n")
    title = f"GAE on {machine['device']}: median of {NUM_REPEATS} warm calls, shaded up to the 90th percentile"
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
    """Arrays that every backend gets, in the host's memory, and what they give in float64."""

    rows: str
    rewards: Float32[np.ndarray, "B T"]
    values: Float32[np.ndarray, "B T"]
    mask: Bool[np.ndarray, "B T"] | None
    ends: Bool[np.ndarray, "B T"] | None
    samples: Bool[np.ndarray, "R T"]
    """Where the tokens of each sample are in a row of its own; the arrays have the same tokens in the same order."""
    exact: Callable[[], Float64[np.ndarray, "2 r T"]]
    """Returns advantages and returns of `checked_rows` of the samples."""

    @property
    def num_tokens(self) -> int:
        return int(self.samples.sum())

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * (BYTES_PER_TOKEN + (self.mask is not None))

    def estimate(self, algorithm: AlgorithmSettings, backend: str, chunk_size: int | None) -> list[np.ndarray]:
        """Returns the advantages and returns, as `grpo gae` and training take them."""
        result = generalized_advantages(
            self.rewards, self.values, mask=self.mask, ends=self.ends, gamma=algorithm.gamma, lam=algorithm.lam,
            mask_mode=algorithm.mask_mode, backend=backend, chunk_size=chunk_size,
        )  # fmt: skip
        return [np.asarray(part) for part in result]

    def error_of(self, result: Sequence[np.ndarray]) -> float:
        """Returns the largest error of the checked samples, over max(1, max |A|)."""
        found = []
        for part in result:
            rows = np.zeros(self.samples.shape, np.float32)
            rows[self.samples] = part.reshape(-1)[: self.num_tokens]
            found.append(rows[checked_rows(len(rows))])
        return float(np.abs(np.stack(found) - self.exact()).max() / max(1.0, np.abs(self.exact()[0]).max()))


def checked_rows(num_rows: int) -> Int[np.ndarray, "r"]:
    return np.unique(np.linspace(0, num_rows - 1, NUM_CHECKED_ROWS).astype(int))


def make_workloads(algorithm: AlgorithmSettings, shape: BenchmarkShape) -> list[Workload]:
    """Returns full rows, rows with a mask, and one row of samples whose lengths differ, as training makes it."""
    rng = np.random.default_rng(0)
    rewards, values = rng.standard_normal((2, *shape), np.float32)
    runs = rng.random((shape.rows, -(-shape.tokens // MASKED_RUN))) >= MASKED_FRACTION
    mask = runs.repeat(MASKED_RUN, axis=1)[:, : shape.tokens]
    lengths = np.clip(rng.lognormal(np.log(shape.tokens / 2), LENGTH_SIGMA, shape.rows), 1, shape.tokens).astype(int)
    samples = np.arange(shape.tokens) < lengths[:, None]
    # After a sample nothing follows, in any mask mode.
    cut = [np.where(samples, x, np.float32(0)) for x in (rewards, values)]
    num_tokens = lengths.sum()
    row = bucket_length(int(num_tokens))
    packed = [np.pad(x[samples], (0, row - num_tokens))[None] for x in cut]
    is_token, ends = np.arange(row)[None] < num_tokens, np.zeros((1, row), bool)
    ends[0, np.cumsum(lengths) - 1] = True
    everywhere, rows = np.ones(shape, bool), checked_rows(shape.rows)

    def exact(rewards: np.ndarray, values: np.ndarray, mask: np.ndarray) -> Callable[[], np.ndarray]:
        return cache(lambda: reference_gae(rewards[rows], values[rows], mask[rows], algorithm))

    return [
        Workload("full", rewards, values, None, None, everywhere, exact(rewards, values, everywhere)),
        Workload("masked", rewards, values, mask, None, everywhere, exact(rewards, values, mask)),
        Workload("packed", packed[0], packed[1], is_token, ends, samples, exact(cut[0], cut[1], samples)),
    ]


def measure_shape(algorithm: AlgorithmSettings, shape: BenchmarkShape, *, num_repeats: int) -> list[BackendTiming]:
    """Returns the times of a copy and then of every backend, with the settings' gamma, lambda and mask mode."""
    workloads = make_workloads(algorithm, shape)
    whole = workloads[0]
    calls: list[Callable[[], Any] | None] = [lambda: (whole.rewards.copy(), whole.values.copy())]
    first = [(BackendTiming(str(shape), "", "copy"), whole.num_bytes)]
    for work in workloads:
        for backend, chunk_size, is_auto in list_cases(algorithm, shape):
            timing = BackendTiming(str(shape), work.rows, backend, chunk_size, is_auto)
            _print_progress(f"{shape} {work.rows}: {timing.name}")
            call = partial(work.estimate, algorithm, backend, chunk_size)
            start = time.perf_counter()
            result = call()
            first_s = time.perf_counter() - start
            warm_s = time_calls(call, 1)
            first_call_s = max(first_s - warm_s, 0.0)
            timing = replace(timing, first_call_s=first_call_s, max_error=work.error_of(result))
            first.append((timing, work.num_bytes))
            calls.append(call if warm_s <= MAX_CALL_S else None)
    _print_progress(f"{shape}: {num_repeats} repeats of each case, in turn")
    times = iter(time_shuffled([call for call in calls if call is not None], num_repeats))
    timings: list[BackendTiming] = []
    for (timing, num_bytes), call in zip(first, calls, strict=True):
        if call is not None:
            seconds = next(times)
            speed = num_bytes / statistics.median(seconds) / 1e9
            timing = replace(
                timing, median_s=statistics.median(seconds), p90_s=float(np.percentile(seconds, 90)),
                num_repeats=num_repeats, gb_per_s=speed,
                percent_of_copy=100 * speed / ((timings[0].gb_per_s if timings else None) or speed),
            )  # fmt: skip
        timings.append(timing)
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


def time_calls(call: Callable[[], Any], count: int) -> float:
    """Returns the mean time of `count` calls, in seconds."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def time_shuffled(calls: Sequence[Callable[[], Any]], num_repeats: int) -> list[list[float]]:
    """Returns the mean seconds of each call in each repeat.

    The calls take turns, so that a disturbance affects all of them, each time in another order, so that none always
    finds what the same other one has left in the caches.
    """
    counts = [max(1, math.ceil(MIN_REPEAT_S / max(time_calls(call, 1), 1e-7))) for call in calls]
    times: list[list[float]] = [[] for _ in calls]
    rng = np.random.default_rng(0)
    for _ in range(num_repeats):
        for i in rng.permutation(len(calls)):
            times[i].append(time_calls(calls[i], counts[i]))
    return times


def reference_gae(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, algorithm: AlgorithmSettings
) -> np.ndarray:
    """Returns advantages and returns, [2, B, T] in float64, computed one step at a time as in the paper."""
    rewards, values = rewards.astype(np.float64), values.astype(np.float64)
    if algorithm.mask_mode == "zero":
        rewards, values = np.where(mask, rewards, 0), np.where(mask, values, 0)
    is_step = mask if algorithm.mask_mode == "skip" else np.ones(rewards.shape, bool)
    result = np.zeros((2, *rewards.shape))
    advantage, next_value = np.zeros((2, len(rewards)))
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + algorithm.gamma * next_value - values[:, t]
        advantage = np.where(is_step[:, t], delta + algorithm.gamma * algorithm.lam * advantage, advantage)
        next_value = np.where(is_step[:, t], values[:, t], next_value)
        result[:, :, t] = np.where(mask[:, t], (advantage, advantage + values[:, t]), 0)
    return result


def conclude(cases: Sequence[BackendTiming]) -> str:
    """Returns, for each shape and kind of rows, whether the chunk scan pays and whether `auto` selects the fastest."""
    lines = []
    for (shape, rows), group in groupby(cases, key=lambda case: (case.shape, case.rows)):
        ranked = sorted(group, key=lambda case: case.median_s or math.inf)
        scan = next((c for c in ranked if c.backend != "serial"), None)
        serial = next((c for c in ranked if c.backend == "serial"), None)
        speedup = _seconds(serial) / _seconds(scan) if scan and scan.median_s else 0.0
        verdict = "pays" if speedup >= MIN_SPEEDUP else "makes no difference"
        verdict = "does not pay" if speedup <= 1 / MIN_SPEEDUP else verdict
        compared = ", ".join(_describe(case) for case in (scan, serial) if case is not None)
        line = f"{shape}, {ROW_NAMES[rows]}: chunk-scan {verdict} ({compared})"
        auto = next((c for c in ranked if c.is_auto), None)
        if auto is not None:
            line += f"; auto selects {auto.name}"
            best = ranked[0]
            if best.median_s is not None and _seconds(auto) / best.median_s >= MIN_SPEEDUP:
                options = f"--backend {best.backend}{f' --chunk-size {best.chunk_size}' if best.chunk_size else ''}"
                line += f", which takes {_seconds(auto) / best.median_s:.1f} x as long as the fastest; use {options}"
        lines.append(line)
    return "\n".join(lines)


def _seconds(case: BackendTiming | None) -> float:
    return math.inf if case is None or case.median_s is None else case.median_s


def _describe(case: BackendTiming) -> str:
    time_text = f"over {MAX_CALL_S:g} s" if case.median_s is None else f"{1e3 * case.median_s:.3g} ms"
    return f"{case.name}: {time_text}"


def format_report(report: dict[str, Any]) -> str:
    """Returns the report as a readable table, followed by the conclusion."""
    cells = []
    rows = [row for copy in report["copies"] for row in (copy, *report["cases"]) if row["shape"] == copy["shape"]]
    for case in rows:
        ms = [f"> {1e3 * MAX_CALL_S:.0f}", "", "", ""]
        if case["median_s"] is not None:
            ms = [f"{1e3 * case['median_s']:.3f}", f"{1e3 * case['p90_s']:.3f}", f"{case['gb_per_s']:.1f}",
                  f"{case['percent_of_copy']:.0f}"]  # fmt: skip
        error = "" if case["max_error"] is None else f"{case['max_error']:.0e}"
        name, chunk = f"{case['backend']}{'*' if case['is_auto'] else ''}", str(case["chunk_size"] or "")
        cells.append((case["shape"], case["rows"], name, chunk, f"{case['first_call_s']:.2f}", *ms, error))
    machine, method = report["machine"], report["method"]
    note = f"* selected by auto; {method['repeats']} warm repeats, shuffled; {method['arrays']}"
    head = f"{machine['device']}, {machine['cpu_cores']} CPU cores, jax {machine['jax']}"
    return "\n".join([head, "", format_table(cells, header=HEADINGS, num_left=0), "", note, "", report["conclusion"]])


def _print_progress(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)
