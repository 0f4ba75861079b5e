"""Tests that the turns of attention are those of what `model.attention` chooses, for a TPU that is not there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import Mesh

from app.mesh import devices
from app.mesh.axis_rules import AXES
from app.mesh.compile_only import compile_only_devices
from app.mesh.tpu_chips import parse_slice
from app.model.attention import ATTENTION_SCOPE
from app.preflight.program_work import generation_work
from app.rollout.batch_engine import BatchShape
from app.rollout.slot_programs import INSERT_SCOPE
from tests.program import here, of_tiny, settings
from tests.tiny import EVEN, make_mesh


@pytest.fixture(autouse=True)
def libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips a test without TPU compiler, and ends the simulation of a slice with the test."""
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install -e '.[tpu]'")
    monkeypatch.setattr(devices, "_simulated_slice", None)
    monkeypatch.setattr(devices, "_simulated_devices", None)


@pytest.mark.parametrize(
    ("implementation", "turns"),
    # 32 blocks of 128 tokens have 528 pairs, computed 128 at once; 8 blocks of 512 tokens have 36.
    [("xla", 5), ("auto", 36), ("kernel", 36)],
)
def test_turns_are_those_of_loops_or_of_the_kernel(implementation, turns):
    tpu = Mesh(np.array(compile_only_devices(parse_slice("v5e-1"))).reshape(1, 1, 1), AXES)
    architecture = replace(EVEN, attention_implementation=implementation)
    shape = BatchShape(num_prompts=1, num_rows=1, prompt_length=4096, cache_length=4096, num_new=0)
    work = generation_work(architecture, tpu, shape)
    assert work["prefill"].turns == {ATTENTION_SCOPE: turns, INSERT_SCOPE: 1}
    others = generation_work(EVEN, make_mesh(), shape)
    assert [one.model_flops for one in work.values()] == [one.model_flops for one in others.values()]


@pytest.mark.slow
def test_loops_of_xla_on_a_tpu_are_part_of_the_estimate(tiny_model: Path) -> None:
    chosen = settings("mesh.pretend=v5e-8", "model.attention=xla")
    result = here("inspect-mesh", *of_tiny(tiny_model), *chosen, "--compile", "--json")
    assert result.exit_code == 0, result.stderr
    programs = {one["name"]: one for one in json.loads(result.stdout)["programs"]}
    assert {one["kernel_s"] for one in programs.values()} == {0}
    assert programs["gradients"]["parts_s"]["attention"] > 0
