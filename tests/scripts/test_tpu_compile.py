"""The comparison with Tunix's gradients, on a program written by hand: nothing is compiled."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from app.mesh.chips import TPU_CHIPS

BENCH = Path(__file__).resolve().parent.parent.parent / "scripts" / "bench"
HLO = """HloModule jit_gradients

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %w = f32[8] add(%p, %p), metadata={op_name="jit(f)/attention/add"}, backend_config={"estimated_cycles":"CYCLES"}
}
"""
CYCLES = 2_048 * 3_000
"""Of 3,000 cycles for each of the completion tokens of a device: 32 samples of 512 on 8 devices."""


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module("tpu_compile")
    for name in ("tpu_compile", "shapes"):
        sys.modules.pop(name, None)


def keep(folder: Path, name: str, *, cycles: int, temporary_bytes: int) -> None:
    """Writes what a compiled program leaves behind: ours its time, the other's its text."""
    directory = folder / name
    directory.mkdir()
    figures: dict[str, Any] = {"argument_bytes": 1, "output_bytes": 2, "temporary_bytes": temporary_bytes}
    if "grpo" in name:
        seconds = cycles / TPU_CHIPS["v5e"].clock_hz
        figures |= {"rows": 32, "estimated_s": seconds, "parts_s": {"attention": seconds}}
    else:
        (directory / "program.hlo").write_text(HLO.replace("CYCLES", str(cycles)))
        figures["bundles"] = {}
    (directory / "figures.json").write_text(json.dumps(figures))


def run(bench, monkeypatch, folder: Path, *options: str) -> list[dict]:
    out = folder / "out.json"
    monkeypatch.setattr(sys, "argv", ["tpu_compile.py", "--keep", str(folder), "--out", str(out), *options])
    bench.main()
    return json.loads(out.read_text())["programs"]


def test_both_sides_are_counted_for_each_completion_token(bench, tmp_path, monkeypatch, capsys):
    keep(tmp_path, "Qwen2.5-1.5B-grpo", cycles=CYCLES, temporary_bytes=2_048 * 2**20)
    keep(tmp_path, "Qwen2.5-1.5B-Tunix-splash", cycles=4 * CYCLES, temporary_bytes=2_048 * 2**21)
    only = ("--tunix-python", sys.executable, "--only", "Qwen2.5-1.5B grpo", "Qwen2.5-1.5B Tunix, splash")
    monkeypatch.setattr(bench, "ROWS", {bench.OURS: 32})
    monkeypatch.setattr(bench, "TUNIX", {"Tunix, splash": True})
    ours, tunix = run(bench, monkeypatch, tmp_path, *only)
    assert ours["s_per_token"] == pytest.approx(3_000 / TPU_CHIPS["v5e"].clock_hz)
    assert (ours["side"], ours["samples"], ours["parts_s"]) == ("grpo", 32, {"attention": ours["estimated_s"]})
    assert tunix["temporary_bytes_per_token"] == 2**21
    assert capsys.readouterr().out.splitlines()[-1].split()[-2:] == ["0.25x", "0.50x"]


def test_without_tunix_only_our_side_is_shown_and_what_is_missing(bench, tmp_path, monkeypatch, capsys):
    for model in bench.PRESETS:
        for side in bench.ROWS:
            keep(tmp_path, f"{model} {side}".replace(", ", "-").replace(" ", "-"), cycles=CYCLES, temporary_bytes=1)
    programs = run(bench, monkeypatch, tmp_path)
    assert [(one["model"], one["side"]) for one in programs] == [(m, s) for m in bench.PRESETS for s in bench.ROWS]
    assert "Tunix is missing: --tunix-python PYTHON" in capsys.readouterr().err
