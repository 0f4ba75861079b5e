"""GAE on the CPU against the ways others compute it, in turn in one process, each checked against float64.

    python scripts/bench/gae.py [--shapes 16x8192,128x65536,256x131072] [--repeats 5] [--out FILE.json]

The baselines: slime's loop over time in torch (before its chunk scan), torchrl's vectorised form (left out where
torchrl is not installed), and a loop over time in numpy on time-major deltas. `ours` is `generalized_advantages` as
`auto` takes it, and by each backend; `copy` reads and writes the same 16 bytes a token. Ratios are of medians of the
same rounds. Torch is needed; it has as many threads as there are cores.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from app.advantage.gae.backend_choice import choose_backend
from app.advantage.gae.estimate import BACKENDS, generalized_advantages

GAMMA, LAM = 0.99, 0.95
SHAPES = "16x8192,128x65536,256x131072"
NUM_CHECKED_ROWS = 2
BASELINES = ("slime", "torchrl", "numpy")
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


def slime(rewards: np.ndarray, values: np.ndarray) -> torch.Tensor:
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


def ours(backend: str, rewards: np.ndarray, values: np.ndarray) -> Any:
    return jax.block_until_ready(generalized_advantages(rewards, values, gamma=GAMMA, lam=LAM, backend=backend))


def methods() -> dict[str, Solve]:
    torchrl = torchrl_vectorised()
    return {
        "slime": slime,
        **({} if torchrl is None else {"torchrl": torchrl}),
        "numpy": numpy_time_major,
        "ours auto": partial(ours, "auto"),
        **{f"ours {backend}": partial(ours, backend) for backend in BACKENDS},
    }


def error_of(result: Any, exact: np.ndarray) -> float:
    """Returns the largest error of the advantages of the first rows, divided by max(1, max |A|)."""
    advantages = result[0] if isinstance(result, tuple) else result
    got = np.asarray(advantages[:NUM_CHECKED_ROWS], np.float64)
    return float(np.abs(got - exact).max() / max(1.0, np.abs(exact).max()))


def measure(rows: int, tokens: int, solvers: Mapping[str, Solve], *, repeats: int, longest_s: float) -> dict[str, Any]:
    """Returns medians of rounds in which every method runs once; slow methods run in one round only."""
    rewards, values = np.random.default_rng(0).standard_normal((2, rows, tokens), np.float32)
    exact = oracle(rewards[:NUM_CHECKED_ROWS], values[:NUM_CHECKED_ROWS])
    target = np.empty_like(rewards), np.empty_like(values)

    def copy(rewards: np.ndarray, values: np.ndarray) -> None:
        np.copyto(target[0], rewards)
        np.copyto(target[1], values)

    times: dict[str, list[float]] = {"copy": [], **{name: [] for name in solvers}}
    errors: dict[str, float] = {}
    all_of_them: dict[str, Solve] = {"copy": copy, **solvers}
    for round_number in range(repeats + 1):
        for name, solve in all_of_them.items():
            if round_number > 1 and times[name][0] > longest_s:
                continue
            start = time.perf_counter()
            result = solve(rewards, values)
            taken = time.perf_counter() - start
            if round_number == 0 and name != "copy":
                errors[name] = error_of(result, exact)
            elif round_number:
                times[name].append(taken)
            del result
        print(f"{rows}x{tokens}: round {round_number} of {repeats}", file=sys.stderr, flush=True)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    best = min(medians[name] for name in BASELINES if name in medians)
    choice = choose_backend("auto", (rows, tokens), constant_decay=True)
    return {
        "shape": f"{rows}x{tokens}",
        "auto": f"{choice.backend}: {choice.reason}",
        "median_s": medians,
        "num_rounds": {name: len(taken) for name, taken in times.items()},
        "max_error": errors,
        "times_as_fast_as": {name: medians[name] / medians["ours auto"] for name in medians if name != "ours auto"},
        "times_as_fast_as_the_best_baseline": best / medians["ours auto"],
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
    lines = [f"{measured['shape']}  (auto takes {measured['auto']})"]
    for name, median in measured["median_s"].items():
        error = f"{measured['max_error'][name]:.0e}" if name in measured["max_error"] else ""
        ratio = "" if name == "ours auto" else f"{measured['times_as_fast_as'][name]:8.2f} x ours"
        lines.append(f"  {name:<14} {1e3 * median:10.2f} ms {ratio:>16}  {error:>6}  n={measured['num_rounds'][name]}")
    ratio, copies = measured["times_as_fast_as_the_best_baseline"], measured["copies"]
    lines.append(f"  ours auto is {ratio:.1f} x as fast as the best baseline, and takes {copies:.1f} copies")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--longest-s", type=float, default=3.0, help="slower methods run in one round")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gae_cpu.json")
    arguments = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    machine = describe_machine()
    results = []
    for shape in arguments.shapes.split(","):
        rows, tokens = map(int, shape.split("x"))
        results.append(measure(rows, tokens, methods(), repeats=arguments.repeats, longest_s=arguments.longest_s))
        print(table(results[-1]), flush=True)
    report = {**machine, "gamma": GAMMA, "lam": LAM, "results": results}
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
