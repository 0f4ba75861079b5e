"""Compares all scheduling policies on the virtual clock: on the lengths of a file, or on distributions of lengths.

    python scripts/simulate/simulate_rollout.py --trace samples.jsonl [--cost costs.json] [--slots 16 16] [--timeline F]
    python scripts/simulate/simulate_rollout.py [--seeds 3] [--storms 10000] [--out FILE.json]

No model and no device: seconds come from a cost model. Makespans are over the lower bound of `cost_model.py` (no
padding, perfect packing), and `sync` is the baseline of the ratios.

With `--trace`: samples as `grpo rollout` writes them, or lines of `uid`, `prompt`, `index`, `length` and
`prompt_length`. Costs are those of a 7B model on an H200 by its data sheet, or those that `calibrate_rollout.py` has
measured on a machine. `oracle` is `adaptive` that knows every length.

Without: a grid of lengths, slots and prompts, on TPUs whose costs `compile_costs.py` has from the compiler, and random
rollouts under random faults with every invariant checked after every event.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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
TPU_COSTS = Path(__file__).parent / "results" / "tpu_costs.json"
"""Costs and workers of the machines of the grid, by `compile_costs.py`."""
GRID_MACHINES = ("Qwen2.5-1.5B on v5e-8", "Qwen2.5-7B on v6e-8")
SIGMAS, CORRELATIONS = (0.5, 0.8, 1.2), (0.0, 0.5, 0.9)
EQUAL = "equal"
MEAN, MAX_NEW, GROUP, PROMPT_LENGTH = 512, 4096, 8, 128
SLOTS = (8, 16, 32, 64)
"""Slots of each worker."""
PROMPTS_PER_SLOT = (1, 4)
"""Prompts of a rollout for each slot of one worker."""


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
        specs.append(
            SimulatedWorkerSpec(
                *(f"{kind}-{number}", kind, count, sizes.batch[:-1]),
                program_sizes=sizes,
                capacity=count * shapes.max_length,
            )
        )
    return specs


def compare_policies(
    trace: Trace,
    workers: Sequence[SimulatedWorkerSpec],
    cost: CostModel,
    *,
    max_new: int,
    policies: Iterable[str] = POLICIES,
) -> list[SimulatedPolicy]:
    """Returns what policies, `sync` among them, make of the trace."""
    bound = lower_bound_s(to_sample_lengths(trace), [spec.slots for spec in workers], cost)
    runs = {}
    for policy in policies:
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
    results = compare_policies(trace, workers, cost, max_new=max_new, policies=(*POLICIES, ORACLE))
    rows = [HEADINGS, *(one.cells for one in results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)))
    if options.timeline is not None:
        title = f"{options.trace.name}, simulated: {len(trace)} samples, {sum(options.slots)} slots"
        write_timeline(options.timeline, [one.panel for one in results], title=title, table=rows)


def distributions(num_prompts: int) -> dict[str, Callable[[int], Trace]]:
    """Returns, by name, functions from a seed to the lengths of the samples of so many prompts."""
    shape = {"prompts": num_prompts, "group": GROUP}

    def log_normal(sigma: float, correlation: float) -> Callable[[int], Trace]:
        return lambda seed: length_traces.log_normal(
            np.random.default_rng(seed), **shape, mean=MEAN, sigma=sigma, correlation=correlation, max_new=MAX_NEW
        )

    return {
        **{f"sigma {sigma}, r {r}": log_normal(sigma, r) for sigma in SIGMAS for r in CORRELATIONS},
        "bimodal": lambda seed: length_traces.bimodal(
            np.random.default_rng(seed), **shape, short=256, long=MAX_NEW, share=0.1
        ),
        EQUAL: lambda _: length_traces.equal(**shape, length=MEAN),
    }


def grid_cells(num_seeds: int) -> Iterator[dict[str, Any]]:
    """Yields the cells of the grid, with the figures of all policies over the seeds."""
    costs = json.loads(TPU_COSTS.read_text(encoding="utf-8"))
    machines = {machine: costs[machine] for machine in GRID_MACHINES}
    for (machine, known), slots, per_slot in itertools.product(machines.items(), SLOTS, PROMPTS_PER_SLOT):
        cost = CostModel.from_json(known["cost"])
        [spec] = worker_specs([slots], max_prompt_length=PROMPT_LENGTH, max_new=MAX_NEW)
        kinds: list[WorkerKind] = [kind for kind, count in known["workers"].items() for _ in range(count)]
        workers = [replace(spec, name=f"{kind}-{i}", kind=kind) for i, kind in enumerate(kinds)]
        for lengths, draw in distributions(slots * per_slot).items():
            seeds = range(1 if lengths == EQUAL else num_seeds)
            runs = [compare_policies(draw(seed), workers, cost, max_new=MAX_NEW) for seed in seeds]
            cell = {"machine": machine, "slots": slots, "prompts_per_slot": per_slot, "lengths": lengths}
            yield cell | {of_seeds[0].policy: figures(of_seeds) for of_seeds in zip(*runs, strict=True)}


def figures(of_seeds: Sequence[SimulatedPolicy]) -> dict[str, float]:
    """Returns means over the seeds, and the ratio to sync of the worst."""
    found = {
        "x_sync": statistics.mean(one.faster_than_sync for one in of_seeds),
        "x_sync_worst": min(one.faster_than_sync for one in of_seeds),
        "over_bound": statistics.mean(one.over_lower_bound for one in of_seeds),
        "bubble": statistics.mean(one.metrics.bubble for one in of_seeds),
        "tail": statistics.mean(one.metrics.tail_fraction for one in of_seeds),
        "suspensions": statistics.mean(one.metrics.suspensions for one in of_seeds),
    }
    return {name: round(value, 4) for name, value in found.items()}


def summary(cells: Sequence[dict[str, Any]]) -> str:
    """Returns a Markdown table of how many times as fast as sync the policies are, and where they are slower.

    Each entry has all policies but sync, in the mean over slots and seeds.
    """
    rivals = [policy for policy in POLICIES if policy != "sync"]
    columns = list(dict.fromkeys((cell["machine"], cell["prompts_per_slot"]) for cell in cells))
    heads = [f"{machine}, {per_slot} x slots" for machine, per_slot in columns]
    lines = [f"| {' / '.join(rivals)} | {' | '.join(heads)} |", "|---|" + "---|" * len(columns)]
    for lengths in dict.fromkeys(cell["lengths"] for cell in cells):
        of_columns = (
            [one for one in cells if (one["lengths"], one["machine"], one["prompts_per_slot"]) == (lengths, *column)]
            for column in columns
        )
        entries = (
            " / ".join(f"{statistics.mean(one[policy]['x_sync'] for one in ones):.2f}" for policy in rivals)
            for ones in of_columns
        )
        lines.append(f"| {lengths} | {' | '.join(entries)} |")
    for policy in rivals:
        slower = [cell for cell in cells if cell[policy]["x_sync"] < 1]
        worst = min(cell[policy]["x_sync_worst"] for cell in cells)
        where = Counter((f"{cell['prompts_per_slot']} x slots", cell["lengths"]) for cell in slower)
        lines.append(f"\n{policy} is slower than sync in {len(slower)} of {len(cells)} cells, at worst {worst:.2f}:")
        lines += [f"  {', '.join(place)}: {count}" for place, count in where.items()]
    return "\n".join(lines)


def run_storms(num_storms: int, **more: Any) -> dict[str, Any]:
    """Runs random rollouts under random faults, with every invariant checked after every event."""
    from tests.rollout.scheduling.storms import storm

    violations, events, faulty, start = [], 0, 0, time.perf_counter()
    for seed in range(num_storms):
        clock = storm(seed, **more)
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


def compare_on_grid(options: argparse.Namespace) -> None:
    result: dict[str, Any] = {"simulated_at": datetime.now(UTC).isoformat(timespec="seconds"), "seeds": options.seeds}
    cells = []
    for cell in grid_cells(options.seeds):
        cells.append(cell)
        print(*list(cell.values())[:4], {policy: cell[policy]["x_sync"] for policy in POLICIES}, flush=True)
    print(f"\n{summary(cells)}", flush=True)
    result["grid"] = cells
    kinds = {"faults": {}, "faults and environments": {"has_turns": True}}
    for name, more in kinds.items():
        result[name] = run_storms(options.storms, **more)
        print(f"\n{name}:", json.dumps(result[name]))
    # A cell on a line.
    text = json.dumps(result).replace('{"machine"', '\n{"machine"').replace(', "faults', ',\n"faults')
    options.out.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="JSON Lines of lengths, instead of distributions")
    parser.add_argument("--cost", type=Path, help="JSON of `calibrate_rollout.py`, with --trace")
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 16], help="of each worker, with --trace")
    parser.add_argument("--timeline", type=Path, help="plot as .png or .html, with --trace")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--storms", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "rollout_schedules.json")
    options = parser.parse_args()
    if options.trace is not None:
        compare_on_trace(options)
    else:
        compare_on_grid(options)


if __name__ == "__main__":
    main()
