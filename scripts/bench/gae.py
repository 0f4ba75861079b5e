"""Compares GAE on the CPU with other implementations in the same processes, and checks each against float64.

    python scripts/bench/gae.py [--shapes 16x8192,128x65536,256x131072] [--repeats 3] [--processes 3] [--out FILE.json]

The baselines are slime's loop over time in torch, its chunk scan (128 steps), torchrl's vectorised form (omitted if
torchrl is not installed), and a loop over time in numpy on time-major deltas. `ours auto` and `ours chunked` are
`generalized_advantages` with the backends `numpy` and `chunked`; `copy` reads and writes 16 bytes per token. All get
numpy arrays: full rows; rows with 10 % of their tokens masked; and concatenated samples of log-normal lengths in one
row, as in training. The baselines support neither masks nor concatenated samples, so their time includes moving the
tokens to one padded row per sample and back. Only our methods also compute returns. Ratios are between medians over all
rounds of all processes; each process runs the methods in a different order. Torch must be installed, and uses one
thread per core.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.stages.gae_benchmark import BenchmarkShape, GaeRule, Workload, make_workloads, parse_shapes

GAMMA, LAM = 0.99, 0.95
SHAPES = "16x8192,128x65536,256x131072"
RULE = GaeRule(GAMMA, LAM)
BASELINES = ("slime loop", "slime chunked", "torchrl", "numpy")
SLIME_CHUNK = 128
Solve = Callable[[np.ndarray, np.ndarray], Any]
"""Computes advantages, and possibly returns, from rewards and values, [B, T] float32."""


def slime_loop(rewards: np.ndarray, values: np.ndarray) -> torch.Tensor:
    """Computes advantages like slime's `vanilla_gae`, by a loop over time, without returns."""
    r, v = torch.from_numpy(rewards), torch.from_numpy(values)
    num_tokens = r.shape[1]
    last = torch.zeros(len(r))
    reversed_advantages = []
    for t in reversed(range(num_tokens)):
        next_value = v[:, t + 1] if t < num_tokens - 1 else 0.0
        last = r[:, t] + GAMMA * next_value - v[:, t] + GAMMA * LAM * last
        reversed_advantages.append(last)
    return torch.stack(reversed_advantages[::-1], dim=1)


def slime_chunked(rewards: np.ndarray, values: np.ndarray) -> torch.Tensor:
    """Computes advantages by slime's chunk scan (THUDM/slime#850): matmuls within chunks, and a loop over chunks."""
    r, v = torch.from_numpy(rewards), torch.from_numpy(values)
    num_tokens, decay = r.shape[1], GAMMA * LAM
    next_values = torch.cat([v[:, 1:], torch.zeros_like(v[:, :1])], dim=1)
    reversed_deltas = torch.flip(r + GAMMA * next_values - v, dims=[1])
    padded = torch.nn.functional.pad(reversed_deltas, (0, -num_tokens % SLIME_CHUNK))
    chunks = padded.view(len(r), -1, SLIME_CHUNK)
    apart = torch.arange(SLIME_CHUNK) - torch.arange(SLIME_CHUNK)[:, None]
    kernel = torch.where(apart >= 0, torch.pow(torch.tensor(decay), apart.clamp(min=0)), torch.tensor(0.0))
    powers = torch.pow(torch.tensor(decay), torch.arange(1, SLIME_CHUNK + 1))
    local = chunks @ kernel
    carry = torch.zeros(len(r))
    for chunk in range(local.shape[1]):
        local[:, chunk] += carry[:, None] * powers
        carry = local[:, chunk, -1]
    return torch.flip(local.view(len(r), -1)[:, :num_tokens], dims=[1])


def torchrl_vectorised() -> Solve | None:
    """Returns torchrl's `vec_generalized_advantage_estimate`, or None if torchrl is not installed."""
    try:
        functional: Any = importlib.import_module("torchrl.objectives.value.functional")
    except ImportError as error:
        print(f"torchrl is left out: {error}", file=sys.stderr)
        return None

    def solve(rewards: np.ndarray, values: np.ndarray) -> torch.Tensor:
        r, v = (torch.from_numpy(x).unsqueeze(-1) for x in (rewards, values))
        next_values = torch.cat([v[:, 1:], torch.zeros_like(v[:, :1])], dim=1)
        done = torch.zeros(r.shape, dtype=torch.bool)
        done[:, -1] = True
        return functional.vec_generalized_advantage_estimate(GAMMA, LAM, v, next_values, r, done, done)[0].squeeze(-1)

    return solve


