"""`grpo gae --bench`: times every GAE backend and chunk size, a loop over time, and a copy of the inputs."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from timeit import timeit
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float32, Float64

from app.advantage.gae.chunked import CHUNK_SIZE, solve_chunked
from app.advantage.gae.estimate import generalized_advantages
from app.advantage.gae.recurrence import Discounts, make_gae_rows
from app.batching.micro_batch_shapes import bucket_length
from app.records.atomic_write import write_atomic
from app.records.jsonl import check_output_path
from app.records.text_format import format_table
from app.report.matplotlib_figures import new_figure, save_figure
from app.report.plots import BLUE, GREEN, GREY, ORANGE
from app.stages.gae import open_input, start_local_devices
from settings import Settings
from settings.errors import InputError

COLORS = {"copy": GREY, "chunked": BLUE, "numpy": GREEN, "loop": ORANGE}
ROW_NAMES = {"full": "full rows", "masked": "a mask", "packed": "packed samples"}
CHUNK_SIZES = (64, 128, 256, 512)
NUM_REPEATS = 21
MIN_REPEAT_S = 1e-3
"""Minimum duration of a measurement in seconds; shorter calls are repeated, because clocks have limited resolution."""
MAX_CALL_S = 2.0
"""Seconds above which a call is timed only once; `NUM_REPEATS` repeats would take most of a minute."""
MAX_TOKENS = 1 << 30
BYTES_PER_TOKEN = 16
"""Bytes moved per token: reward, value, advantage and return, each in float32. A mask adds one byte."""
MASKED_FRACTION = 0.1
MASKED_RUN = 64
"""Number of consecutive tokens that are masked together, like the tokens of a tool's answer."""
LENGTH_SIGMA = 0.6
"""Sigma of the log-normal lengths of the samples in a packed row."""
HEADINGS = (
    "shape", "rows", "backend", "chunk", "compile s", "median ms", "p90 ms", "x loop", "% of copy", "MiB", "max error"
)  # fmt: skip


@dataclass(frozen=True)
class BackendTiming:
    """Timing of one backend on one shape; all times except `first_call_s` exclude compilation."""

    shape: str
    rows: str
    """Kind of rows: a key of `ROW_NAMES`."""
    backend: str
    """A GAE backend, `loop` (one time step after another in numpy), or `copy` (reads and writes two matrices)."""
    chunk_size: int | None = None
    """Tokens per chunk; None if the backend has no chunks."""
    is_auto: bool = False
    first_call_s: float = 0.0
    """Seconds of tracing and compiling: the time of the first call minus the median."""
    max_error: float | None = None
    """Largest absolute difference of advantages and returns from float64, divided by max(1, max |A|)."""
    median_s: float = 0.0
    p90_s: float = 0.0
    gb_per_s: float = 0.0
    percent_of_copy: float = 100.0
    """Throughput in percent of the throughput of `copy` on the same shape."""
    times_loop: float = 1.0
    """Speed relative to `loop`: 2 = twice as fast."""
    memory_bytes: int | None = None
    """Bytes of results and temporaries: allocated by numpy, or reported for the compiled program."""

    @property
    def name(self) -> str:
        return self.backend if self.chunk_size is None else f"{self.backend} in chunks of {self.chunk_size}"


class GaeRule(NamedTuple):
    """Discount factors of GAE, and how masked tokens are treated (`--mask-mode`)."""

    gamma: float
    lam: float
    mask_mode: str = "skip"


class BenchmarkShape(NamedTuple):
    rows: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.tokens}"


def run_benchmark(
    settings: Settings, *, input: Path | None, shapes: str, folder: Path, mask_mode: str
) -> dict[str, Any]:
    """Times all backends with the gamma, lambda and chunk size of the settings; writes bench.json and bench.png.

    Args:
        input: samples or matrices to time; None = random data of `shapes`.

    Returns:
        The content of bench.json.

    Raises:
        InputError: the shapes or the input cannot be used, or the folder cannot be written to.
    """
    algorithm = settings.algorithm
    if input is None:
        workloads = map(make_workloads, parse_shapes(shapes))
    else:
        workloads = [[read_workload(input, settings, mask_mode=mask_mode)]]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--out: cannot create the folder {folder.absolute()} for bench.json and bench.png: {error.strerror}; "
            "choose another one"
        ) from None
    for name in ("bench.json", "bench.png"):
        check_output_path(folder / name, "--out")
    start_local_devices(settings.mesh)
    device = jax.devices()[0].device_kind
    rule = GaeRule(algorithm.gamma, algorithm.lam, mask_mode)
    sizes = sorted({*CHUNK_SIZES, algorithm.gae_chunk_size or CHUNK_SIZE})
    timings = [timing for group in workloads for work in group for timing in measure_workload(rule, work, sizes)]
    report = {
        "machine": {"device": device, "cpu_cores": os.cpu_count(), "jax": jax.__version__, "numpy": np.__version__},
        "input": None if input is None else str(input),
        "settings": rule._asdict(),
        "cases": [asdict(timing) for timing in timings],
        "conclusion": describe_fastest([timing for timing in timings if timing.backend != "copy"]),
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
                f"--shapes: expected shapes such as 16x8192,256x131072 (rows x tokens), got {part.strip() or text!r}"
            )
        shape = BenchmarkShape(*map(int, part.strip().split("x")))
        if shape.rows * shape.tokens > MAX_TOKENS:
            raise InputError(
                f"--shapes: {shape} has {shape.rows * shape.tokens:,} tokens, but at most {MAX_TOKENS:,} are timed; "
                "choose a smaller shape"
            )
        shapes.append(shape)
    return list(dict.fromkeys(shapes))


