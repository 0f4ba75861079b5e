"""Prints a report of a first run on new devices from the files that `scripts/first_tpu_run.sh` has written.

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
from app.records.text_format import format_bytes, format_table
from settings import InputError, load

COMMANDS = ("dry-run", "doctor", "inspect-mesh", "train")
PHASES = ("rollout", "score", "update", "step")
"""Phases of a step whose times the report shows."""
NUM_WARM_UP_STEPS = 2
"""Number of first steps that may compile and are therefore excluded from the median."""
SHOWN_CHECKS = ("devices", "versions", "mesh", "memory", "attention", "forward", "gradients")
"""Checks of `grpo doctor` that the report shows even if their verdict is `ok`."""
MAX_LINES_OF_ERROR = 8
LINE = "-" * 60


def report(folder: Path) -> str:
    """Returns the report as text; values that a failed command did not write are omitted or shown as `-`."""
    settings = load(str(folder / "settings.yaml"), [], {}).settings
    doctor, inspection = (_read_json(folder / f"{name}.out") for name in ("doctor", "inspect-mesh"))
    run = RunDirectory.from_settings(settings.run)
    read = read_jsonl_tolerant(run.metrics_path) if run.metrics_path.is_file() else ()
    steps = [record for _, record in read if not isinstance(record, InputError) and record["step"] > 0]
    ended = {name: _read(folder / f"{name}.status").strip() or "?" for name in COMMANDS}
    lines = [
        LINE,
        f"{folder.name}: {settings.model.path}, model.dtype {settings.model.dtype}, model.attention "
        f"{settings.model.attention}; {len(steps)} of {settings.run.steps} steps",
        "exit codes: " + ", ".join(f"{name} {status}" for name, status in ended.items()),
        *_checks(doctor.get("checks", [])),
        *_programs(inspection.get("programs", [])),
        *_memory(inspection, steps),
        *_phases(steps),
        *_steps(steps),
    ]
    for name in (name for name, status in ended.items() if status != "0"):
        errors = _read(folder / f"{name}.err").splitlines()[-MAX_LINES_OF_ERROR:]
        lines += ["", f"{name} failed; the end of {name}.err:", *errors]
    return "\n".join([*lines, LINE])


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _read_json(path: Path) -> Mapping[str, Any]:
    """Returns the JSON object in the output of a command; empty if the file has none."""
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
    header = ("program", "arguments", "temporaries", "compiled in")
    rows = [
        (
            f"{one['phase']}: {one['name']}",
            *(format_bytes(one[name]) for name in ("argument_bytes", "temporary_bytes")),
            f"{one['compile_s']:.1f} s",
        )
        for one in programs
    ]
    yield from ("", f"compiled for {programs[0]['backend']}, bytes on each device:", format_table(rows, header=header))


def _memory(inspection: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if steps and (measured := steps[-1].get("perf/peak_memory_bytes")) is not None:
        expected = f"; {format_bytes(inspection['peak_bytes'])} expected" if "peak_bytes" in inspection else ""
        yield from ("", f"peak memory of a device (on a CPU, of the process): {format_bytes(measured)}{expected}")


def _phases(steps: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields a table with the median time of each phase in the steps after compilation, and the first step's time."""
    warm = steps[NUM_WARM_UP_STEPS:]
    if not warm:
        return
    rows = [(phase, _seconds(median(line[f"time/{phase}_s"] for line in warm))) for phase in PHASES]
    header = ("phase", f"measured: median of steps {warm[0]['step']} to {warm[-1]['step']}")
    yield from ("", format_table(rows, header=header))
    yield f"the first step, which compiles, took {_seconds(steps[0]['time/step_s'])}"


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
