"""Real workers under `sync` and under `adaptive`, and what the simulator says of them.

    python scripts/bench/rollout_workers.py --model builtin:tiny [--slots 16 | --slots 8 8]
    python scripts/bench/rollout_workers.py --model FILE.gguf --mean-length 28 --longest 128

Nobody can foresee how long a sample becomes: lengths are log-normal and correlated in groups, and each sample ends by
an end-of-sequence token that the devices draw where the benchmark says. `--slots 16` is one worker, `--slots 8 8` a
fast and a heavy one that take turns on one device. In one process: the costs of this machine (`calibrate_rollout.py`,
before, between and after), both schedules in turn, both on the virtual clock with these costs. Segments are as long as
the first costs ask for (`rollout.segment.overhead_steps`). Rollouts know nothing of those before them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from app.rollout.scheduling.metrics import ScheduleMetrics, schedule_metrics
from app.rollout.scheduling.protocol import EventRecord
from app.rollout.scheduling.scheduler import Scheduler
from scripts.bench.forced_rollout import ForcedRollout, machine, on_devices_s, open_rollout, positive, several
from scripts.simulate import length_traces
from scripts.simulate.calibrate_rollout import calibrate, edge_steps, show
from scripts.simulate.cost_fit import fit
from scripts.simulate.cost_model import CostModel
from scripts.simulate.length_traces import Trace, trace_from_records
from scripts.simulate.simulator import SchedulerSimulator
from settings.schema.rollout import PdsrSettings, SegmentSettings

RESULTS = Path(__file__).parent / "results" / "rollout_workers.json"
POLICIES = ("sync", "adaptive")


@dataclass
class Measured:
    """Rollouts of one policy."""

    seconds: list[float] = field(default_factory=list)
    """Seconds including opening and closing the slots and making records."""
    makespans_s: list[float] = field(default_factory=list)
    no_segment: list[float] = field(default_factory=list)
    """Fraction of the duration without a segment on the devices, which the host causes."""
    records: list[EventRecord] = field(default_factory=list)
    """Events of the last rollout."""

    @property
    def found(self) -> ScheduleMetrics:
        return schedule_metrics(self.records)


def measure(rollout: ForcedRollout, policy: str, into: Measured) -> None:
    made = rollout.workers(policy)
    into.seconds.append(rollout.generate(made))
    into.records = made.records
    into.makespans_s.append(into.found.makespan_s)
    into.no_segment.append(1 - on_devices_s(rollout.engines) / into.makespans_s[-1])


def predicted(rollout: ForcedRollout, policy: str, trace: Trace, cost: CostModel) -> ScheduleMetrics:
    scheduler = Scheduler(policy, pdsr=PdsrSettings(), segment=rollout.rule)
    return schedule_metrics(SchedulerSimulator(scheduler, trace, rollout.specs(), cost, max_new=rollout.longest).run())


def result_of(rollout: ForcedRollout, policy: str, measured: Measured, cost: CostModel) -> dict[str, Any]:
    found, simulated = measured.found, predicted(rollout, policy, trace_from_records(measured.records), cost)
    makespan = statistics.median(measured.makespans_s)
    return {
        "seconds": [round(s, 4) for s in measured.seconds],
        "tokens_per_s": round(found.useful_tokens / statistics.median(measured.seconds), 1),
        "makespans_s": [round(s, 4) for s in measured.makespans_s],
        "predicted_makespan_s": round(simulated.makespan_s, 4),
        "predicted_over_measured": round(simulated.makespan_s / makespan, 3),
        "segments": found.segments,
        "predicted_segments": simulated.segments,
        "bubble": round(found.bubble, 3),
        "suspensions": found.suspensions,
        "share_without_segment": round(statistics.median(measured.no_segment), 4),
    }


def bench(options: argparse.Namespace) -> dict[str, Any]:
    trace = length_traces.log_normal(
        np.random.default_rng(0),
        prompts=options.prompts,
        group=options.group,
        mean=options.mean_length,
        sigma=options.sigma,
        correlation=options.correlation,
        max_new=options.longest,
    )
    rollout = open_rollout(
        options.model,
        num_prompts=options.prompts,
        lengths=[[one.length for one in trace]],
        longest=options.longest,
        slots=options.slots,
        rule=SegmentSettings(min=1),
    )
    print(f"compiled in {rollout.compile():.1f} s", flush=True)
    cost, timed = calibrate(rollout, repeats=options.calibrations)
    rollout.rule = SegmentSettings(min=1, overhead_steps=options.overhead_steps or edge_steps(cost, rollout))
    measured = {policy: Measured() for policy in POLICIES}
    # Costs are measured around the rollouts: a machine that slows down slows both.
    for _ in range(options.repeats):
        for policy in POLICIES:
            on_devices_s(rollout.engines)
            measure(rollout, policy, measured[policy])
            print(f"{policy}: {measured[policy].seconds[-1]:.3f} s", flush=True)
        timed += calibrate(rollout, repeats=options.calibrations, rehearsals=0)[1]
    cost, lengths = fit(timed), rollout.lengths[0]
    show(cost, timed[: len({one.what for one in timed})])
    found = {policy: result_of(rollout, policy, measured[policy], cost) for policy in POLICIES}
    return {
        "model": rollout.model,
        "samples": len(trace),
        "slots": list(rollout.slots),
        "sigma": options.sigma,
        "correlation": options.correlation,
        "lengths": {"mean": float(np.mean(lengths)), "max": max(lengths), "longest": options.longest},
        "tokens": sum(lengths),
        "overhead_steps": rollout.rule.overhead_steps,
        **found,
        "adaptive_over_sync": round(found["adaptive"]["tokens_per_s"] / found["sync"]["tokens_per_s"], 3),
        "cost": cost.to_json(),
        **machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:tiny", help="as `model.path`")
    parser.add_argument("--prompts", type=positive, default=16)
    parser.add_argument("--group", type=positive, default=8)
    parser.add_argument("--slots", type=several, nargs="+", default=[16], help="of each worker; the first is fast")
    parser.add_argument("--mean-length", type=float, default=88.0)
    parser.add_argument("--sigma", type=float, default=0.8)
    parser.add_argument("--correlation", type=float, default=0.5)
    parser.add_argument("--longest", type=positive, default=512)
    parser.add_argument("--overhead-steps", type=float, help="as `rollout.segment.overhead_steps`")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--calibrations", type=positive, default=2, help="before each repeat, and after the last")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    result = bench(options)
    print(json.dumps(result, indent=1))
    kept = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    kept[f"{result['model']}, slots {' + '.join(map(str, result['slots']))}"] = result
    options.out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