class Workload(NamedTuple):
    """Inputs of GAE in host memory, on which every backend is timed."""

    shape: BenchmarkShape
    """Number of rows (in a packed row: of samples), and the maximum number of tokens in one."""
    rows: str
    row_tokens: int
    """Number of tokens of each row, without padding."""
    rewards: Float32[np.ndarray, "B T"]
    values: Float32[np.ndarray, "B T"]
    mask: Bool[np.ndarray, "B T"] | None = None
    ends: Bool[np.ndarray, "B T"] | None = None

    def estimate(self, rule: GaeRule, backend: str, chunk_size: int | None) -> list[np.ndarray]:
        """Computes the advantages and returns as `grpo gae` and training do."""
        given = {"mask": self.mask, "ends": self.ends, **rule._asdict()}
        result = generalized_advantages(self.rewards, self.values, **given, backend=backend, chunk_size=chunk_size)
        return [np.asarray(part) for part in result]

    def memory_bytes(self, rule: GaeRule, backend: str, chunk_size: int | None) -> int | None:
        """Returns the bytes of a call's results and temporaries; None if the backend does not report them."""
        if backend == "chunked":
            rows = make_gae_rows(self.rewards, self.values, mask=self.mask, ends=self.ends, bootstrap=None)
            discounts = Discounts.create(rule.gamma, rule.lam)
            program = solve_chunked.lower(rows, discounts, rule.mask_mode, chunk_size or CHUNK_SIZE).compile()
            memory = program.memory_analysis()
            return None if memory is None else memory.temp_size_in_bytes + memory.output_size_in_bytes
        tracemalloc.start()
        try:
            self.estimate(rule, backend, chunk_size)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    def places_of_rows(self) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
        """Returns (row, token) indices that unpack the samples to one per row, and a mask that is False on padding."""
        rows, stops = np.arange(len(self.rewards)), np.full(len(self.rewards), self.row_tokens)
        starts = np.zeros_like(stops)
        if self.ends is not None:
            rows, stops = np.nonzero(self.ends)
            stops = stops + 1
            starts = np.concatenate([[0], stops[:-1]])
        tokens = starts[:, None] + np.arange((stops - starts).max())
        # The tokens after the end of a sample do not affect it.
        return (rows[:, None], np.minimum(tokens, self.row_tokens - 1)), tokens < stops[:, None]

    def loop(self, places: tuple[np.ndarray, np.ndarray], rule: GaeRule) -> Callable[[], Float64[np.ndarray, "2 B T"]]:
        """Returns a function that runs `loop_over_time` on the tokens at the indices `places`."""
        mask, ends = (None if x is None else x[places] for x in (self.mask, self.ends))
        return partial(loop_over_time, self.rewards[places], self.values[places], mask, ends, rule)

    def make_check(self, rule: GaeRule) -> Callable[[Sequence[np.ndarray]], float]:
        """Returns a function that computes `BackendTiming.max_error` of (advantages, returns)."""
        places, is_own = self.places_of_rows()
        exact = self.loop(places, rule)()[:, is_own]

        def error_of(result: Sequence[np.ndarray]) -> float:
            found = np.stack([part[places] for part in result])[:, is_own]
            return float(np.abs(found - exact).max() / max(1.0, np.abs(exact[0]).max()))

        return error_of


def make_workloads(shape: BenchmarkShape) -> list[Workload]:
    """Returns random workloads: full rows, rows with masked tokens, and one packed row of samples, as in training."""
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
        Workload(shape, "full", shape.tokens, rewards, values),
        Workload(shape, "masked", shape.tokens, rewards, values, mask),
        Workload(shape, "packed", num_tokens, packed[0], packed[1], is_token, ends),
    ]


