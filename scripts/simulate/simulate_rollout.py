"""Compares all scheduling policies on the virtual clock: on the lengths of a file, or on distributions of lengths.

    python scripts/simulate/simulate_rollout.py --trace samples.jsonl [--cost costs.json] [--slots 16 16] [--timeline F]
    python scripts/simulate/simulate_rollout.py [--seeds 5] [--storms 10000] [--out FILE.json]

No model and no device: seconds come from a cost model, by default that of a 7B model on an H200 by its data sheet;
`calibrate_rollout.py` measures the costs of a machine. A trace is samples as `grpo rollout` writes them, or lines of
`uid`, `prompt`, `index`, `length` and `prompt_length`. Makespans are over the lower bound of `cost_model.py` (no
padding, perfect packing). `sync` is the baseline of the ratios. `oracle` is `adaptive` that knows every length.

Without `--trace`: log-normal and other lengths, means over the seeds with the worst seed next to them, and random
rollouts under random faults with every invariant checked after every event.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from app.report.slot_timeline import TimelinePanel, write_timeline
from app.rollout.scheduling.metrics import ScheduleMetrics, schedule_metrics
from app.rollout.scheduling.protocol import EventRecord, WorkerKind
from app.rollout.scheduling.scheduler import POLICIES, Scheduler
from app.runtime.slot_shapes import slot_shapes_from_settings
from app.stages.timeline_panel import METRIC_HEADINGS, metric_cells, timeline_panel
from scripts.simulate import length_traces
from scripts.simulate.cost_model import CostModel, lower_bound_s
from scripts.simulate.length_traces import Trace, read_trace, to_sample_lengths
from scripts.simulate.simulated_slots import ProgramSizes
from scripts.simulate.simulator import SchedulerSimulator, SimulatedWorkerSpec
from settings.schema.rollout import PdsrSettings, RolloutSettings, SegmentSettings, WorkerPoolSettings, WorkersSettings

ORACLE = "oracle"
"""`adaptive` that knows every length."""
HEADINGS = ("policy", "makespan s", "/ bound", "x sync", *METRIC_HEADINGS)
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
"""Cost models; in the second, which is not measured, arithmetic is scarce instead of memory."""


@dataclass(frozen=True)
class SimulatedPolicy:
    """One policy on a trace."""

    policy: str
    over_lower_bound: float
    faster_than_sync: float
    metrics: ScheduleMetrics
    records: list[EventRecord]

    @property
    def cells(self) -> tuple[str, ...]:
        ratios = (f"{self.over_lower_bound:.2f}", f"{self.faster_than_sync:.2f}")
        return self.policy, f"{self.metrics.makespan_s:.4g}", *ratios, *metric_cells(self.metrics)

    @property
    def panel(self) -> TimelinePanel:
        bound = self.metrics.makespan_s / self.over_lower_bound
        return timeline_panel(self.policy, self.records, self.metrics, bound)


def worker_specs(slots: Sequence[int], *, max_prompt_length: int, max_new: int) -> list[SimulatedWorkerSpec]:
    """Returns workers with the programs that real ones have: the first is fast, the others are heavy."""
    pools = [WorkerPoolSettings(count=1, slots=count) for count in slots]
    rollout = RolloutSettings(workers=WorkersSettings(fast=pools[0], heavy=pools[-1]), max_new_tokens=max_new)
    specs = []
    for number, count in enumerate(slots):
        kind: WorkerKind = "heavy" if number else "fast"
        shapes = slot_shapes_from_settings(rollout, count, max_prompt_length=max_prompt_length, setting="--slots")
        sizes = ProgramSizes.of(shapes)
        specs.append(SimulatedWorkerSpec(f"{kind}-{number}", kind, count, sizes.batch[:-1], program_sizes=sizes))
    return specs


def compare_policies(
    trace: Trace, workers: Sequence[SimulatedWorkerSpec], cost: CostModel, *, max_new: int
) -> list[SimulatedPolicy]:
    """Returns what all policies and the oracle make of the trace."""
    bound = lower_bound_s(to_sample_lengths(trace), [spec.slots for spec in workers], cost)
    runs = {}
    for policy in (*POLICIES, ORACLE):
        known = {one.uid: one.length for one in trace} if policy == ORACLE else None
        scheduler = Scheduler(
            "adaptive" if known else policy, pdsr=PdsrSettings(), segment=SegmentSettings(), known_lengths=known
        )
        runs[policy] = SchedulerSimulator(scheduler, trace, workers, cost, max_new=max_new).run()
    metrics = {policy: schedule_metrics(records) for policy, records in runs.items()}
    sync_s = metrics["sync"].makespan_s
    return [
        SimulatedPolicy(policy, one.makespan_s / bound, sync_s / one.makespan_s, one, runs[policy])
        for policy, one in metrics.items()
    ]


def compare_on_trace(options: argparse.Namespace) -> None:
    """Prints the policies on the lengths of a file, and plots them."""
    trace = read_trace(options.trace)
    cost = CostModel()
    if options.cost is not None:
        cost = CostModel.from_json(json.loads(options.cost.read_text(encoding="utf-8")))
    max_new, max_prompt_length = max(one.length for one in trace), max(one.prompt_length for one in trace)
    workers = worker_specs(options.slots, max_prompt_length=max_prompt_length, max_new=max_new)
    results = compare_policies(trace, workers, cost, max_new=max_new)
    rows = [HEADINGS, *(one.cells for one in results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)))
    if options.timeline is not None:
        title = f"{options.trace.name}, simulated: {len(trace)} samples, {sum(options.slots)} slots"
        write_timeline(options.timeline, [one.panel for one in results], title=title, table=rows)


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
    """Returns policy -> means over the seeds."""
    workers = worker_specs((slots, slots), max_prompt_length=128, max_new=MAX_NEW)
    runs = [compare_policies(draw(seed), workers, cost, max_new=MAX_NEW) for seed in range(seeds)]
    result = {}
    for of_policy in zip(*runs, strict=True):
        metrics = [one.metrics for one in of_policy]
        recalls = [one.probe_recall for one in metrics if one.probe_recall is not None]
        num_samples = len(draw(0))
        result[of_policy[0].policy] = {
            "over_bound": statistics.mean(one.over_lower_bound for one in of_policy),
            "over_bound_worst": max(one.over_lower_bound for one in of_policy),
            "x_sync": statistics.mean(one.faster_than_sync for one in of_policy),
            "bubble": statistics.mean(one.bubble for one in metrics),
            "tail": statistics.mean(one.tail_fraction for one in metrics),
            "recall": statistics.mean(recalls) if recalls else None,
            "trips_per_1000": 1000 * statistics.mean(one.breaker_trips for one in metrics) / num_samples,
            "wasted": statistics.mean(one.wasted_tokens / one.useful_tokens for one in metrics),
        }
    return result


def show(name: str, result: dict[str, Any]) -> None:
    cells = "  ".join(
        f"{policy} {one['over_bound']:.2f} ({one['over_bound_worst']:.2f}) {one['x_sync']:.2f}x"
        for policy, one in result.items()
    )
    print(f"{name:<44} {cells}", flush=True)


def run_storms(num_storms: int, *, num_hosts: int) -> dict[str, Any]:
    """Runs random rollouts under random faults, with every invariant checked after every event.

    Several hosts may die or stall as a whole.
    """
    from tests.rollout.scheduling.storms import storm

    violations, events, faulty, start = [], 0, 0, time.perf_counter()
    for seed in range(num_storms):
        clock = storm(seed, num_hosts=num_hosts)
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


def compare_on_distributions(options: argparse.Namespace) -> None:
    result: dict[str, Any] = {"measured_at": datetime.now(UTC).isoformat(timespec="seconds"), "seeds": options.seeds}
    print("makespan / lower bound: mean (worst seed), and times as fast as sync\n")
    for machine, cost in COSTS.items():
        for size, slots in SLOTS_OF_A_WORKER.items():
            for load, per_slot in SAMPLES_PER_SLOT.items():
                # The large queue takes minutes and gives the same result.
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
    for name, num_hosts in {"faults": 1, "faults of 8 hosts": 8}.items():
        result[name] = run_storms(options.storms, num_hosts=num_hosts)
        print(f"\n{name}:", json.dumps(result[name]))
    options.out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="JSON Lines of lengths, instead of distributions")
    parser.add_argument("--cost", type=Path, help="JSON of `calibrate_rollout.py`, with --trace")
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 16], help="of each worker, with --trace")
    parser.add_argument("--timeline", type=Path, help="plot as .png, .svg or .html, with --trace")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--storms", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "rollout_schedules.json")
    options = parser.parse_args()
    if options.trace is not None:
        compare_on_trace(options)
    else:
        compare_on_distributions(options)


if __name__ == "__main__":
    main()
