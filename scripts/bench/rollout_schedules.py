"""What each scheduling policy makes of log-normal lengths, on the virtual clock; and 10,000 rollouts under faults.

    python scripts/bench/rollout_schedules.py [--seeds 5] [--storms 10000] [--out FILE.json]

No model and no device: seconds come from cost models, the first of them a 7B model on an H200 by its data sheet.
Makespans are over the lower bound of `app/rollout/scheduling/cost_model.py` (no padding, perfect packing), means over
the seeds, the worst seed beside them. `sync` is the baseline of the ratios: each worker takes as many samples as it has
slots, in order, whole groups together, until all are done. `oracle` is `adaptive` that knows every length.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from app.rollout.scheduling import length_traces
from app.rollout.scheduling.cost_model import CostModel
from app.rollout.scheduling.length_traces import Trace
from app.stages.simulate import compare_policies, worker_specs
from settings.schema.rollout import PdsrSettings, RolloutSettings, SegmentSettings, WorkerPoolSettings, WorkersSettings

SIGMAS, CORRELATIONS = (0.5, 0.8, 1.0), (0.0, 0.5, 0.9)
MEAN, MAX_NEW, GROUP = 512, 4096, 8
SAMPLES_PER_SLOT = {"closed": 8, "queued": 64}
SLOTS_OF_A_WORKER = {"16 slots": 8, "64 slots": 32}
"""One fast and one heavy worker."""
COSTS = {
    "7B on an H200": CostModel(),
    "2-core CPU": CostModel(
        step_s=0.06, step_row_s=0.01, step_cached_token_s=5e-7, segment_s=0.005, prefill_s=0.02,
        prefill_token_s=0.004, move_s=0.005, move_token_s=1e-5,
    ),
}  # fmt: skip
"""The second is not measured: rows cost as they do where arithmetic and not memory is what is short."""


def log_normal(sigma: float, correlation: float, num_samples: int) -> Callable[[int], Trace]:
    return lambda seed: length_traces.log_normal(
        np.random.default_rng(seed), prompts=num_samples // GROUP, group=GROUP, mean=MEAN, sigma=sigma,
        correlation=correlation, max_new=MAX_NEW,
    )  # fmt: skip


def other_traces(num_samples: int) -> dict[str, Callable[[int], Trace]]:
    shape = {"prompts": num_samples // GROUP, "group": GROUP}
    drawn = {"mean": MEAN, "sigma": 0.8, "correlation": 0.5, "max_new": MAX_NEW}
    return {
        "equal": lambda seed: length_traces.equal(**shape, length=MEAN),
        "bimodal": lambda seed: length_traces.bimodal(
            np.random.default_rng(seed), **shape, short=256, long=MAX_NEW, share=0.1
        ),
        "one giant, last": lambda seed: length_traces.one_giant(**shape, length=256, giant=MAX_NEW),
        "mean doubles": lambda seed: length_traces.drift(np.random.default_rng(seed), **shape, **drawn),
        "longest last": lambda seed: length_traces.ascending(log_normal(0.8, 0.5, num_samples)(seed)),
    }


def measure(draw: Callable[[int], Trace], slots: int, cost: CostModel, seeds: int) -> dict[str, Any]:
    """policy -> means over the seeds."""
    pool = WorkerPoolSettings(count=1, slots=slots)
    rollout = RolloutSettings(workers=WorkersSettings(fast=pool, heavy=pool), max_new_tokens=MAX_NEW)
    workers = worker_specs(rollout, max_prompt_length=128)
    runs = [
        compare_policies(draw(seed), workers, cost, pdsr=PdsrSettings(), segment=SegmentSettings(), max_new=MAX_NEW)[0]
        for seed in range(seeds)
    ]
    found = {}
    for of_policy in zip(*(run.policies for run in runs), strict=True):
        recalls = [one.figures.probe_recall for one in of_policy if one.figures.probe_recall is not None]
        found[of_policy[0].policy] = {
            "over_bound": statistics.mean(one.over_lower_bound for one in of_policy),
            "over_bound_worst": max(one.over_lower_bound for one in of_policy),
            "x_sync": statistics.mean(one.faster_than_sync for one in of_policy),
            "bubble": statistics.mean(one.figures.bubble for one in of_policy),
            "tail": statistics.mean(one.figures.tail_fraction for one in of_policy),
            "recall": statistics.mean(recalls) if recalls else None,
            "trips_per_1000": 1000 * statistics.mean(one.figures.breaker_trips for one in of_policy) / runs[0].samples,
            "wasted": statistics.mean(one.figures.wasted_tokens / one.figures.useful_tokens for one in of_policy),
        }
    return found


def show(name: str, found: dict[str, Any]) -> None:
    cells = "  ".join(
        f"{policy} {one['over_bound']:.2f} ({one['over_bound_worst']:.2f}) {one['x_sync']:.2f}x"
        for policy, one in found.items()
    )
    print(f"{name:<44} {cells}", flush=True)


def weather(num_storms: int) -> dict[str, Any]:
    """Random rollouts under random faults, every invariant checked after every event."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.rollout.scheduling.storms import storm

    violations, events, faulty, start = [], 0, 0, time.perf_counter()
    for seed in range(num_storms):
        clock = storm(seed)
        try:
            events += len(clock.run())
            assert clock.scheduler.is_finished, "the rollout did not end"
        except (AssertionError, LookupError) as error:
            violations.append({"seed": seed, "error": repr(error)})
        faulty += clock.num_faults > 0
    return {
        "rollouts": num_storms,
        "with_faults": faulty,
        "events": events,
        "violations": violations,
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--storms", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "rollout_schedules.json")
    options = parser.parse_args()
    result: dict[str, Any] = {"measured_at": datetime.now(UTC).isoformat(timespec="seconds"), "seeds": options.seeds}
    print("makespan / lower bound: mean (worst seed), and times as fast as sync\n")
    for machine, cost in COSTS.items():
        for size, slots in SLOTS_OF_A_WORKER.items():
            for load, per_slot in SAMPLES_PER_SLOT.items():
                # The large queue costs minutes and says the same.
                if load == "queued" and (slots > 8 or machine != "7B on an H200"):
                    continue
                num_samples = 2 * slots * per_slot
                cases = {
                    f"sigma {sigma} r {correlation}": log_normal(sigma, correlation, num_samples)
                    for sigma in SIGMAS
                    for correlation in CORRELATIONS
                }
                for name, draw in (cases | other_traces(num_samples)).items():
                    key = f"{machine}, {size}, {load}: {name}"
                    result[key] = measure(draw, slots, cost, options.seeds)
                    show(key, result[key])
    result["faults"] = weather(options.storms)
    print("\nfaults:", json.dumps(result["faults"]))
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