def read_workload(path: Path, settings: Settings, *, mask_mode: str) -> Workload:
    """Reads a file into a workload: samples are packed into one row, as in training; matrices keep their rows.

    Raises:
        InputError: the file cannot be used, or has no tokens or too many.
    """
    file = open_input(path, settings, mask_mode=mask_mode)
    _, num_tokens, _ = file.check()
    if not 0 < num_tokens <= MAX_TOKENS:
        raise InputError(
            f"--input: {path} has {num_tokens:,} tokens, but --bench needs 1 to {MAX_TOKENS:,}; choose another file"
        )
    rows = file.read_rows()
    arrays = rows.rewards, rows.values, rows.mask
    if rows.ends is None:
        shape = BenchmarkShape(*rows.rewards.shape)
        return Workload(shape, "full" if rows.mask is None else "masked", shape.tokens, *arrays)
    stops = np.flatnonzero(rows.ends) + 1
    shape = BenchmarkShape(len(stops), int(np.diff(stops, prepend=0).max()))
    if shape.rows * shape.tokens > MAX_TOKENS:
        raise InputError(
            f"--input: {path}: padded to {shape}, the samples exceed {MAX_TOKENS:,} tokens; use fewer samples"
        )
    return Workload(shape, "packed", num_tokens, *arrays, rows.ends)


def measure_workload(rule: GaeRule, work: Workload, chunk_sizes: Sequence[int]) -> list[BackendTiming]:
    """Times a copy, a loop over time, and every backend with every chunk size."""
    print(f"{work.shape}: {ROW_NAMES[work.rows]}", file=sys.stderr, flush=True)
    num_tokens, error_of = len(work.rewards) * work.row_tokens, work.make_check(rule)
    case, num_bytes = BackendTiming(str(work.shape), work.rows, "copy"), num_tokens * BYTES_PER_TOKEN
    # The loop needs one row per sample.
    cases: list[tuple[BackendTiming, Callable[[], Any], int]] = [
        (case, partial(np.copy, (work.rewards, work.values)), num_bytes),
        (replace(case, backend="loop"), work.loop(work.places_of_rows()[0], rule), num_bytes),
    ]
    num_bytes += num_tokens * (work.mask is not None)
    sizes = [size for size in chunk_sizes if size <= max(work.shape.tokens, CHUNK_SIZES[0])]
    for backend, chunk_size in [("numpy", None), *(("chunked", size) for size in sizes)]:
        call = partial(work.estimate, rule, backend, chunk_size)
        found = {
            "first_call_s": timeit(call, number=1),
            "max_error": error_of(call()),
            "memory_bytes": work.memory_bytes(rule, backend, chunk_size),
        }
        chosen = replace(case, backend=backend, chunk_size=chunk_size, is_auto=backend == "numpy")
        cases.append((replace(chosen, **found), call, num_bytes))
    seconds = time_shuffled([call for _, call, _ in cases])
    medians = [statistics.median(times) for times in seconds]
    speeds = [num_bytes / median / 1e9 for (_, _, num_bytes), median in zip(cases, medians, strict=True)]
    return [
        replace(
            case,
            first_call_s=max(0.0, case.first_call_s - median),
            median_s=median,
            p90_s=float(np.percentile(times, 90)),
            gb_per_s=speed,
            percent_of_copy=100 * speed / speeds[0],
            times_loop=medians[1] / median,
        )
        for (case, _, _), times, median, speed in zip(cases, seconds, medians, speeds, strict=True)
    ]


def time_shuffled(calls: Sequence[Callable[[], Any]]) -> list[list[float]]:
    """Returns the mean seconds of each call in each repeat.

    Each repeat makes all calls in a new random order, so that a disturbance affects all of them, and no call always
    follows the same other call, whose data may still be in the caches.
    """
    times = [[timeit(call, number=1)] for call in calls]
    counts = [max(1, math.ceil(MIN_REPEAT_S / max(first, 1e-7))) for [first] in times]
    rng = np.random.default_rng(0)
    for repeat in range(NUM_REPEATS):
        for i in rng.permutation(len(calls)):
            if times[i][0] <= MAX_CALL_S:
                # The first repeat, a single call, counts only if there is no other.
                times[i] = (times[i] if repeat else []) + [timeit(calls[i], number=counts[i]) / counts[i]]
    return times


