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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from app.advantage.gae.backend_choice import choose_backend
from app.advantage.gae.estimate import BACKENDS, generalized_advantages
from app.records.atomic_write import write_atomic
from app.records.jsonl import check_output_path
from app.report.gae_benchmark_plot import render_benchmark
from app.stages.gae import start_local_devices
from app.stages.gae_benchmark_report import (
    BYTES_PER_TOKEN,
    MAX_CALL_S,
    BackendTiming,
    BenchmarkReport,
    CopyTiming,
    conclusion,
    speed_panels,
)
from app.stages.gae_summary import CHUNKED_BACKENDS
from settings import Resolved
from settings.errors import InputError
from settings.schema.settings import AlgorithmSettings

DEFAULT_FOLDER = Path("gae-bench")
CHUNK_SIZES = (64, 128, 256, 512)
NUM_REPEATS = 20
MIN_REPEAT_S = 1e-3
"""A repeat calls as often as fills this, so that the clock does not count."""
MIN_LOOP_S = 2e-2
"""The same where calls are a loop of one program, so that its start does not count."""
MAX_TOKENS = 1 << 30
MASKED_FRACTION = 0.1
NUM_CHECKED_ROWS = 16
"""Compared with float64, spread over all: one step after another in Python, so not every row."""


class BenchmarkShape(NamedTuple):
    rows: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.tokens}"


def run_benchmark(resolved: Resolved, *, shapes: str, out: Path | None) -> BenchmarkReport:
    """Measures, and writes bench.json and bench.png to the folder `out`.

    Raises:
        InputError: shapes that are none, or a folder that cannot be written.
    """
    wanted = parse_shapes(shapes)
    folder = out or DEFAULT_FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--out: {folder.absolute()}: no folder for bench.json and bench.png: {error.strerror}"
        ) from None
    for name in ("bench.json", "bench.png"):
        check_output_path(folder / name)
    start_local_devices(resolved.settings.mesh)
    report = measure_backends(resolved.settings.algorithm, wanted)
    write_atomic(folder / "bench.json", json.dumps(report.to_dict(), indent=2).encode() + b"\n")
    title = f"GAE on {report.machine['device']}: median of {NUM_REPEATS} warm calls, shaded up to the 90th percentile"
    write_atomic(folder / "bench.png", render_benchmark(speed_panels(report), title=title))
    return report


def parse_shapes(text: str) -> list[BenchmarkShape]:
    """`16x8192,256x131072` -> rows and tokens.

    Raises:
        InputError: something else.
    """
    found = []
    for part in text.split(","):
        if not re.fullmatch(r"[1-9]\d{0,9}x[1-9]\d{0,9}", part.strip()):
            raise InputError(
                f"--shapes: expected ROWSxTOKENS,..., as in 16x8192,256x131072, got {part.strip() or text!r}"
            )
        shape = BenchmarkShape(*map(int, part.strip().split("x")))
        if shape.rows * shape.tokens > MAX_TOKENS:
            raise InputError(f"--shapes: {shape} has more than {MAX_TOKENS:,} tokens")
        found.append(shape)
    return list(dict.fromkeys(found))


def measure_backends(
    algorithm: AlgorithmSettings, shapes: Sequence[BenchmarkShape], *, num_repeats: int = NUM_REPEATS
) -> BenchmarkReport:
    """All backends on all shapes, under the settings' gamma, lambda and mask mode."""
    copies: list[CopyTiming] = []
    cases: list[BackendTiming] = []
    for shape in shapes:
        copied, measured = _measure_shape(algorithm, shape, num_repeats)
        copies.append(copied)
        cases += measured
    return BenchmarkReport(
        machine=describe_machine(),
        settings={"gamma": algorithm.gamma, "lam": algorithm.lam, "mask_mode": algorithm.mask_mode},
        method={
            "repeats": num_repeats,
            "timing": "each call until its result is ready" if on_cpu() else "calls in a loop of one program",
            "arrays": "numpy in and out" if on_cpu() else "on the device",
            "bytes_per_token": {"scalar": BYTES_PER_TOKEN, "masked": BYTES_PER_TOKEN + 1},
            "checked_rows": NUM_CHECKED_ROWS,
            "masked_fraction": MASKED_FRACTION,
        },
        copies=tuple(copies),
        cases=tuple(cases),
        conclusion=conclusion(cases),
    )


def on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def describe_machine() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "jax": jax.__version__,
        "numpy": np.__version__,
    }


CallTimer = Callable[[int], float]
"""A number of calls -> seconds of one of them."""


class _TimedCase(NamedTuple):
    measured: BackendTiming
    """Without its times."""
    timer: CallTimer


