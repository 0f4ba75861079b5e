"""GAE on the CPU against the ways others compute it, in turn in the same processes, each checked against float64.

    python scripts/bench/gae.py [--shapes 16x8192,128x65536,256x131072] [--repeats 3] [--processes 3] [--out FILE.json]

The baselines: slime's loop over time in torch, its chunk scan (128 steps), torchrl's vectorised form (left out where
torchrl is not installed), and a loop over time in numpy on time-major deltas. `ours` is `generalized_advantages` as
`auto` takes it, and by the other backends; `copy` reads and writes 16 bytes a token. All get numpy arrays: full rows;
rows with 10 % of their tokens masked; and samples of log-normal lengths in one row, as training concatenates them. The
baselines know neither masks nor such rows, so for them tokens are moved to one padded row per sample and back, which
counts. Only ours also compute returns. Ratios are of medians over the rounds of all processes, each in another order.
Torch is needed; it has as many threads as there are cores.
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
from typing import Any, NamedTuple

import numpy as np
import torch

from app.advantage.gae.estimate import BACKENDS, generalized_advantages

GAMMA, LAM = 0.99, 0.95
SHAPES = "16x8192,128x65536,256x131072"
NUM_CHECKED_ROWS = 2
KINDS = ("full", "masked", "packed")
MASKED_FRACTION = 0.1
LENGTH_SIGMA = 0.6
"""Standard deviation of the logarithms of packed samples' lengths; their median is half of T, their maximum T."""
BASELINES = ("slime loop", "slime chunked", "torchrl", "numpy")
SLIME_CHUNK = 128
Solve = Callable[[np.ndarray, np.ndarray], Any]
"""Maps (rewards, values), [B, T] float32, to advantages, and to returns if the method computes them."""


