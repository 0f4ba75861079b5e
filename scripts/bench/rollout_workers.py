"""Compares all schedules on real workers with unequal slots.

    python scripts/bench/rollout_workers.py [--model builtin:tiny] [--slots 12 4] [--processes 3]
    python scripts/bench/rollout_workers.py --model FILE.gguf --mean-length 28 --longest 128

A fast worker with many slots, whose rows hold half of the longest completion, and a heavy worker with few slots share
one device. The schedulers cannot know lengths beforehand: each sample ends with an EOS token that the device samples at
the prescribed length. Lengths are log-normal and correlated in groups, or all equal. The token limits of
`rollout.pdsr`, whose defaults are for 4,096 tokens, are scaled to the longest completion. A rollout learns nothing from
earlier rollouts.

Each process compiles and runs all schedules one after the other. Ratios are relative to `sync` in the same process; the
output file contains medians over the processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from app.rollout.scheduling.schedule_metrics import schedule_metrics
from app.rollout.scheduling.scheduler import POLICIES
from scripts.bench.forced_rollout import (
    PROMPT_LENGTHS,
    ForcedRollout,
    log_normal_lengths,
    machine,
    open_rollout,
    positive,
    several,
)
from settings.schema.rollout import PdsrSettings, SegmentSettings

RESULTS = Path(__file__).parent / "results" / "rollout_workers.json"
SIGMA = 0.8
LENGTHS = (f"log-normal, sigma {SIGMA}, correlation 0.5", "equal")
DEFAULT_LONGEST = 4096
"""Tokens of the longest completion for which the defaults of `rollout.pdsr` are chosen."""


def pdsr_rules(longest: int) -> PdsrSettings:
    rules = PdsrSettings()
    names = ("probe_limit_tokens", "fast_limit_tokens")
    return rules.model_copy(update={name: max(1, getattr(rules, name) * longest // DEFAULT_LONGEST) for name in names})


def open_workers(options: argparse.Namespace) -> ForcedRollout:
    num_samples, mean = options.prompts * options.group, options.mean_length
    drawn = log_normal_lengths(num_samples, group=options.group, mean=mean, sigma=SIGMA, longest=options.longest)
    rollout = open_rollout(
        options.model,
        num_prompts=options.prompts,
        lengths=[drawn, [mean] * num_samples],
        longest=options.longest,
        slots=options.slots,
        rule=SegmentSettings(min=1),
    )
    rollout.fast_length = PROMPT_LENGTHS[1] + options.longest // 2
    rollout.pdsr = pdsr_rules(options.longest)
    return rollout


def measure(rollout: ForcedRollout, policy: str, seed: int, *, repeats: int) -> dict[str, float]:
    """Returns the median tokens/s of a schedule over rollouts, and the schedule metrics of the last rollout."""
    made = [rollout.workers(policy) for _ in range(repeats)]
    seconds = statistics.median(rollout.generate(workers, seed=seed) for workers in made)
    found = schedule_metrics(made[-1].records)
    return {
        "tokens_per_s": found.useful_tokens / seconds,
        "bubble": found.bubble,
        "segments": found.segments,
        "suspensions": found.suspensions,
    }


def measure_all(options: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    """Measures all schedules in this process; returns the figures for each kind of lengths and schedule."""
    rollout = open_workers(options)
    rollout.compile()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for seed, lengths in enumerate(LENGTHS):
        rollout.generate(rollout.workers("sync"), seed=seed)
        found[lengths] = {policy: measure(rollout, policy, seed, repeats=options.repeats) for policy in POLICIES}
        for figures in found[lengths].values():
            figures["x_sync"] = figures["tokens_per_s"] / found[lengths]["sync"]["tokens_per_s"]
    return found


def over_processes(runs: list[dict[str, dict[str, dict[str, float]]]]) -> dict[str, Any]:
    """Returns the median of each figure over the processes, and the speed relative to `sync` in each process."""
    return {
        lengths: {
            policy: {
                **{name: round(statistics.median(run[lengths][policy][name] for run in runs), 4) for name in figures},
                "x_sync_of_processes": [round(run[lengths][policy]["x_sync"], 3) for run in runs],
            }
            for policy, figures in of_policies.items()
        }
        for lengths, of_policies in runs[0].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:tiny", help="as `model.path`")
    parser.add_argument("--prompts", type=positive, default=16)
    parser.add_argument("--group", type=positive, default=8)
    parser.add_argument("--slots", type=several, nargs=2, default=[12, 4], help="of the fast and the heavy worker")
    parser.add_argument("--mean-length", type=positive, default=88)
    parser.add_argument("--longest", type=positive, default=512)
    parser.add_argument("--repeats", type=positive, default=3, help="rollouts of each schedule in a process")
    parser.add_argument("--processes", type=positive, default=3)
    parser.add_argument("--one-process", action="store_true", help="only print the figures of this process")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.one_process:
        print(json.dumps(measure_all(options)))
        return
    command, runs = [sys.executable, __file__, *sys.argv[1:], "--one-process"], []
    for number in range(options.processes):
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
        for lengths, found in runs[-1].items():
            ratios = {policy: round(figures["x_sync"], 2) for policy, figures in found.items()}
            print(f"process {number + 1}, {lengths}: times as fast as sync: {ratios}", flush=True)
    model, slots = Path(options.model).name, " + ".join(map(str, options.slots))
    shape = {name: getattr(options, name) for name in ("prompts", "group", "mean_length", "longest", "repeats")}
    record = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    record[f"{model}, slots {slots}"] = {**shape, **over_processes(runs), **machine()}
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
