"""Presets for accelerators compiled for their hardware, against the record: `scripts/test.sh --compile`."""

from __future__ import annotations

import importlib
import json
import sys
from types import ModuleType
from typing import Any

import pytest

from settings.loading.config_file import preset_names
from tests.scripts.conftest import SCRIPTS

SLACK = 1.05
"""How much more than the record says a program may need before the record must be made again, and argued for."""


@pytest.fixture
def record() -> dict[str, Any]:
    return json.loads((SCRIPTS / "bench" / "results" / "compiled_presets.json").read_text())["presets"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS / "bench"))
    monkeypatch.delitem(sys.modules, "compiled_presets", raising=False)
    return importlib.import_module("compiled_presets")


def test_recorded_presets_are_for_their_devices(bench: ModuleType, record: dict[str, Any]) -> None:
    assert record.keys() <= set(bench.accelerator_presets())
    for preset, one in record.items():
        assert one["devices"] == bench.devices_of(preset)
        assert {"rollout/prefill", "rollout/decode", "update/gradients", "update/optimizer"} <= set(one["programs"])


@pytest.mark.compile
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("preset", [name for name in preset_names() if name.startswith(("gsm8k", "math"))])
def test_a_preset_compiles_for_its_hardware_and_fits_and_is_as_fast_as_recorded(
    preset: str, bench: ModuleType, record: dict[str, Any]
) -> None:
    if module := bench.missing_compiler(preset):
        pytest.skip(f"{module} is not installed")
    assert preset in record, f"make its record: python scripts/bench/compiled_presets.py {preset}"
    found, recorded = bench.compiled(preset), record[preset]
    assert set(found["programs"]) == set(recorded["programs"])
    if "passes_of_experts" in found:
        # Forward, backward, which is two, and forward again for `remat: block`: 12 grouped products of a layer.
        assert found["passes_of_experts"] == pytest.approx(4, rel=0.1)
    for name, before in recorded["programs"].items():
        now = found["programs"][name]
        assert now["argument_bytes"] == pytest.approx(before["argument_bytes"], rel=0.01), name
        for figure in ("temporary_bytes", "estimated_s"):
            if figure in before:
                assert now[figure] <= before[figure] * SLACK, (name, figure)
