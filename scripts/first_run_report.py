"""Prints what to report of a first run on new devices, from the files that `scripts/first_tpu_run.sh` has written.

python scripts/first_run_report.py FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from app.records.jsonl import read_jsonl_tolerant
from app.records.run_directory import RunDirectory
from app.records.text_format import format_bytes, format_percent, format_table
from settings import InputError, Settings, load

COMMANDS = ("dry-run", "doctor", "inspect-mesh", "train")
PHASES = {"rollout": ("rollout",), "score": ("score",), "update": ("critic", "update")}
"""Phase with a time of its own in `metrics.jsonl` -> phases of the compiled programs."""
NUM_WARM_UP_STEPS = 2
"""Steps that may compile, which the median leaves out."""
SHOWN_CHECKS = ("devices", "versions", "mesh", "memory", "attention", "forward")
"""Checks of `grpo doctor` whose findings are shown even if they are `ok`."""
MAX_LINES_OF_ERROR = 8
LINE = "-" * 60


def report(folder: Path) -> str:
    """Returns the block of text; whatever is missing because a command failed is left out or shown as `-`."""
    settings = load(str(folder / "settings.yaml"), [], {}).settings
    doctor, inspection = (_read_json(folder / f"{name}.out") for name in ("doctor", "inspect-mesh"))
    run = RunDirectory.from_settings(settings.run)
    read = read_jsonl_tolerant(run.metrics_path) if run.metrics_path.is_file() else ()
    steps = [record for _, record in read if not isinstance(record, InputError) and record["step"] > 0]
    programs = inspection.get("programs", [])
    ended = {name: _read(folder / f"{name}.status").strip() or "?" for name in COMMANDS}
    lines = [
        LINE,
        f"{folder.name}: {settings.model.path}, model.dtype {settings.model.dtype}, model.attention "
        f"{settings.model.attention}; {len(steps)} of {settings.run.steps} steps",
        "exit codes: " + ", ".join(f"{name} {status}" for name, status in ended.items()),
        *_checks(doctor.get("checks", [])),
        *_programs(programs),
        *_memory(inspection, steps),
        *_phases(settings, programs, steps),
        *_steps(steps),
    ]
    for name in (name for name, status in ended.items() if status != "0"):
        errors = _read(folder / f"{name}.err").splitlines()[-MAX_LINES_OF_ERROR:]
        lines += ["", f"{name} failed; the end of {name}.err:", *errors]
    return "\n".join([*lines, LINE])


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _read_json(path: Path) -> Mapping[str, Any]:
    """Returns the object in a file, or an empty one if the command has printed none."""
    text = _read(path)
    return json.loads(text) if text.startswith("{") else {}


def _checks(checks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if checks:
        yield ""
    for one in checks:
        if one["verdict"] != "ok" or one["check"] in SHOWN_CHECKS:
            advice = f" -> {one['advice']}" * bool(one["advice"])
            host = f" (host {one['host']})" * bool(one["host"])
            yield f"{one['check']}{host}: {one['verdict']}: {'; '.join(one['found'].splitlines())}{advice}"


def _programs(programs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not programs:
        return
    header = ("program", "arguments", "temporaries", "compiled in", "a call, estimated", "MFU")
    rows = [
        (
            f"{one['phase']}: {one['name']}",
            *(format_bytes(one[name]) for name in ("argument_bytes", "temporary_bytes")),
            f"{one['compile_s']:.1f} s",
            _seconds(one["estimated_s"]),
            "-" if one["mfu"] is None else format_percent(one["mfu"]),
        )
        for one in programs
    ]
    yield from ("", f"compiled for {programs[0]['backend']}, of each device:", format_table(rows, header=header))


def _memory(inspection: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if steps and (measured := steps[-1].get("perf/peak_memory_bytes")) is not None:
        foreseen = f"; {format_bytes(inspection['peak_bytes'])} foreseen" if "peak_bytes" in inspection else ""
        yield from ("", f"peak memory of a device (on a CPU, of the process): {format_bytes(measured)}{foreseen}")


def _phases(
    settings: Settings, programs: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Yields a table of measured and estimated seconds, over the steps after those that compile."""
    warm = steps[NUM_WARM_UP_STEPS:]
    if not warm:
        return
    rows = []
    for phase, parts in PHASES.items():
        of_phase = [one for one in programs if one["phase"] in parts]
        estimates = [_estimated_s(settings, of_phase, line) for line in warm]
        known = [seconds for seconds in estimates if seconds is not None]
        measured = median(line[f"time/{phase}_s"] for line in warm)
        rows.append((phase, _seconds(measured), _seconds(median(known) if known else None)))
    rows.append(("step", _seconds(median(line["time/step_s"] for line in warm)), "-"))
    first, last = warm[0]["step"], warm[-1]["step"]
    header = ("phase", f"measured, median of steps {first} to {last}", "estimated by the compiler for full rows")
    yield from ("", format_table(rows, header=header))
    yield f"the first step, which compiles, took {_seconds(steps[0]['time/step_s'])}"


def _estimated_s(settings: Settings, programs: Sequence[Mapping[str, Any]], line: Mapping[str, Any]) -> float | None:
    """Returns the sum over all calls of these programs in a step; None if that is unknown."""
    total = 0.0
    for one in programs:
        calls = _num_calls(settings, one["phase"], one["name"], line)
        if calls is None or one["estimated_s"] is None:
            return None
        total += calls * one["estimated_s"]
    return total or None


def _num_calls(settings: Settings, phase: str, name: str, line: Mapping[str, Any]) -> float | None:
    """Returns how often a step has called a program; None if that depends on the slots."""
    epochs, rollout = settings.algorithm.epochs, settings.rollout
    if phase == "rollout":
        if isinstance(rollout.slots, int) or rollout.scheduler:
            return None
        # As if there were a slot for every sample, and one prefill took all prompts.
        calls = {"prefill": 1, "recompute": 0, "decode": line["completions/max_length"]}[name]
        return calls * line["rollout/num_rounds"]
    if phase == "score":
        return line.get(f"score/{name}/num_micro_batches", 0)
    if name == "optimizer":
        return epochs * settings.num_mini_batches
    # Each epoch has the same micro-batches, which the metric counts once.
    return epochs * line["value/batching/num_micro_batches" if phase == "critic" else "batching/num_micro_batches"]


def _steps(steps: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    columns = {
        **{"step": "step", "loss": "loss", "reward": "reward/mean", "grad norm": "policy/grad_norm"},
        **{"entropy": "policy/entropy", "sampler - scorer": "rollout/sampler_scorer_logprob_diff_max"},
        **{"compilations": "perf/compilations", "tokens/s": "perf/tokens_per_s", "seconds": "time/step_s"},
    }
    if steps:
        values = [[line.get(name) for name in columns.values()] for line in steps]
        rows = [["-" if x is None else f"{x:.4g}" for x in row] for row in values]
        yield from ("", format_table(rows, header=tuple(columns)))


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.2f} ms" if seconds < 1 else f"{seconds:,.2f} s"


if __name__ == "__main__":
    print(report(Path(sys.argv[1])))
