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
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from app.advantage.gae.backend_choice import choose_backend
from app.advantage.gae.estimate import BACKENDS, generalized_advantages
from app.mesh.axis_rules import current_device
from app.records.atomic_write import write_atomic
from app.records.jsonl import check_output_path
from app.records.text_format import format_table
from app.report.gae_benchmark_plot import DECAY_NAMES, BackendTiming, render_benchmark
from app.stages.gae import start_local_devices
from settings import Resolved
from settings.errors import InputError
from settings.schema.algorithm import AlgorithmSettings

CHUNK_SIZES = (64, 128, 256, 512)
NUM_REPEATS = 20
MIN_REPEAT_S = 1e-3
"""Calls are repeated until they take this long, so that the clock's resolution does not matter."""
MAX_CALL_S = 2.0
"""Cases with slower calls are left out: twenty repeats would take most of a minute."""
MAX_TOKENS = 1 << 30
BYTES_PER_TOKEN = 16
"""Reward and value are read, advantage and return are written, in float32; a mask adds one byte."""
MIN_SPEEDUP = 1.1
"""Smallest ratio of two medians that counts as a difference on a shared machine."""
MASKED_FRACTION = 0.1
NUM_CHECKED_ROWS = 16
"""Number of rows compared with float64 results, evenly spaced from the first to the last."""
HEADINGS = ("shape", "decay", "backend", "chunk", "compile s", "median ms", "p90 ms", "GB/s", "% of copy", "max error")


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
    start_local_devices(resolved.settings.mesh)
    algorithm = resolved.settings.algorithm
    timings = [timing for shape in parsed_shapes for timing in measure_shape(algorithm, shape)]
    cases = [timing for timing in timings if timing.backend != "copy"]
    device = jax.devices()[0]
    report = {
        "machine": {
            "device": device.device_kind,
            "platform": device.platform,
            "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "jax": jax.__version__,
            "numpy": np.__version__,
        },
        "settings": {"gamma": algorithm.gamma, "lam": algorithm.lam, "mask_mode": algorithm.mask_mode},
        "method": {
            "repeats": NUM_REPEATS,
            "timing": "each call until its result is ready" if on_cpu() else "calls dispatched back to back",
            "arrays": "numpy in and out" if on_cpu() else "on the device",
            "bytes_per_token": {"scalar": BYTES_PER_TOKEN, "masked": BYTES_PER_TOKEN + 1},
            "checked_rows": NUM_CHECKED_ROWS,
            "masked_fraction": MASKED_FRACTION,
        },
        "copies": [asdict(timing) for timing in timings if timing.backend == "copy"],
        "cases": [asdict(case) for case in cases],
        "conclusion": conclude(cases),
    }
    write_atomic(folder / "bench.json", json.dumps(report, indent=2).encode() + b"\n")
    title = f"GAE on {device.device_kind}: median of {NUM_REPEATS} warm calls, shaded up to the 90th percentile"
    write_atomic(folder / "bench.png", render_benchmark(timings, title=title))
    return report


def on_cpu() -> bool:
    return current_device()[0] == "cpu"


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


def measure_shape(
    algorithm: AlgorithmSettings, shape: BenchmarkShape, *, num_repeats: int = NUM_REPEATS
) -> list[BackendTiming]:
    """Returns the timings of a copy and of every backend, with the settings' gamma, lambda and mask mode."""
    rng = np.random.default_rng(0)
    rewards, values = rng.standard_normal((2, *shape), np.float32)
    mask = rng.random(shape, np.float32) >= MASKED_FRACTION
    rows = np.unique(np.linspace(0, shape.rows - 1, NUM_CHECKED_ROWS).astype(int))
    # On a CPU, numpy arrays, as in `grpo gae`; elsewhere the transfer to the device would dominate.
    place = np.asarray if on_cpu() else jnp.asarray
    arrays = place(rewards), place(values)
    timings = [BackendTiming(str(shape), "", "copy")]
    calls: list[Callable[[], Any] | None] = [make_copy_call(*arrays)]
    for decay, case_mask in (("scalar", None), ("masked", mask)):
        exact = reference_gae(rewards[rows], values[rows], None if case_mask is None else case_mask[rows], algorithm)
        placed_mask = None if case_mask is None else place(case_mask)
        for backend, chunk_size, is_auto in list_cases(algorithm, shape, constant_decay=case_mask is None):
            timing = BackendTiming(str(shape), decay, backend, chunk_size, is_auto)
            _print_progress(f"{shape} {decay}: {timing.name}")
            call = partial(
                generalized_advantages, *arrays, mask=placed_mask, gamma=algorithm.gamma, lam=algorithm.lam,
                mask_mode=algorithm.mask_mode, backend=backend, chunk_size=chunk_size,
            )  # fmt: skip
            start = time.perf_counter()
            result = jax.block_until_ready(call())
            first_s = time.perf_counter() - start
            got = np.stack([np.asarray(part[rows], np.float64) for part in result])
            error = float(np.abs(got - exact).max() / max(1.0, np.abs(exact[0]).max()))
            warm_s = time_calls(call, 1)
            timings.append(replace(timing, first_call_s=max(first_s - warm_s, 0.0), max_error=error))
            calls.append(call if warm_s <= MAX_CALL_S else None)
    _print_progress(f"{shape}: {num_repeats} repeats of each case, in turn")
    times = iter(time_interleaved([call for call in calls if call is not None], num_repeats))
    num_tokens = shape.rows * shape.tokens
    timed: list[BackendTiming] = []
    for timing, call in zip(timings, calls, strict=True):
        if call is not None:
            seconds = next(times)
            median = statistics.median(seconds)
            speed = (BYTES_PER_TOKEN + (timing.decay == "masked")) * num_tokens / median / 1e9
            percent = 100 * speed / ((timed[0].gb_per_s if timed else None) or speed)
            p90 = float(np.percentile(seconds, 90))
            timing = replace(timing, median_s=median, p90_s=p90, num_repeats=len(seconds), gb_per_s=speed,
                             percent_of_copy=percent)  # fmt: skip
        timed.append(timing)
    return timed


