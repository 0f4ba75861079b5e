"""Tests of runs of a tiny mixture of experts, and of what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from app.mesh import devices
from tests.program import here, metrics_of, of_tiny, settings, train_here
from tests.run_fixtures import NO_REPORT, TINY, write_config
from tests.tiny_directory import write_model

MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
}


@pytest.fixture(autouse=True)
def no_simulated_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends the simulation of a host with GPUs with the test."""
    monkeypatch.setattr(devices, "_simulated_slice", None)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("mixture") / "tiny", **MIXTURE)


def trained(folder: Path, model: Path, *overrides: str) -> list[dict[str, Any]]:
    folder.mkdir()
    result = train_here(write_config(folder, TINY + NO_REPORT, model), *overrides)
    assert result.exit_code == 0, result.stderr
    metrics = metrics_of(folder / "runs" / "tiny")
    assert all(line["rollout/sampler_scorer_logprob_diff_max"] <= 1e-4 for line in metrics[1:])
    return metrics


def test_experts_learn_alike_on_one_device_and_on_many_and_the_router_stays(mixture: Path, tmp_path: Path) -> None:
    decay = "optimizer.weight_decay=0.1"
    one = trained(tmp_path / "one", mixture, "mesh.cpu_devices=8", "mesh.shape=8,1,1", "rollout.slots=8", decay)
    many = trained(tmp_path / "many", mixture, "mesh.cpu_devices=8", "mesh.shape=2,2,2", "rollout.slots=8", decay)
    for name in ("reward/mean", "policy/grad_norm", "policy/entropy"):
        assert [line[name] for line in many[1:]] == pytest.approx([line[name] for line in one[1:]], rel=1e-4)
    run = tmp_path / "one" / "runs" / "tiny"
    result = here("export", "--checkpoint", run, "--out", tmp_path / "out", *settings("mesh.cpu_devices=8"))
    assert result.exit_code == 0, result.stderr
    before, after = load_file(mixture / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    equal = {name for name in before if np.array_equal(before[name], after[name])}
    # A weight decay, or a gradient, would move the router.
    assert equal == {name for name in before if name.endswith("mlp.gate.weight")}


def test_adapters_of_attention_learn_beside_experts(mixture: Path, tmp_path: Path) -> None:
    chosen = ("model.lora.rank=2", "model.lora.targets=attention", "optimizer.learning_rate=1e-2", "mesh.shape=1,4,2")
    metrics = trained(tmp_path / "run", mixture, *chosen)
    assert metrics[1]["policy/grad_norm"] > 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("mesh.shape=2,1,4",), "mesh.shape: tp = 4 does not divide the 6 experts of "),
        (("rollout.mesh=tp=4",), "rollout.mesh: 'tp=4' does not divide the 6 experts of the model; the nearest tp"),
        (("model.lora.rank=2",), "model.lora.targets: all includes matrices of the MLP, but this model has 6 experts"),
        (("rollout.weights=int8",), "rollout.weights: int8 quantizes matrices, but not those of this model's experts"),
        (
            ("model.lora.rank=2", "model.lora.targets=attention", "model.lora.quantize_base=int8"),
            "model.lora.quantize_base: int8 quantizes matrices, but not those of this model's experts",
        ),
    ],
)
def test_what_experts_cannot_do_is_refused(mixture: Path, overrides: tuple[str, ...], message: str) -> None:
    result = here("inspect-mesh", *of_tiny(mixture), *settings(*overrides))
    assert result.exit_code == 2
    assert result.stderr.count("error: ") == 1 and message in result.stderr
