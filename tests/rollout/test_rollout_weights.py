"""Tests of generation by weights of fewer bits than those that learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from app.model.decode_weights import abstract_decode_weights
from app.model.decoder import DecoderDefinition, Params, flatten_by_path
from app.model.io.hf_weights import quantize_kernel
from app.model.lora import LoRAConfig
from app.model.quantization import CODES, SCALES
from app.records.sample import Sample
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import SamplingRules
from settings import load
from settings.checks.commands import check_for_train
from tests.program import here, metrics_of, train_here
from tests.quantized import dequantized_params
from tests.replays import replay
from tests.tiny import BIASED, EVEN, make_engine, make_mesh, random_params, random_prompts

FLOAT32 = jnp.dtype("float32")
PROMPTS = random_prompts(4, vocab_size=50, longest=8)
REQUEST = GenerationRequest(group_size=2, max_new_tokens=6, rules=SamplingRules(1.0), seed=1, policy_version=2)
LORA = LoRAConfig(2, 4.0, ("q_proj", "down_proj"))


def quantized_params(definition: DecoderDefinition, params: Params) -> Params:
    """Returns the weights with the codes and scales of each layer's kernels."""
    flat = flatten_by_path(params)
    for path in [path for path in flat if path[-1] == "kernel"]:
        layers = [quantize_kernel(definition, path, np.asarray(layer)) for layer in flat.pop(path)]
        flat |= {leaf: np.stack([layer[leaf] for layer in layers]) for leaf in layers[0]}
    return jax.tree.map(jnp.asarray, unflatten_dict(flat))


def assert_same_samples(ours: list[Sample], others: list[Sample]) -> None:
    for sample, other in zip(ours, others, strict=True):
        np.testing.assert_array_equal(sample.completion_ids, other.completion_ids)
        np.testing.assert_allclose(sample.behavior_logprobs, other.behavior_logprobs, atol=1e-5)


@pytest.mark.parametrize("architecture", [EVEN, BIASED])
@pytest.mark.parametrize("lora", [None, LORA])
def test_samples_are_those_of_the_rounded_policy(architecture: Any, lora: LoRAConfig | None) -> None:
    policy = DecoderDefinition.create(architecture, lora=lora)
    params, held = random_params(policy), policy.quantized("int8")
    rounded = dequantized_params(held, quantized_params(held, params))
    engine, whole = make_engine(held), make_engine(policy)
    ours = engine.generate(engine.to_decode_weights(params), PROMPTS, REQUEST)
    assert_same_samples(ours, whole.generate(whole.to_decode_weights(rounded), PROMPTS, REQUEST))
    exact = whole.generate(whole.to_decode_weights(params), PROMPTS, REQUEST)
    assert any(not np.array_equal(a.behavior_logprobs, b.behavior_logprobs) for a, b in zip(ours, exact, strict=True))


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 8, 1), (1, 1, 2)])
def test_samples_do_not_depend_on_the_mesh(shape: tuple[int, int, int]) -> None:
    policy = DecoderDefinition.create(EVEN)
    held, one, mesh = policy.quantized("int8"), make_mesh((1, 1, 1)), make_mesh(shape)
    alone, engine = make_engine(held, one), make_engine(held, mesh)
    expected = alone.generate(alone.to_decode_weights(random_params(policy)), PROMPTS, REQUEST)
    params = jax.device_put(random_params(policy), policy.shardings(mesh))
    weights = engine.to_decode_weights(params)
    assert_same_samples(engine.generate(weights, PROMPTS, REQUEST), expected)


def test_matrices_take_a_byte_for_each_number() -> None:
    weights = abstract_decode_weights(
        DecoderDefinition.create(EVEN).quantized("int8"), make_mesh(), jnp.dtype("bfloat16")
    )
    for path, leaf in flatten_by_path(weights.blocks[0]).items():
        expected = {CODES: jnp.int8, SCALES: jnp.float32}.get(path[-1], jnp.bfloat16)
        assert leaf.dtype == expected and path[-1] != "kernel"


def test_the_importance_weights_correct_for_the_rounding_unless_told_otherwise() -> None:
    assert load(None, [], {}).settings.algorithm.correction == "none"
    assert load(None, ["rollout.weights=int8"], {}).settings.algorithm.correction == "truncate"
    assert load(None, ["rollout.kv_cache=int8"], {}).settings.algorithm.correction == "truncate"
    told = ["rollout.weights=int8", "algorithm.correction=none"]
    assert load(None, told, {}).settings.algorithm.correction == "none"


@pytest.mark.parametrize(
    "layers", [{"rollout.weights": "int8"}, {"rollout.kv_cache": "int8"}, {"rollout.max_staleness": 1}]
)
def test_a_bound_of_a_correction_that_is_not_derived_any_more_is_a_notice(tmp_path: Path, layers: dict) -> None:
    """A value of a file that a later layer makes useless is no error."""
    (setting, value), file = next(iter(layers.items())), tmp_path / "settings.yaml"
    file.write_text(f"{setting}: {value}\nalgorithm.correction_max: 3.0\n", encoding="utf-8")
    off = "0" if setting == "rollout.max_staleness" else "null"
    check_for_train(load(str(file), [f"{setting}={off}"], {}))


def test_kernels_that_have_few_bits_already_are_refused(config: Path) -> None:
    result = train_here(config, "rollout.weights=int8", "model.lora.rank=2", "model.lora.quantize_base=nf4")
    assert result.exit_code == 2
    assert "rollout.weights: int8 rounds weights for generation, which model.lora.quantize_base: nf4" in result.stderr
    assert not (config.parent / "runs").exists()


@pytest.mark.parametrize(
    "sets",
    [
        ("rollout.weights=int8",),
        ("rollout.kv_cache=int8",),
        pytest.param(
            ("rollout.weights=int8", "rollout.kv_cache=int8", "rollout.scheduler=adaptive", "model.dtype=bfloat16"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["weights", "cache", "workers_in_bfloat16"],
)
def test_a_run_measures_the_rounding_of_its_sampler_and_corrects_for_it(config: Path, sets: tuple[str, ...]) -> None:
    result = train_here(config, *sets)
    assert result.exit_code == 0, result.stderr
    lines = metrics_of(config.parent / "runs" / "tiny")[1:]
    assert all(line["rollout/sampler_scorer_logprob_diff_mean"] > 1e-6 for line in lines)
    assert all(0 < line["rollout/sampler_scorer_kl"] < 0.01 for line in lines)
    assert all(0.9 < line["policy/correction_ess"] < 1 for line in lines)
    assert [line["perf/compilations"] for line in lines[2:]] == [0] * (len(lines) - 2)


def test_what_comes_of_such_a_run_says_so(config: Path, tmp_path: Path) -> None:
    assert train_here(config, "rollout.weights=int8", "rollout.kv_cache=int8", "run.steps=2").exit_code == 0
    run = config.parent / "runs" / "tiny"
    exported = here("export", "--checkpoint", run, "--out", tmp_path / "out")
    assert exported.exit_code == 0, exported.stderr
    note = "the run evaluated a rounded policy (rollout.weights: int8 and rollout.kv_cache: int8)"
    assert note in exported.stderr and note in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "--set rollout.weights=null --set rollout.kv_cache=null" in exported.stdout
    replayed = replay(run / "rollouts", tmp_path / "runs", "algorithm.correction=none")
    assert replayed.exit_code == 0, replayed.stderr