def numpy_time_major(rewards: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Computes advantages from deltas stored as [T, B], so that each step of the loop reads contiguous memory."""
    deltas = rewards - values
    deltas[:, :-1] += np.float32(GAMMA) * values[:, 1:]
    deltas = np.ascontiguousarray(deltas.T)
    decay = np.float32(GAMMA * LAM)
    for t in range(len(deltas) - 2, -1, -1):
        deltas[t] += decay * deltas[t + 1]
    return deltas.T


def by_rows(solve: Solve, work: Workload) -> np.ndarray:
    """Computes advantages with a baseline on one padded row per sample, and moves them to the rows of `work`."""
    if work.mask is None:
        return np.asarray(solve(work.rewards, work.values))
    lengths = work.mask.sum(axis=1) if work.ends is None else np.diff(np.flatnonzero(work.ends), prepend=-1)
    is_token = np.arange(max(lengths)) < lengths[:, None]
    rewards, values = np.zeros(is_token.shape, np.float32), np.zeros(is_token.shape, np.float32)
    rewards[is_token], values[is_token] = work.rewards[work.mask], work.values[work.mask]
    advantages = np.zeros(work.rewards.shape, np.float32)
    advantages[work.mask] = np.asarray(solve(rewards, values))[is_token]
    return advantages


def ours(backend: str, work: Workload) -> np.ndarray:
    return work.estimate(RULE, backend, None)[0]


def methods() -> dict[str, Callable[[Workload], np.ndarray]]:
    torchrl = torchrl_vectorised()
    baselines = {"slime loop": slime_loop, "slime chunked": slime_chunked, "numpy": numpy_time_major}
    if torchrl is not None:
        baselines["torchrl"] = torchrl
    return {
        **{name: partial(by_rows, solve) for name, solve in baselines.items()},
        "ours auto": partial(ours, "numpy"),
        "ours chunked": partial(ours, "chunked"),
    }


def measure(
    work: Workload, shape: BenchmarkShape, solvers: Mapping[str, Callable[[Workload], np.ndarray]], *, repeats: int,
    longest_s: float,
) -> dict[str, Any]:  # fmt: skip
    """Times all methods in rounds of random order; a method that takes longer than `longest_s` is timed only once."""
    target = np.empty_like(work.rewards), np.empty_like(work.values)
    is_written = True if work.mask is None else work.mask

    def copy(work: Workload) -> None:
        np.copyto(target[0], work.rewards)
        np.copyto(target[1], work.values)

    all_of_them: dict[str, Callable[[Workload], Any]] = {"copy": copy, **solvers}
    times: dict[str, list[float]] = {name: [] for name in all_of_them}
    errors: dict[str, float] = {}
    error_of = work.make_check(RULE)
    order = np.random.default_rng(os.getpid())
    for round_number in range(repeats + 1):
        for name in order.permutation(list(all_of_them)).tolist():
            if times[name] and times[name][0] > longest_s:
                continue
            start = time.perf_counter()
            result = all_of_them[name](work)
            taken = time.perf_counter() - start
            if name != "copy" and name not in errors:
                errors[name] = error_of([result, result + np.where(is_written, work.values, 0)])
            # The first round compiles and is not timed.
            if round_number:
                times[name].append(taken)
            del result
    print(f"{work.rows} {shape}", file=sys.stderr, flush=True)
    return {"rows": work.rows, "shape": str(shape), "seconds": times, "max_error": errors}


def merge(processes: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the median seconds of each method over the rounds of all processes, and their ratios."""
    first = processes[0]
    seconds = {name: [s for one in processes for s in one["seconds"][name]] for name in first["seconds"]}
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    best = min((name for name in BASELINES if name in medians), key=medians.__getitem__)
    return {
        "rows": first["rows"],
        "shape": first["shape"],
        "median_s": medians,
        "num_rounds": {name: len(taken) for name, taken in seconds.items()},
        "max_error": {name: max(one["max_error"][name] for one in processes) for name in first["max_error"]},
        "times_as_fast_as": {name: medians[name] / medians["ours auto"] for name in medians if name != "ours auto"},
        "best_baseline": best,
        "times_as_fast_as_the_best_baseline": medians[best] / medians["ours auto"],
        "copies": medians["ours auto"] / medians["copy"],
    }


def describe_machine() -> dict[str, Any]:
    packages = ("jax", "numpy", "torch", "torchrl")
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: found for name in packages if (found := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def table(measured: Mapping[str, Any]) -> str:
    lines = [f"{measured['shape']} {measured['rows']}"]
    for name, median in measured["median_s"].items():
        error = f"{measured['max_error'][name]:.0e}" if name in measured["max_error"] else ""
        ratio = "" if name == "ours auto" else f"{measured['times_as_fast_as'][name]:8.2f} x ours"
        lines.append(f"  {name:<14} {1e3 * median:10.2f} ms {ratio:>16}  {error:>6}  n={measured['num_rounds'][name]}")
    ratio, copies = measured["times_as_fast_as_the_best_baseline"], measured["copies"]
    lines.append(f"  ours auto is {ratio:.1f} x as fast as {measured['best_baseline']}, and takes {copies:.1f} copies")
    return "\n".join(lines)


def measure_all(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    solvers = methods()
    return [
        measure(work, shape, solvers, repeats=arguments.repeats, longest_s=arguments.longest_s)
        for shape in parse_shapes(arguments.shapes)
        for work in make_workloads(shape)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--repeats", type=int, default=3, help="rounds in each process")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--longest-s", type=float, default=1.0, help="slower methods run once in each process")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gae_cpu.json")
    arguments = parser.parse_args()
    machine = describe_machine()
    processes = []
    for _ in range(arguments.processes):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            processes.append(pool.submit(measure_all, arguments).result())
    results = [merge(list(same)) for same in zip(*processes, strict=True)]
    print("\n".join(map(table, results)))
    report = {**machine, "processes": arguments.processes, "gamma": GAMMA, "lam": LAM, "results": results}
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