def _measure_shape(
    algorithm: AlgorithmSettings, shape: BenchmarkShape, num_repeats: int
) -> tuple[CopyTiming, list[BackendTiming]]:
    rng = np.random.default_rng(0)
    rewards, values = rng.standard_normal((2, *shape), np.float32)
    mask = rng.random(shape, np.float32) >= MASKED_FRACTION
    rows = np.unique(np.linspace(0, shape.rows - 1, NUM_CHECKED_ROWS).astype(int))
    # What `grpo gae` is given on a CPU; elsewhere the way to the device would be most of the time.
    place = np.asarray if on_cpu() else jnp.asarray
    cases = []
    for decay, its_mask in (("scalar", None), ("masked", mask)):
        exact = reference_gae(rewards[rows], values[rows], None if its_mask is None else its_mask[rows], algorithm)
        arrays = [place(x) for x in (rewards, values, its_mask) if x is not None]
        for backend, chunk_size, is_auto in _list_cases(algorithm, shape, one_leak=its_mask is None):
            _print_progress(f"{shape} {decay}: {backend}{f', chunks of {chunk_size}' if chunk_size else ''}")
            call = _estimate_call(algorithm, backend, chunk_size)
            blank = BackendTiming(str(shape), decay, backend, chunk_size, is_auto, 0.0, None, None, 0, None, None, 0.0)
            measured = _warm_up(blank, partial(call, *arrays), exact, rows)
            cases.append(_TimedCase(measured, make_timer(call, arrays)))
    _print_progress(f"{shape}: {num_repeats} repeats of each in turn")
    quick = [case for case in cases if case.measured.median_s is not None]
    copy = make_timer(*_copy_call(rewards, values))
    copy_times, *times = time_interleaved([copy, *(case.timer for case in quick)], num_repeats)
    copy_s = statistics.median(copy_times)
    copied = CopyTiming(str(shape), copy_s, p90(copy_times), BYTES_PER_TOKEN * shape.rows * shape.tokens / copy_s / 1e9)
    timed = dict(zip(map(id, quick), times, strict=True))
    return copied, [_with_times(case.measured, timed.get(id(case), []), copied, shape) for case in cases]


def _copy_call(rewards: np.ndarray, values: np.ndarray) -> tuple[Callable[..., Any], list[Any]]:
    """A call that reads and writes both, and its arguments: numpy's on a CPU, as those of an estimate."""
    if on_cpu():
        return (lambda rewards, values: (rewards.copy(), values.copy())), [rewards, values]
    # Times a number that the compiler does not know: else no byte would be moved.
    arguments = [jnp.asarray(rewards), jnp.asarray(values), jnp.float32(1.0)]
    return jax.jit(lambda rewards, values, one: (rewards * one, values * one)), arguments


def _estimate_call(algorithm: AlgorithmSettings, backend: str, chunk_size: int | None) -> Callable[..., Any]:
    """(rewards, values) or (rewards, values, mask) -> advantages and returns, numpy's on a CPU."""

    def estimate(rewards: Any, values: Any, mask: Any = None) -> Any:
        credit = generalized_advantages(
            rewards, values, mask=mask, gamma=algorithm.gamma, lam=algorithm.lam, mask_mode=algorithm.mask_mode,
            backend=backend, chunk_size=chunk_size,
        )  # fmt: skip
        return tuple(map(np.asarray, credit)) if on_cpu() else tuple(credit)

    return estimate


def _list_cases(
    algorithm: AlgorithmSettings, shape: BenchmarkShape, *, one_leak: bool
) -> Iterator[tuple[str, int | None, bool]]:
    """(backend, chunk size, whether auto takes it) of every case."""
    take = partial(choose_backend, shape=shape, constant_decay=one_leak, chunk_size=algorithm.gae_chunk_size)
    auto = take("auto")
    sizes = {*CHUNK_SIZES, algorithm.gae_chunk_size, auto.chunk_size} - {None}
    for backend in BACKENDS:
        if take(backend).backend != backend:
            continue  # Another one stands in for it here.
        for size in sorted(sizes) if backend in CHUNKED_BACKENDS else (None,):
            is_auto = (backend, size) == auto[:2]
            if is_auto or size is None or size <= shape.tokens:
                yield backend, size, is_auto


