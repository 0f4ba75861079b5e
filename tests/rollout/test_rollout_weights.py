"""Tests the placement, the mesh and the quantization of the weights that generate."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from jax.sharding import AxisType, Mesh

from app.mesh.axis_rules import AXES
from app.mesh.device_mesh import with_tp
from app.mesh.placement import abstract_arrays, bytes_per_device
from app.model import prefill_and_decode
from app.model.architecture import Architecture
from app.model.decode_weights import DecodeConversion, abstract_decode_weights, transferred_bytes
from app.model.decoder import DecoderDefinition, Params, flatten_by_path
from app.model.io.hf_weights import quantize_kernel
from app.model.lora import LoRAConfig
from app.records.sample import Sample
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import SamplingRules
from app.runtime import rollout_mesh as choice
from app.runtime.rollout_mesh import rollout_mesh, rollout_mesh_notes
from scripts.bench.hlo_collectives import program_collectives
from scripts.bench.shapes import QWEN2_5_7B
from settings import InputError, Settings, load
from tests.program import here, metrics_of, succeeded, train_here
from tests.quantized import dequantized_params
from tests.rollout.slots import assert_same_samples
from tests.tiny import BIASED, EVEN, SWITCHED, TinyEngine, make_mesh, random_params, random_prompts

FLOAT32 = jnp.dtype("float32")
TRAINING = (1, 8, 1)
SHALLOW = replace(EVEN, num_layers=1)
FEW_HEADS = replace(SHALLOW, num_query_heads=8, num_kv_heads=1)
"""Its query heads can be split over 8 devices, and its only key head over none."""
WINDOWED = replace(SWITCHED, num_layers=2, windows=(3, None), num_query_heads=8, num_kv_heads=1)
PROMPTS = random_prompts(4, vocab_size=50, longest=20)


def request(top_p: float = 1.0) -> GenerationRequest:
    rules = SamplingRules(1.0, top_p=top_p)
    return GenerationRequest(group_size=2, max_new_tokens=6, rules=rules, seed=1, policy_version=2)


def mesh_samples(
    architecture: Architecture, training: Any = (1, 1, 1), tp: int = 0, *, top_p: float = 1.0, is_int8: bool = False
) -> list[Sample]:
    """Returns samples by weights that are trained on one mesh and, if `tp` is given, generate on another."""
    definition, trained = DecoderDefinition.create(architecture), make_mesh(training)
    mesh = with_tp(trained, tp) if tp else trained
    params = jax.device_put(random_params(definition), definition.shardings(trained))
    held = definition.quantized("int8") if is_int8 else definition
    engine = TinyEngine(held, mesh, training_mesh=trained, mesh_of_all_hosts=mesh)
    return engine.generate(engine.to_decode_weights(params), PROMPTS, request(top_p))


expected = functools.cache(mesh_samples)


@pytest.mark.parametrize(
    ("architecture", "meshes", "how"),
    [
        (SHALLOW, (TRAINING, 4), {"top_p": 0.9}),
        (FEW_HEADS, (TRAINING, 8), {}),
        (SHALLOW, ((2, 2, 2),), {"is_int8": True}),
    ],
    ids=["truncated", "one head", "int8"],
)
def test_samples_do_not_depend_on_the_mesh(architecture: Architecture, meshes: Any, how: Any) -> None:
    assert_same_samples(mesh_samples(architecture, *meshes, **how), expected(architecture, **how))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("architecture", "training", "tp"), [(SHALLOW, TRAINING, 0), (WINDOWED, TRAINING, 4)])
def test_the_decode_kernel_samples_the_same_tokens_as_xla(architecture, training, tp, monkeypatch):
    without = expected(architecture, top_p=0.9)
    monkeypatch.setattr(prefill_and_decode, "decode_block_size", lambda *_, **__: 16)
    assert_same_samples(mesh_samples(architecture, training, tp, top_p=0.9), without)


@pytest.mark.parametrize(("shape", "tp"), [((1, 8, 1), 1), ((1, 8, 1), 2), ((2, 2, 2), 4)])
def test_transferred_bytes_predict_the_collectives_of_a_weight_update(shape: tuple[int, int, int], tp: int) -> None:
    definition, training = DecoderDefinition.create(EVEN), make_mesh(shape)
    generating = with_tp(training, tp)
    trained = abstract_arrays(definition.shapes, definition.shardings(training))
    with jax.set_mesh(training):
        conversion = jax.jit(DecodeConversion(definition, generating, FLOAT32).lay_out).lower(trained).compile()
    moved = sum(one.bytes_per_device for one in program_collectives(conversion))
    assert moved == transferred_bytes(definition, training, generating, FLOAT32) > 0


def test_decode_weights_and_caches_are_split_over_devices() -> None:
    """Weights are split over tp; caches are split by heads, or by rows if the heads cannot be split."""
    definition, mesh = DecoderDefinition.create(FEW_HEADS), with_tp(make_mesh(TRAINING), 4)
    engine = TinyEngine(definition, mesh, training_mesh=make_mesh(TRAINING), mesh_of_all_hosts=mesh)
    generator = engine.of(PROMPTS[:1], replace(request(), group_size=16))
    programs = generator.engine.programs
    # Two more blocks belong to no row.
    assert (programs.num_shards, programs.num_blocks) == (8, 2 * programs.blocks_per_row + 2)
    params = jax.device_put(random_params(definition), definition.shardings(make_mesh(TRAINING)))
    weights, foreseen = engine.to_decode_weights(params), abstract_decode_weights(definition, mesh, FLOAT32)
    assert all(jax.tree.leaves(jax.tree.map(lambda x, y: x.sharding == y.sharding, weights, foreseen)))
    alone = TinyEngine(definition).to_decode_weights(random_params(definition))
    assert bytes_per_device(generator.footprint().weights) < 0.4 * bytes_per_device(alone)
    jax.tree.map(np.testing.assert_array_equal, weights, alone)


def test_decoding_moves_neither_weights_nor_caches_between_devices() -> None:
    definition, mesh = DecoderDefinition.create(FEW_HEADS), with_tp(make_mesh(TRAINING), 4)
    generator = TinyEngine(definition, mesh).of(PROMPTS[:1], replace(request(), group_size=16, max_new_tokens=56))
    program = generator.engine.programs.lower_programs(truncates=False, recomputes=False)["decode"].compile()
    moved = [one for one in program_collectives(program) if one.is_in_dynamic_loop and one.dtype == "f32"]
    cache = bytes_per_device(generator.footprint().slots[0].keys)
    # For the smallest matrix split over tp, a device would send its quarter to three others.
    matrix = 3 * FEW_HEADS.model_dim * FEW_HEADS.num_query_heads * FEW_HEADS.head_dim
    assert moved and max(one.bytes_per_device for one in moved) < min(matrix, cache)


# The choice ------------------------------------------------------------------------------------------------------


def chosen(
    *overrides: str, mesh: Mesh | None = None, architecture: Architecture = QWEN2_5_7B
) -> tuple[Mesh, Settings, DecoderDefinition]:
    settings = load(None, ["model.dtype=bfloat16", *overrides], {}).settings
    definition = DecoderDefinition.create(architecture)
    return rollout_mesh(settings, mesh or make_mesh(TRAINING), definition), settings, definition


def test_auto_mesh_splits_decode_weights_only_if_collectives_cost_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "device_kind", lambda _: "TPU v6 lite")
    mesh, settings, definition = chosen("rollout.prompts_per_step=16", "rollout.max_new_tokens=1024")
    assert dict(mesh.shape) == {"dp": 2, "fsdp": 1, "tp": 4}
    [note] = rollout_mesh_notes(settings, make_mesh(TRAINING), mesh, definition)
    assert note.startswith("rollout.mesh: auto: weights split over tp=4 and rows over dp=2 during generation: ")
    # A small model's weights are read faster than sums are exchanged.
    assert chosen(architecture=EVEN)[0] == make_mesh(TRAINING)
    # If the heads cannot be split, slots are divided among all devices if their number allows it.
    one_key_head = replace(QWEN2_5_7B, num_kv_heads=1)
    assert chosen(architecture=one_key_head)[0].shape["tp"] == 4
    assert chosen("rollout.slots=64", architecture=one_key_head)[0].shape["tp"] == 4
    assert chosen("rollout.slots=60", architecture=one_key_head)[0] == make_mesh(TRAINING)
    # A tp that training needs is kept.
    assert chosen(mesh=make_mesh((1, 2, 4)))[0].shape["tp"] == 4
    assert chosen("rollout.scheduler=adaptive")[0] == make_mesh(TRAINING)


def test_an_explicit_rollout_mesh_is_used_or_refused() -> None:
    mesh, settings, definition = chosen()
    assert mesh == make_mesh(TRAINING) and rollout_mesh_notes(settings, mesh, mesh, definition) == []
    for value, shape in [("training", TRAINING), ("tp=2", (4, 1, 2)), ("dp = 2, tp = 4", (2, 1, 4))]:
        mesh = chosen(f"rollout.mesh={value}")[0]
        assert mesh == Mesh(np.asarray(jax.devices()).reshape(shape), AXES, axis_types=(AxisType.Auto,) * 3)
    for value, reason in [
        ("tp=3", r"'tp=3' does not divide the 8 devices of mesh.shape, 8 on each .* set tp=2 or 4, or"),
        ("dp=4,tp=4", r"dp x tp must be 8, .* omit dp and set tp=4, or"),
        ("tp=8", r"'tp=8' does not divide the 28 query heads .*; set tp to 4, "),
        ("tp=0", "expected `auto`, `training`, or sizes"),
    ]:
        with pytest.raises(InputError, match=rf"rollout\.mesh.*{reason}"):
            chosen(f"rollout.mesh={value}")


# Fewer bits ------------------------------------------------------------------------------------------------------


def quantized_params(definition: DecoderDefinition, params: Params) -> Params:
    """Returns the weights with the codes and scales of each layer's kernels."""
    flat = flatten_by_path(params)
    for path in [path for path in flat if path[-1] == "kernel"]:
        layers = [quantize_kernel(definition, path, np.asarray(layer)) for layer in flat.pop(path)]
        flat |= {leaf: np.stack([layer[leaf] for layer in layers]) for leaf in layers[0]}
    return jax.tree.map(jnp.asarray, unflatten_dict(flat))