def make_copy_call(rewards: Any, values: Any) -> Callable[[], Any]:
    """Returns a function that copies both arrays, with NumPy on a CPU."""
    if on_cpu():
        return lambda: (rewards.copy(), values.copy())
    # Multiplies by a number unknown to the compiler, which would otherwise remove the copy.
    return partial(jax.jit(lambda x, y, one: (x * one, y * one)), rewards, values, jnp.float32(1.0))


def list_cases(
    algorithm: AlgorithmSettings, shape: BenchmarkShape, *, constant_decay: bool
) -> Iterator[tuple[str, int | None, bool]]:
    """Yields (backend, chunk size, whether `auto` selects it) for every case."""
    choose = partial(choose_backend, shape=shape, constant_decay=constant_decay, chunk_size=algorithm.gae_chunk_size)
    auto = choose("auto")
    for backend in BACKENDS:
        if (choice := choose(backend)).backend != backend:
            continue  # Another backend would run instead.
        has_chunks = choice.chunk_size is not None
        sizes = {*CHUNK_SIZES, algorithm.gae_chunk_size, auto.chunk_size} - {None} if has_chunks else {None}
        for size in sorted(sizes, key=lambda size: size or 0):
            is_auto = (backend, size) == auto[:2]
            if is_auto or size is None or size <= shape.tokens:
                yield backend, size, is_auto


def time_calls(call: Callable[[], Any], count: int) -> float:
    """Returns the mean time of `count` calls, in seconds."""
    start = time.perf_counter()
    result = None
    for _ in range(count):
        result = call()
        if on_cpu():  # XLA's CPU calls return early and would overlap.
            jax.block_until_ready(result)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / count


def time_interleaved(calls: Sequence[Callable[[], Any]], num_repeats: int) -> list[list[float]]:
    """Returns the mean seconds of each call in each repeat.

    The calls take turns, so that a disturbance affects all of them.
    """
    counts = [max(1, math.ceil(MIN_REPEAT_S / max(time_calls(call, 1), 1e-7))) for call in calls]
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(num_repeats):
        for call, count, seconds in zip(calls, counts, times, strict=True):
            seconds.append(time_calls(call, count))
    return times


def reference_gae(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray | None, algorithm: AlgorithmSettings
) -> np.ndarray:
    """Returns advantages and returns, [2, B, T] in float64, computed one step at a time as in the paper."""
    mask = np.ones(rewards.shape, bool) if mask is None else mask
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
    """Returns, for each shape and kind of decay, whether the chunk scan pays and whether `auto` selects the fastest."""
    lines = []
    for (shape, decay), group in groupby(cases, key=lambda case: (case.shape, case.decay)):
        ranked = sorted(group, key=lambda case: case.median_s or math.inf)
        chunked = next((c for c in ranked if c.chunk_size is not None), None)
        other = next((c for c in ranked if c.chunk_size is None), None)
        speedup = _seconds(other) / _seconds(chunked) if chunked and chunked.median_s else 0.0
        verdict = "pays" if speedup >= MIN_SPEEDUP else "makes no difference"
        verdict = "does not pay" if speedup <= 1 / MIN_SPEEDUP else verdict
        compared = ", ".join(_describe(case) for case in (chunked, other) if case is not None)
        line = f"{shape} with {DECAY_NAMES[decay]}: chunk-scan {verdict} ({compared})"
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
        cells.append((case["shape"], case["decay"], name, chunk, f"{case['first_call_s']:.2f}", *ms, error))
    machine, method = report["machine"], report["method"]
    note = (
        f"* selected by auto; {method['repeats']} warm repeats, in turn; {method['timing']}; arrays: {method['arrays']}"
    )
    head = f"{machine['device']}, {machine['cpu_cores']} CPU cores, jax {machine['jax']}"
    return "\n".join([head, "", format_table(cells, header=HEADINGS, num_left=0), "", note, "", report["conclusion"]])


def _print_progress(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)
