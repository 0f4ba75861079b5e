"""Tests that the scripts return the exit code of the tests, and clean up."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.scripts.conftest import DEADLINE_S, SCRIPTS


def test_a_script_that_runs_the_suite_ends_as_it_does_and_clears_away(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "$*"\nexit 3\n')
    python.chmod(0o755)
    script = f"set -euo pipefail; source '{SCRIPTS}/environment.sh'; trap 'echo cleared' EXIT; run_tests -k something"
    done = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "GRPO_VENV": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 3, done.stderr
    arguments, last = done.stdout.splitlines()
    assert arguments.startswith("-m pytest ") and arguments.endswith(" -k something")
    assert last == "cleared"
