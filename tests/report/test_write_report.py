from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.program import REPOSITORY, here
from tests.report.run_directories import quickstart_history, sample_record, step_record, write_lines, write_run

SAMPLES = [sample_record(f"p/s{i}") for i in range(3)]


def test_it_needs_no_jax_no_model_and_no_window_and_says_what_it_wrote(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run",
        quickstart_history(),
        rollouts={1: SAMPLES},
        settings=("model.path=/nowhere/model", "logging.save_rollouts=false"),
    )
    program = (
        "import sys, cli\n"
        "unwanted = {'jax', 'flax', 'transformers', 'wandb', 'matplotlib.pyplot'}\n"
        "try: cli.main()\n"
        "finally: print(unwanted & set(sys.modules), file=sys.stderr)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program, "report", str(run), "--json"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stderr == "set()\n"
    assert json.loads(answer.stdout) == {
        "steps": 100,
        "alerts": 0,
        "samples shown": 3,
        "damaged lines": 0,
        "report": str(run / "report.html"),
        "samples": str(run / "rollouts.html"),
        "plots": str(run / "plots"),
    }
    assert not list(run.rglob("*.partial"))


def test_a_plot_whose_data_is_gone_goes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [step_record(1, policy__kl=0.1)])
    assert here("report", run).exit_code == 0
    assert (run / "plots" / "kl.png").exists()
    (run / "plots" / "mine.png").write_bytes(b"mine")
    write_lines(run / "metrics.jsonl", [step_record(1)])
    assert here("report", run).exit_code == 0
    assert not (run / "plots" / "kl.png").exists() and (run / "plots" / "mine.png").exists()


def test_a_report_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [step_record(1)])
    (run / "plots").write_text("in the way")
    result = here("report", run)
    assert result.exit_code == 2
    assert result.stderr == f"error: {run / 'plots'}: cannot be written: File exists\n"
    assert not (run / "report.html").exists()