def loop_over_time(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray | None, ends: np.ndarray | None, rule: GaeRule
) -> Float64[np.ndarray, "2 B T"]:
    """Computes advantages and returns in float64, one time step after another from the last to the first."""
    mask = np.ones(rewards.shape, bool) if mask is None else mask
    goes_on = np.ones(rewards.shape) if ends is None else ~ends
    rewards, values = rewards.astype(np.float64), values.astype(np.float64)
    if rule.mask_mode == "zero":
        rewards, values = np.where(mask, rewards, 0), np.where(mask, values, 0)
    is_step = mask if rule.mask_mode == "skip" else np.ones(rewards.shape, bool)
    result = np.zeros((2, *rewards.shape))
    advantage, next_value = np.zeros((2, len(rewards)))
    for t in reversed(range(rewards.shape[1])):
        advantage, next_value = advantage * goes_on[:, t], next_value * goes_on[:, t]
        delta = rewards[:, t] + rule.gamma * next_value - values[:, t]
        advantage = np.where(is_step[:, t], delta + rule.gamma * rule.lam * advantage, advantage)
        next_value = np.where(is_step[:, t], values[:, t], next_value)
        result[:, :, t] = np.where(mask[:, t], (advantage, advantage + values[:, t]), 0)
    return result


def describe_fastest(cases: Sequence[BackendTiming]) -> str:
    """Names the fastest backend for each shape and kind of rows, and compares it with the loop and with `auto`."""
    lines = []
    for (shape, rows), group in groupby(cases, key=lambda case: (case.shape, case.rows)):
        best, *others = sorted(group, key=lambda case: case.median_s)
        ratios = {case.is_auto: case.median_s / best.median_s for case in others if case.is_auto or case.name == "loop"}
        auto = next(case.name for case in (best, *others) if case.is_auto)
        names = {False: "the loop", True: f"{auto}, which auto selects"}
        compared = [f"{ratios[is_auto]:.1f} x as fast as {names[is_auto]}" for is_auto in sorted(ratios)]
        fastest = f"{names[True]}," if best.is_auto else best.name
        lines.append(f"{shape}, {ROW_NAMES[rows]}: {fastest} is the fastest, {' and '.join(compared)}")
    return "\n".join(lines)


def format_report(report: dict[str, Any]) -> str:
    """Returns the report as a table with a line for each timing, and the fastest backends below it."""
    cells = []
    for case in report["cases"]:
        error = "" if case["max_error"] is None else f"{case['max_error']:.0e}"
        name, chunk = f"{case['backend']}{'*' if case['is_auto'] else ''}", str(case["chunk_size"] or "")
        times = f"{1e3 * case['median_s']:.3f}", f"{1e3 * case['p90_s']:.3f}"
        factor = "" if case["backend"] == "copy" else f"{case['times_loop']:.1f}"
        speeds = factor, f"{case['percent_of_copy']:.0f}"
        memory = "" if case["memory_bytes"] is None else f"{case['memory_bytes'] / 2**20:.1f}"
        first = f"{case['first_call_s']:.2f}"
        cells.append((case["shape"], case["rows"], name, chunk, first, *times, *speeds, memory, error))
    machine = report["machine"]
    head = f"{machine['device']}, {machine['cpu_cores']} CPU cores, jax {machine['jax']}"
    note = f"* selected by auto; {NUM_REPEATS} warm repeats, shuffled; numpy in and out"
    return "\n".join([head, "", format_table(cells, header=HEADINGS, num_left=0), "", note, "", report["conclusion"]])


def render_benchmark(timings: Sequence[BackendTiming], *, title: str) -> bytes:
    """Returns a PNG with one panel per shape and kind of rows; equal timings give equal bytes."""
    panels = list(dict.fromkeys((t.shape, t.rows) for t in timings))
    with new_figure(max(6.0, 3.6 * len(panels)), 3.8) as figure:
        for axes, (shape, rows) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            for backend, color in COLORS.items():
                shown = [t for t in timings if (t.shape, t.rows, t.backend) == (shape, rows, backend)]
                label = f"{backend} (auto)" if any(t.is_auto for t in shown) else backend
                medians, p90s = [1e3 * t.median_s for t in shown], [1e3 * t.p90_s for t in shown]
                if backend == "chunked":
                    sizes = [t.chunk_size or 0 for t in shown]
                    axes.plot(sizes, medians, color=color, marker="o", markersize=4, label=label)
                    axes.fill_between(sizes, medians, p90s, color=color, alpha=0.15, linewidth=0)
                    axes.set_xticks(sizes, [str(size) for size in sizes])
                else:
                    axes.axhline(medians[0], color=color, linestyle="--" if backend == "copy" else "-", label=label)
                    axes.axhspan(medians[0], p90s[0], color=color, alpha=0.15, linewidth=0)
            axes.set_title(f"{shape}, {ROW_NAMES[rows]}", fontsize=9, loc="left")
            axes.set_xlabel("chunk size, tokens")
            axes.set_ylabel("milliseconds")
            axes.legend(frameon=False, fontsize=7)
        figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
        return save_figure(figure, "png")
