"""Measures steps per minute with generation ahead of training (`rollout.max_staleness` 1, 2) and without it (0).

    python scripts/bench/async_training.py --steps 12 --repeats 3

All ways train the quickstart's task and model with the same workers. They take turns, so that other load on the machine
affects all of them, and the first steps, which compile, do not count. The gain is the time in which training or
generation would have waited for the other. It is small if both share the same cores, as on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from app.training.train import train
from settings import load

LEADS = (0, 1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="timed steps of a run")
    parser.add_argument("--warmup", type=int, default=4, help="steps before them")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each way")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    runs: dict[int, list[dict[str, float]]] = {lead: [] for lead in LEADS}
    for _ in range(options.repeats):
        for lead, found in runs.items():
            found.append(one_run(lead, steps=options.steps, warmup=options.warmup, overrides=options.overrides))
    waiting = median_of(runs[0], "steps_per_minute")
    print("max_staleness  steps a minute  x waiting  waits for samples  mean age of a token")
    for lead, found in runs.items():
        pace = median_of(found, "steps_per_minute")
        waited, age = median_of(found, "waited"), median_of(found, "age")
        print(f"{lead:>13}  {pace:>14.1f}  {pace / waiting:>9.2f}  {waited:>17.0%}  {age:>19.2f}")


def one_run(lead: int, *, steps: int, warmup: int, overrides: list[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        lines = {
            **{"run.dir": folder, "run.name": "bench", "run.steps": warmup + steps},
            **{"eval.every_steps": 0, "checkpoint.best_metric": "null", "checkpoint.every_steps": 10_000},
            **{"logging.report": "false", "mesh.cpu_devices": 2, "rollout.prompts_per_step": 16},
            **{"rollout.scheduler": "adaptive", "rollout.max_staleness": lead},
            **{"rollout.workers.fast.slots": 64, "rollout.workers.heavy.slots": 64},
        }
        overridden = dict(override.split("=", 1) for override in overrides)
        resolved = load("quickstart", [f"{name}={value}" for name, value in (lines | overridden).items()], os.environ)
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            result = train(resolved, resume="never")
        assert result.is_complete
        records = [json.loads(line) for line in (Path(folder) / "bench" / "metrics.jsonl").read_text().splitlines()]
    timed = [record for record in records if record["step"] > warmup]
    seconds = sum(record["time/step_s"] for record in timed)
    return {
        "steps_per_minute": 60 * len(timed) / seconds,
        "waited": sum(record["time/rollout_s"] for record in timed) / seconds,
        "age": statistics.mean(record.get("perf/rollout/staleness_mean", 0.0) for record in timed),
    }


def median_of(runs: list[dict[str, float]], name: str) -> float:
    return statistics.median(run[name] for run in runs)


if __name__ == "__main__":
    main()
