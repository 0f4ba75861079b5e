"""Compares held-out accuracy with and without `data.curriculum: pass_rate` at equal numbers of generated tokens.

    python scripts/bench/curriculum.py --out FILE.json [--config NAME] [--seeds 5] [--runs DIR] [--set NAME=VALUE]

Trains with and without the curriculum for every seed (0, 1, ...), one run after the other; runs that are complete in
DIR are not repeated. Accuracy is interpolated between evaluations. Tokens of groups that a filter drops also count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from compiled_presets import GRPO

from app.records.text_format import format_table

SIDES = ("none", "pass_rate")
PARTS = (0.25, 0.5, 0.75, 1.0)
"""Accuracies are compared at these fractions of the tokens that the shortest run generates."""
SPARED = ("logging.report=false", "logging.save_rollouts=false", "checkpoint.every_steps=100000", "checkpoint.keep=1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--runs", type=Path, default=Path("runs/curriculum"))
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    # The sides alternate, so that a temporarily busy machine slows both.
    curves = {side: [] for side in SIDES}
    for seed in range(options.seeds):
        for side in SIDES:
            chosen = [*options.set, f"data.curriculum={side}", f"run.seed={seed}", f"run.dir={options.runs}"]
            curves[side].append(curve(options.runs / f"{side}-{seed}", options.config, chosen))
    end = min(one["tokens"][-1] for side in SIDES for one in curves[side])
    at = {
        side: [np.interp([part * end for part in PARTS], one["tokens"], one["accuracy"]).tolist() for one in ones]
        for side, ones in curves.items()
    }
    options.out.write_text(
        json.dumps({"config": options.config, "set": options.set, "parts": PARTS, "tokens": end, "accuracy": at}) + "\n"
    )
    rows = []
    for number, part in enumerate(PARTS):
        plain, drawn = ([one[number] for one in at[side]] for side in SIDES)
        gains = [b - a for a, b in zip(plain, drawn, strict=True)]
        rows.append((f"{part * end:,.0f}", *map(spread, (plain, drawn, gains))))
    print(format_table(rows, header=("generated tokens", *SIDES, "gain, by seed")))
    for name in ("reward/zero_variance_fraction", "reward/filtered_group_fraction"):
        means = [f"{side} {statistics.mean(one[name] for one in curves[side]):.3f}" for side in SIDES]
        print(f"{name}, mean over all steps: {', '.join(means)}")


def curve(run: Path, config: str, settings: list[str]) -> dict[str, Any]:
    """Trains a run; returns each evaluation's accuracy and the tokens generated before it, and means of two metrics."""
    sets = [word for one in (*SPARED, *settings, f"run.name={run.name}") for word in ("--set", one)]
    command = [sys.executable, "-c", GRPO, "train", "--config", config, "--resume", "auto", *sets]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    settings_file = (run / "settings.yaml").read_text()
    sizes = {name: int(settings_file.split(f" {name}: ")[1].split()[0]) for name in ("prompts_per_step", "group_size")}
    num_samples, total, tokens, accuracy = sizes["prompts_per_step"] * sizes["group_size"], 0.0, [], []
    for line in lines:
        if line["step"]:
            total += line["completions/mean_length"] * num_samples * line["rollout/num_rounds"]
        if "eval/accuracy" in line:
            tokens.append(total)
            accuracy.append(line["eval/accuracy"])
    names = ("reward/zero_variance_fraction", "reward/filtered_group_fraction")
    means = {name: statistics.mean(line[name] for line in lines if line["step"]) for name in names}
    return {"tokens": tokens, "accuracy": accuracy, **means}


def spread(values: list[float]) -> str:
    """Formats the mean of fractions and its standard error in percent."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):.1%} ± {error:.1%}"


if __name__ == "__main__":
    main()
