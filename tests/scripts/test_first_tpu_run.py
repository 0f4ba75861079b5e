"""Tests the script for the first run on new devices, and the text that it prints."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.program import DEADLINE_S, settings
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
