"""Estimates the times of a training step's programs on TPUs without a device, for developers of kernels.

    python scripts/bench/tpu_time.py [--config FILE|PRESET] [--set NAME=VALUE ...] [--json] [--hlo DIR]

The script compiles the programs of `grpo inspect-mesh --compile` for the slice of `mesh.pretend`. Nothing is run, and
of the models only `config.json` is read; libtpu is needed (`pip install -e '.[tpu]'`, on any x86-64 Linux). `--json`
prints the report of `grpo inspect-mesh --compile --json` with added times. `--hlo` writes the texts of the programs.

Times are for one call, **estimated by the compiler, never measured**:

- A fusion takes the cycles that the compiler states. A Pallas kernel takes its scheduled instructions times its grid
  steps, or the time of its copies if that is longer. A collective sends its bytes in a ring over the chip's links; time
  that overlaps with other work does not count. All other instructions take the time of moving their bytes.
- Rows are as full as the settings allow. Decoding is the time of one token of all rows at full length.
- MFU is the fraction of the chip's peak FLOP/s that the model's FLOPs use: matmuls of each token and visible pairs of
  attention, without recomputation.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from app.mesh.chips import TpuChip, find_chip
from app.model.prefill_and_decode import DECODE_SCOPE
from app.preflight.compiled_programs import CompiledProgram
from app.preflight.inspect_mesh import build_mesh_inspection, open_step_outline, write_program
from app.preflight.phase_memory import StepOutline
from app.records.text_format import format_percent, format_table
from scripts.bench.kernel_time import kernel_schedules, take_scheduled_bundles
from scripts.bench.program_time import PARTS, program_time
from scripts.bench.program_work import ProgramWork, work_of_program
from settings import InputError, load
from settings.checks.commands import check_for_inspect_mesh


class TimedPrograms:
    """Estimates the time of each program of a run right after it is compiled, and collects the results."""

    def __init__(self, step: StepOutline, chip: TpuChip, hlo: Path | None = None) -> None:
        self.step, self.chip, self.hlo = step, chip, hlo
        self.times: list[dict[str, Any]] = []
        """The result of `time_fields` for each program."""
        self._bundles: dict[str, int] = {}
        take_scheduled_bundles(
            kernel_schedules()
        )  # this discards the schedules of programs that this process compiled before

    def add(self, program: CompiledProgram, text: str) -> None:
        """Adds the estimated time of a program that has just been compiled; `text` is its HLO."""
        if self.hlo is not None:
            write_program(self.hlo, program, text)
        self._bundles |= take_scheduled_bundles(kernel_schedules())
        work = work_of_program(self.step, program.phase, program.name)
        turn_of = DECODE_SCOPE if program.name == "decode" else None
        self.times.append(time_fields(text, self.chip, work, bundles=self._bundles, turn_of=turn_of))


def time_fields(
    text: str, chip: TpuChip, work: ProgramWork, *, bundles: Mapping[str, int], turn_of: str | None
) -> dict[str, Any]:
    """Returns the times of one call. `estimated_s` is the sum of the three fields before it, and also of `parts_s`."""
    time = program_time(text, chip, bundles=bundles, turns=work.turns, turn_of=turn_of)
    return {
        "compute_s": time.compute_s,
        "kernel_s": time.kernel_s,
        "exposed_collective_s": time.exposed_collective_s,
        "estimated_s": time.estimated_s,
        "parts_s": {part: time.parts[part] for part in PARTS},
        "model_flops": work.model_flops or None,
        "mfu": work.model_flops / time.estimated_s / chip.flops or None,
    }


def time_report(config: str | None, changes: list[str], hlo: Path | None = None) -> dict[str, Any]:
    """Returns the report of `grpo inspect-mesh --compile`, with the estimated times of the programs.

    Raises:
        InputError: the settings cannot be used or are not for TPUs, or a program needs too much memory.
    """
    resolved = load(config, changes, os.environ)
    check_for_inspect_mesh(resolved)
    kernel_schedules()  # libtpu reads the folder of the schedules when it is loaded
    step = open_step_outline(resolved, compiles=True)
    device = step.session.mesh.devices.flat[0]
    chip = find_chip(device.device_kind)
    if chip is None:
        raise InputError(f"mesh.pretend: only TPUs have time estimates, not {device.device_kind}; set it to v5e-8")
    timed = TimedPrograms(step, chip, hlo)
    report = build_mesh_inspection(step, compiles=True, on_program=timed.add)
    programs = [{**asdict(one), **times} for one, times in zip(report.programs, timed.times, strict=True)]
    return {**report.to_dict(), "programs": programs}


def table(programs: list[dict[str, Any]]) -> str:
    rows = [
        (
            f"{one['phase']}: {one['name']}",
            *(f"{seconds * 1e3:.2f} ms" for seconds in (one["estimated_s"], *(one["parts_s"][part] for part in PARTS))),
            "-" if one["mfu"] is None else format_percent(one["mfu"]),
        )
        for one in programs
    ]
    head = ("of one call, estimated by the compiler", "time", *PARTS, "MFU")
    note = "A call of decode is one token of all rows. Collectives count only while no other work covers them."
    return f"{format_table(rows, header=head)}\n{note}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", metavar="FILE|PRESET")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--hlo", type=Path, metavar="DIR", help="folder for the texts of the programs")
    options = parser.parse_args()
    try:
        report = time_report(options.config, options.set, options.hlo)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(json.dumps(report, indent=2) if options.json else table(report["programs"]))


if __name__ == "__main__":
    main()