def oracle(rewards: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Computes GAE in float64, one step after another."""
    rewards, values = rewards.astype(np.float64), values.astype(np.float64)
    advantages = np.zeros_like(rewards)
    advantage, next_value = np.zeros((2, len(rewards)))
    for t in reversed(range(rewards.shape[1])):
        advantage = rewards[:, t] + GAMMA * next_value - values[:, t] + GAMMA * LAM * advantage
        advantages[:, t], next_value = advantage, values[:, t]
    return advantages


def slime_loop(rewards: np.ndarray, values: np.ndarray) -> torch.Tensor:
    """Computes advantages by the loop of slime's `vanilla_gae`, without returns."""
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
    """Computes advantages by slime's chunk scan (THUDM/slime#850): products in chunks, a loop over their carries."""
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
    """Returns torchrl's `vec_generalized_advantage_estimate`; None if it is not installed."""
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
    """Computes all deltas, then loops over contiguous rows of one time step; the result is a transposed view."""
    deltas = rewards - values
    deltas[:, :-1] += np.float32(GAMMA) * values[:, 1:]
    deltas = np.ascontiguousarray(deltas.T)
    decay = np.float32(GAMMA * LAM)
    for t in range(len(deltas) - 2, -1, -1):
        deltas[t] += decay * deltas[t + 1]
    return deltas.T


class Tokens(NamedTuple):
    """Tokens of samples: their rows and columns in a padded matrix, and the same as one row with ends and a mask."""

    rewards: np.ndarray
    values: np.ndarray
    """[B, T], or [1, N] if `ends` is given."""
    mask: np.ndarray | None = None
    ends: np.ndarray | None = None


def make_tokens(kind: str, rows: int, tokens: int) -> Tokens:
    """Returns full rows, rows with a random mask, or samples of log-normal lengths in one row, as training has them."""
    rng = np.random.default_rng(0)
    rewards, values = rng.standard_normal((2, rows, tokens), np.float32)
    if kind == "full":
        return Tokens(rewards, values)
    if kind == "masked":
        return Tokens(rewards, values, rng.random((rows, tokens), np.float32) >= MASKED_FRACTION)
    lengths = np.clip(rng.lognormal(np.log(tokens / 2), LENGTH_SIGMA, rows), 1, tokens).astype(int)
    rewards, values = (x.reshape(1, -1)[:, : lengths.sum()].copy() for x in (rewards, values))
    ends = np.zeros(rewards.shape, bool)
    ends[0, np.cumsum(lengths) - 1] = True
    return Tokens(rewards, values, None, ends)


def padded(of: Tokens) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Returns rewards and values as the baselines need them, one sample per row, and where its tokens are."""
    if of.mask is None and of.ends is None:
        return of.rewards, of.values, None
    if of.ends is not None:
        counts, place = np.diff(np.append(-1, np.flatnonzero(of.ends))), np.ones(of.rewards.shape, bool)
    else:
        assert of.mask is not None
        counts, place = of.mask.sum(axis=1), of.mask
    is_token = np.arange(counts.max()) < counts[:, None]
    rewards, values = np.zeros(is_token.shape, np.float32), np.zeros(is_token.shape, np.float32)
    rewards[is_token], values[is_token] = of.rewards[place], of.values[place]
    return rewards, values, is_token


def by_rows(solve: Solve, of: Tokens) -> np.ndarray:
    """Computes advantages by a baseline, from the same arrays that ours gets and back."""
    rewards, values, is_token = padded(of)
    result = np.asarray(solve(rewards, values))
    if is_token is None:
        return result
    advantages = np.zeros(of.rewards.shape, np.float32)
    advantages[np.ones_like(of.rewards, bool) if of.mask is None else of.mask] = result[is_token]
    return advantages


def ours(backend: str, of: Tokens) -> np.ndarray:
    rest = {"mask": of.mask, "ends": of.ends, "gamma": GAMMA, "lam": LAM, "backend": backend}
    advantages, returns = map(np.asarray, generalized_advantages(of.rewards, of.values, **rest))
    assert returns.shape == advantages.shape
    return advantages


def methods() -> dict[str, Callable[[Tokens], np.ndarray]]:
    torchrl = torchrl_vectorised()
    baselines = {"slime loop": slime_loop, "slime chunked": slime_chunked, "numpy": numpy_time_major}
    if torchrl is not None:
        baselines["torchrl"] = torchrl
    return {
        **{name: partial(by_rows, solve) for name, solve in baselines.items()},
        "ours auto": partial(ours, "auto"),
        **{f"ours {backend}": partial(ours, backend) for backend in BACKENDS if backend != "fused"},
    }


def error_of(advantages: np.ndarray, of: Tokens) -> float:
    """Returns the largest error of the advantages of the first samples, divided by max(1, max |A|)."""
    part = np.s_[:NUM_CHECKED_ROWS]
    if of.ends is not None:
        part = np.s_[:, : np.flatnonzero(of.ends)[NUM_CHECKED_ROWS - 1] + 1]
    given = {name: x[part] for name, x in of._asdict().items() if x is not None}
    exact, advantages = by_rows(oracle, Tokens(**given)), advantages[part]
    return float(np.abs(advantages - exact).max() / max(1.0, np.abs(exact).max()))


def measure(
    kind: str, rows: int, tokens: int, solvers: Mapping[str, Callable[[Tokens], np.ndarray]], *, repeats: int,
    longest_s: float,
) -> dict[str, Any]:  # fmt: skip
    """Returns the seconds of rounds in which every method runs once, in another order each; slow ones run once."""
    of = make_tokens(kind, rows, tokens)
    target = np.empty_like(of.rewards), np.empty_like(of.values)

    def copy(of: Tokens) -> None:
        np.copyto(target[0], of.rewards)
        np.copyto(target[1], of.values)

    all_of_them: dict[str, Callable[[Tokens], Any]] = {"copy": copy, **solvers}
    times: dict[str, list[float]] = {name: [] for name in all_of_them}
    errors: dict[str, float] = {}
    order = np.random.default_rng(os.getpid())
    for round_number in range(repeats + 1):
        for name in order.permutation(list(all_of_them)).tolist():
            if times[name] and times[name][0] > longest_s:
                continue
            start = time.perf_counter()
            result = all_of_them[name](of)
            taken = time.perf_counter() - start
            if name != "copy" and name not in errors:
                errors[name] = error_of(result, of)
            # The first round compiles.
            if round_number:
                times[name].append(taken)
            del result
    print(f"{kind} {rows}x{tokens}", file=sys.stderr, flush=True)
    return {"kind": kind, "shape": f"{rows}x{tokens}", "seconds": times, "max_error": errors}


def merge(processes: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns medians over the rounds of all processes, and ratios."""
    first = processes[0]
    seconds = {name: [s for one in processes for s in one["seconds"][name]] for name in first["seconds"]}
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    best = min((name for name in BASELINES if name in medians), key=medians.__getitem__)
    return {
        "kind": first["kind"],
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
    lines = [f"{measured['shape']} {measured['kind']}"]
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
        measure(kind, rows, tokens, solvers, repeats=arguments.repeats, longest_s=arguments.longest_s)
        for rows, tokens in (map(int, shape.split("x")) for shape in arguments.shapes.split(","))
        for kind in KINDS
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