def _warm_up(blank: BackendTiming, call: Callable[[], Any], expected: np.ndarray, rows: np.ndarray) -> BackendTiming:
    """The case compiled and checked; `median_s` is what one warm call took, None where that is too long."""
    start = time.perf_counter()
    credit = jax.block_until_ready(call())
    first = time.perf_counter() - start
    got = np.stack([np.asarray(part[rows], np.float64) for part in credit])
    error = float(np.abs(got - expected).max() / max(1.0, np.abs(expected[0]).max()))
    del credit, got
    start = time.perf_counter()
    jax.block_until_ready(call())
    warm = time.perf_counter() - start
    return replace(
        blank,
        first_call_s=max(first - warm, 0.0),
        median_s=warm if warm <= MAX_CALL_S else None,
        max_error=error,
    )


def make_timer(call: Callable[..., Any], arrays: Sequence[Any]) -> CallTimer:
    """What fits the device."""
    return time_one_by_one(partial(call, *arrays)) if on_cpu() else time_in_device_loop(call, arrays)


def time_one_by_one(call: Callable[[], Any]) -> CallTimer:
    """Each call until its result is there: XLA's calls return before, also on a CPU, and would overlap."""

    def seconds(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            jax.block_until_ready(call())
        return (time.perf_counter() - start) / count

    return seconds


def time_in_device_loop(call: Callable[..., Any], arrays: Sequence[Any]) -> CallTimer:
    """All calls in one program: the device's own time, without that of the host, which is more for a small call."""

    @partial(jax.jit, static_argnums=0)
    def many(count: int, arrays: Sequence[Any]) -> Any:
        def once(_: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            # Behind the barrier the arrays are not those of the last round, to the compiler: nothing leaves the loop.
            return jax.lax.optimization_barrier((carry[0], call(*carry[0])))

        blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(call, *arrays))
        return jax.lax.fori_loop(0, count, once, (list(arrays), blank))[1]

    compiled: set[int] = set()

    def seconds(count: int) -> float:
        # The number of rounds is fixed when it is compiled: else the host would be asked before each of them.
        rounds = 1 << (count - 1).bit_length()
        if rounds not in compiled:
            jax.block_until_ready(many(rounds, list(arrays)))
            compiled.add(rounds)
        start = time.perf_counter()
        jax.block_until_ready(many(rounds, list(arrays)))
        return (time.perf_counter() - start) / rounds

    return seconds


def time_interleaved(timers: Sequence[CallTimer], num_repeats: int) -> list[list[float]]:
    """Seconds of each call, repeat after repeat, the calls in turn: what disturbs the machine disturbs all of them."""
    shortest = MIN_REPEAT_S if on_cpu() else MIN_LOOP_S
    counts = [max(1, math.ceil(shortest / max(seconds(1), 1e-7))) for seconds in timers]
    times: list[list[float]] = [[] for _ in timers]
    for _ in range(num_repeats):
        for seconds, count, taken in zip(timers, counts, times, strict=True):
            taken.append(seconds(count))
    return times


def _with_times(
    measured: BackendTiming, times: Sequence[float], copy_timing: CopyTiming, shape: BenchmarkShape
) -> BackendTiming:
    if not times:
        return replace(measured, median_s=None)
    median = statistics.median(times)
    bytes_per_token = BYTES_PER_TOKEN + (measured.decay == "masked")
    gb_per_s = bytes_per_token * shape.rows * shape.tokens / median / 1e9
    return replace(
        measured,
        median_s=median,
        p90_s=p90(times),
        num_repeats=len(times),
        gb_per_s=gb_per_s,
        percent_of_copy=100 * gb_per_s / copy_timing.gb_per_s,
    )


def p90(times: Sequence[float]) -> float:
    return float(np.percentile(times, 90))


def reference_gae(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray | None, algorithm: AlgorithmSettings
) -> np.ndarray:
    """Advantages and returns in float64, [2, B, T], one step after another as in the paper."""
    written = np.ones(rewards.shape, bool) if mask is None else mask
    # Time-major: a step is a row.
    rewards, values, written = (np.ascontiguousarray(x.T, kind) for x, kind in (
        (rewards, np.float64), (values, np.float64), (written, bool)
    ))  # fmt: skip
    if algorithm.mask_mode == "zero":
        rewards, values = np.where(written, rewards, 0), np.where(written, values, 0)
    is_step = written if algorithm.mask_mode == "skip" else np.ones(rewards.shape, bool)
    result = np.zeros((2, *rewards.shape))
    advantage, next_value = np.zeros((2, rewards.shape[1]))
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + algorithm.gamma * next_value - values[t]
        advantage = np.where(is_step[t], delta + algorithm.gamma * algorithm.lam * advantage, advantage)
        next_value = np.where(is_step[t], values[t], next_value)
        result[:, t] = np.where(written[t], (advantage, advantage + values[t]), 0)
    return result.transpose(0, 2, 1)


def _print_progress(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)
