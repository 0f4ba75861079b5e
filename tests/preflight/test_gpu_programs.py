"""`grpo inspect-mesh --compile` for GPUs that are not there."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from app.mesh import devices
from app.mesh.chips import GPU_HOSTS
from tests.program import here, of_tiny, settings

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

CARD = GPU_HOSTS["h100-1"].chip


@pytest.fixture(autouse=True)
def no_simulated_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends the simulation with the test."""
    monkeypatch.setattr(devices, "_simulated_slice", None)
    monkeypatch.setattr(devices, "_simulated_devices", None)


def report_of(model: Path, *overrides: str, options: tuple[str | Path, ...] = ()) -> dict[str, Any]:
    result = here("inspect-mesh", *of_tiny(model), *settings(*overrides), "--json", *options)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_a_simulated_host_has_the_memory_and_the_number_of_its_cards(tiny_model: Path) -> None:
    report = report_of(tiny_model, "mesh.pretend=h100-8")
    assert (report["platform"], report["device_kind"], report["num_devices"]) == ("gpu", CARD.device_kind, 8)
    assert (report["device_memory_bytes"], report["pretended"]) == (CARD.hbm_bytes, "h100-8")
    assert report["shape"] == {"dp": 1, "fsdp": 8, "tp": 1}


@pytest.mark.skipif(find_spec("jax_plugins") is not None, reason="JAX for an accelerator is installed")
def test_without_the_compiler_one_error_says_what_to_install(tiny_model: Path) -> None:
    result = here("inspect-mesh", *of_tiny(tiny_model), *settings("mesh.pretend=h100-1"), "--compile")
    assert result.exit_code == 2
    [line] = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert re.match(r"error: mesh\.pretend: cannot compile for h100-1: .*pip install -e '\.\[cuda\]'", line)


@pytest.mark.parametrize("host", ["h100-1", pytest.param("h100-4", marks=pytest.mark.slow)])
def test_a_cpu_process_compiles_a_step_for_gpus_with_their_kernels(host: str, tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("jax_plugins.xla_cuda13", reason="JAX for CUDA is not installed: pip install -e '.[cuda]'")
    chosen = (f"mesh.pretend={host}", "model.dtype=bfloat16", "algorithm.beta=0.1", "eval.every_steps=0")
    report = report_of(tiny_model, *chosen, options=("--compile", "--hlo", tmp_path))
    programs = {(one["phase"], one["name"]): one for one in report["programs"]}
    forward, backward = {"attention_forward"}, {"attention_backward_query", "attention_backward_keys"}
    kernels = {"prefill": forward, "reference": forward, "gradients": forward | backward}
    for (phase, name), one in programs.items():
        text = (tmp_path / f"{phase}_{name}.hlo").read_text()
        found = {kernel for kernel in forward | backward if f'name = "{kernel}"' in text}
        assert found == kernels.get(name, set())
        assert one["backend"] == "gpu" and one["argument_bytes"] > 0 and one["collective_bytes"] is None
    assert set(programs) == {
        *(("rollout", "prefill"), ("rollout", "decode"), ("score", "reference")),
        *(("update", "gradients"), ("update", "optimizer")),
    }
    optimizer, memory = programs["update", "optimizer"], report["memory"]["update"]
    state = memory["weights"] + memory["optimizer"]
    assert state <= optimizer["aliased_bytes"] <= optimizer["output_bytes"] <= state + 20_000


def test_slots_read_their_blocks_by_a_kernel(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("jax_plugins.xla_cuda13", reason="JAX for CUDA is not installed: pip install -e '.[cuda]'")
    chosen = ("mesh.pretend=h100-1", "model.dtype=bfloat16", "rollout.slots=8", "rollout.top_p=0.95")
    report_of(tiny_model, *chosen, options=("--compile", "--hlo", tmp_path))
    text = (tmp_path / "rollout_decode.hlo").read_text()
    assert 'name = "attention_decode"' in text
