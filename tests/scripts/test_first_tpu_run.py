"""Tests of the script for the first run on new devices, and of the text that it prints."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.first_run_report import report
from tests.program import DEADLINE_S, here, settings
from tests.scripts.conftest import SCRIPTS

NAMES = ("dry-run", "doctor", "inspect-mesh", "train")


def run_script(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPTS / "first_tpu_run.sh"), *arguments],
        cwd=folder,
        env={**os.environ, "GRPO_VENV": sys.prefix},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=4 * DEADLINE_S,
    )


@pytest.mark.slow
def test_first_run_checks_and_trains_the_quickstart_on_a_cpu(tmp_path: Path) -> None:
    small = ("rollout.prompts_per_step=4", "data.num_problems=40", "eval.num_prompts=8", "mesh.cpu_devices=1")
    done = run_script(tmp_path, "quickstart", *settings(*small))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exit codes: dry-run 0, doctor 0, inspect-mesh 0, train 0" in done.stdout
    assert "builtin:tiny, model.dtype float32, model.attention auto; 10 of 10 steps" in done.stdout
    assert "attention: ok: attention on cpu without a kernel equals dense attention of single rows" in done.stdout
    for name in ("rollout: prefill", "rollout: decode", "update: gradients", "update: optimizer"):
        assert re.search(rf"^{name} .* [MK]iB .* [MK]iB .* s$", done.stdout, re.M), name
    assert re.findall(r"^(\d+) +-?\d.*$", done.stdout, re.M) == [str(step) for step in range(1, 11)]
    assert "failed" not in done.stdout
    (logs,) = (tmp_path / "launches").iterdir()
    kept = {f"{name}.{kind}" for name in NAMES for kind in ("err", "out", "status")} | {"report.txt", "settings.yaml"}
    assert {path.name for path in logs.iterdir()} == kept
    assert (logs / "report.txt").read_text() == done.stdout
    assert (tmp_path / "runs" / logs.name / "metrics.jsonl").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["launches", "runs"]


def test_unusable_settings_end_the_first_run_before_anything_is_written(tmp_path: Path) -> None:
    done = run_script(tmp_path, "quickstrat")
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean quickstart" in done.stderr and list(tmp_path.iterdir()) == []


def write_outputs(folder: Path) -> None:
    """Writes what the script would have left of a run of four steps, of which the last two are compared."""
    sizes = {"argument_bytes": 2**30, "temporary_bytes": 2**20, "compile_s": 1.5}
    program = {"phase": "update", "name": "gradients", "backend": "tpu", **sizes}
    (folder / "inspect-mesh.out").write_text(json.dumps({"peak_bytes": 2**21, "programs": [program]}))
    for name in NAMES:
        (folder / f"{name}.status").write_text("0\n")
    (folder / "run").mkdir()
    lines: list[dict[str, Any]] = []
    for number, seconds in enumerate((60.0, 9.0, 2.0, 4.0), start=1):
        times = {f"time/{phase}_s": seconds for phase in ("rollout", "score", "update", "step")}
        lines.append({"step": number, "loss": 0.5, "perf/peak_memory_bytes": 3 * 2**20, **times})
    (folder / "run" / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_report_shows_programs_and_the_median_of_warm_steps(tmp_path: Path) -> None:
    run = settings(f"run.dir={tmp_path}", "run.name=run", "run.steps=4")
    (tmp_path / "settings.yaml").write_text(here("train", *run, "--print-config").stdout)
    (tmp_path / "train.status").write_text("1\n")
    (tmp_path / "train.err").write_text("".join(f"line {number}\n" for number in range(20)))
    text = report(tmp_path)
    assert "exit codes: dry-run ?, doctor ?, inspect-mesh ?, train 1" in text and "0 of 4 steps" in text
    assert "the end of train.err:\nline 12\n" in text and "line 19\n---" in text
    write_outputs(tmp_path)
    text = report(tmp_path)
    rows = {row.split()[0]: re.split(" {2,}", row) for row in text.splitlines() if row}
    assert rows["phase"][1] == "measured, median of steps 3 to 4"
    assert [rows[phase][1] for phase in ("rollout", "score", "update")] == ["3.00 s"] * 3
    assert re.search(r"^update: gradients +1\.00 GiB +1\.0 MiB +1\.5 s$", text, re.M)
    assert "the first step, which compiles, took 60.00 s" in text
    assert "3.0 MiB; 2.0 MiB foreseen" in text
