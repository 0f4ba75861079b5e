"""Tests the scripts for developers: exit codes, generated pages, the record of compiled presets, and faults."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from scripts.reference_pages import PAGES, REFERENCE
from settings.loading.config_file import preset_names
from tests.program import DEADLINE_S
from tests.scripts.conftest import SCRIPTS

SLACK = 1.05
"""Factor by which a program may exceed its record before the record must be made again and justified."""


@pytest.mark.parametrize("name", PAGES)
def test_generated_reference_page_is_up_to_date(name: str) -> None:
    assert (REFERENCE / name).read_text(encoding="utf-8") == PAGES[name](), "run python scripts/reference_pages.py"


def test_run_tests_returns_the_exit_code_of_pytest(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "$*"\nexit 3\n')
    python.chmod(0o755)
    script = f"set -euo pipefail; source '{SCRIPTS}/environment.sh'; trap 'echo cleared' EXIT; run_tests -k something"
    environment = {**os.environ, "GRPO_VENV": str(tmp_path)}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 3, done.stderr
    arguments, last = done.stdout.splitlines()
    assert arguments.startswith("-m pytest ") and arguments.endswith(" -k something") and last == "cleared"


@pytest.fixture
def record() -> dict[str, Any]:
    return json.loads((SCRIPTS / "bench" / "results" / "compiled_presets.json").read_text())["presets"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS / "bench"))
    monkeypatch.delitem(sys.modules, "compiled_presets", raising=False)
    return importlib.import_module("compiled_presets")


def test_records_of_compiled_presets_match_their_devices_and_programs(
    bench: ModuleType, record: dict[str, Any]
) -> None:
    assert record.keys() <= set(bench.accelerator_presets())
    for preset, one in record.items():
        assert one["devices"] == bench.devices_of(preset)
        assert {"rollout/prefill", "rollout/decode", "update/gradients", "update/optimizer"} <= set(one["programs"])


@pytest.mark.compile
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("preset", [x for x in preset_names() if re.match("(gsm8k|math)(?!.*_cpu$)", x)])
def test_preset_compiles_for_its_hardware_within_the_recorded_bytes_and_time(preset, bench, record):
    if module := bench.missing_compiler(preset):
        pytest.skip(f"{module} is not installed")
    assert preset in record, f"make its record: python scripts/bench/compiled_presets.py {preset}"
    found, recorded = bench.compiled(preset), record[preset]
    assert set(found["programs"]) == set(recorded["programs"])
    if "passes_of_experts" in found:
        # A layer has 12 grouped matmuls: a forward pass, a backward pass, which counts twice, and another forward pass
        # for `remat: block`.
        assert found["passes_of_experts"] == pytest.approx(4, rel=0.1)
    for name, before in recorded["programs"].items():
        now = found["programs"][name]
        assert now["argument_bytes"] == pytest.approx(before["argument_bytes"], rel=0.01), name
        for figure in ("temporary_bytes", "estimated_s"):
            if figure in before:
                assert now[figure] <= before[figure] * SLACK, (name, figure)