def test_samples_come_from_the_quantized_policy() -> None:
    policy = DecoderDefinition.create(replace(BIASED, num_layers=1), lora=LoRAConfig(2, 4.0, ("q_proj", "down_proj")))
    params, held = random_params(policy), policy.quantized("int8")
    rounded = dequantized_params(held, quantized_params(held, params))
    engine, whole = TinyEngine(held), TinyEngine(policy)
    ours = engine.generate(engine.to_decode_weights(params), PROMPTS, request())
    assert_same_samples(ours, whole.generate(whole.to_decode_weights(rounded), PROMPTS, request()))
    exact = whole.generate(whole.to_decode_weights(params), PROMPTS, request())
    assert any(not np.array_equal(a.behavior_logprobs, b.behavior_logprobs) for a, b in zip(ours, exact, strict=True))


def test_a_run_measures_sampler_rounding_and_its_export_mentions_it(config: Path, tmp_path: Path) -> None:
    rounded = ("rollout.weights=int8", "rollout.kv_cache=int8")
    succeeded(train_here(config, *rounded, "run.steps=2", "eval.every_steps=0", "checkpoint.best_metric=null"))
    run = config.parent / "runs" / "tiny"
    lines = metrics_of(run)
    assert all(line["rollout/sampler_scorer_logprob_diff_mean"] > 1e-6 for line in lines)
    assert all(0 < line["rollout/sampler_scorer_kl"] < 0.01 for line in lines)
    assert all(0.9 < line["policy/correction_ess"] < 1 for line in lines)
    assert lines[1]["perf/compilations"] == 0
    exported = succeeded(here("export", "--checkpoint", run, "--out", tmp_path / "out"))
    note = "the run evaluated a rounded policy (rollout.weights: int8 and rollout.kv_cache: int8)"
    assert note in exported.stderr and note in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "--set rollout.weights=null --set rollout.kv_cache=null" in exported.stdout
