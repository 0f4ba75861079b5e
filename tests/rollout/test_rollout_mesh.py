"""Tests that samples do not depend on the mesh that generates them, and of the choice of that mesh."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from app.mesh.axis_rules import AXES
from app.mesh.device_mesh import with_tp
from app.mesh.placement import bytes_per_device
from app.model import prefill_and_decode
from app.model.architecture import Architecture
from app.model.decode_weights import abstract_decode_weights
from app.model.decoder import DecoderDefinition
from app.records.sample import Sample
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import SamplingRules
from app.runtime import rollout_mesh as choice
from app.runtime.rollout_mesh import rollout_mesh, rollout_mesh_notes
from scripts.bench.hlo_collectives import program_collectives
from scripts.bench.shapes import QWEN2_5_7B
from settings import InputError, Settings, load
from tests.tiny import EVEN, SWITCHED, make_engine, make_mesh, random_params, random_prompts

FLOAT32 = jnp.dtype("float32")
TRAINING = (1, 8, 1)
FEW_HEADS = replace(EVEN, num_query_heads=8, num_kv_heads=1)
"""Its query heads can be split over 8 devices, and its only key head over none."""
WINDOWED = replace(SWITCHED, num_query_heads=8, num_kv_heads=1)
PROMPTS = random_prompts(4, vocab_size=50, longest=12)


def request(top_p: float = 1.0) -> GenerationRequest:
    rules = SamplingRules(1.0, top_p=top_p)
    return GenerationRequest(group_size=2, max_new_tokens=6, rules=rules, seed=1, policy_version=2)


def batch_samples(architecture: Architecture, tp: int | None, top_p: float = 1.0) -> list[Sample]:
    """Returns samples of a mesh with this tp, with the weights of one that trains; of a single device if None."""
    definition, training = DecoderDefinition.create(architecture), make_mesh(TRAINING if tp else (1, 1, 1))
    mesh = with_tp(training, tp) if tp else training
    params = jax.device_put(random_params(definition), definition.shardings(training))
    engine = make_engine(definition, mesh, training_mesh=training, mesh_of_all_hosts=mesh)
    return engine.generate(engine.to_decode_weights(params), PROMPTS, request(top_p))


@functools.cache
def expected(architecture: Architecture, top_p: float = 1.0) -> list[Sample]:
    return batch_samples(architecture, None, top_p)


def assert_same_samples(ours: list[Sample], others: list[Sample]) -> None:
    for sample, other in zip(ours, others, strict=True):
        np.testing.assert_array_equal(sample.completion_ids, other.completion_ids)
        np.testing.assert_allclose(sample.behavior_logprobs, other.behavior_logprobs, atol=1e-5)


@pytest.mark.parametrize(("architecture", "tp"), [(EVEN, 2), (EVEN, 4), (FEW_HEADS, 8), (WINDOWED, 4)])
def test_samples_do_not_depend_on_the_mesh_that_generates_them(architecture: Architecture, tp: int) -> None:
    assert_same_samples(batch_samples(architecture, tp), expected(architecture))


def test_truncated_samples_do_not_depend_on_it_either() -> None:
    assert_same_samples(batch_samples(EVEN, 4, 0.9), expected(EVEN, 0.9))


@pytest.mark.usefixtures("interpreted")
def test_nor_do_those_of_the_decode_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_and_decode, "decode_block_size", lambda *_, **__: 16)
    assert_same_samples(batch_samples(WINDOWED, 4), expected(WINDOWED))


def test_no_device_holds_what_another_one_does() -> None:
    """Weights are split over tp; so are caches, by rows where the heads cannot be."""
    definition, mesh = DecoderDefinition.create(FEW_HEADS), with_tp(make_mesh(TRAINING), 4)
    engine = make_engine(definition, mesh, training_mesh=make_mesh(TRAINING), mesh_of_all_hosts=mesh)
    sixteen = PROMPTS[:1], replace(request(), group_size=16)
    programs = engine.of(*sixteen).engine.programs
    assert programs.num_shards == 8 and programs.shapes.num_slots == 16
    alone, footprint = (one.of(*sixteen).footprint() for one in (make_engine(definition), engine))
    # Beside the two blocks that belong to no row.
    rows, blocks = 16 * programs.blocks_per_row, programs.num_blocks
    assert bytes_per_device(footprint.slots) * (rows + 2) == bytes_per_device(alone.slots) * blocks
    assert blocks == rows // 8 + 2
    assert bytes_per_device(footprint.weights) < 0.4 * bytes_per_device(alone.weights)
    params = jax.device_put(random_params(definition), definition.shardings(make_mesh(TRAINING)))
    weights, foreseen = engine.to_decode_weights(params), abstract_decode_weights(definition, mesh, FLOAT32)
    same = jax.tree.map(lambda x, y: x.sharding == y.sharding, weights, foreseen)
    assert all(jax.tree.leaves(same))
    jax.tree.map(
        np.testing.assert_array_equal, weights, make_engine(definition).to_decode_weights(random_params(definition))
    )


@pytest.mark.parametrize("architecture", [EVEN, FEW_HEADS])
def test_no_weights_and_no_caches_move_while_tokens_are_decoded(architecture: Architecture) -> None:
    definition, mesh = DecoderDefinition.create(architecture), with_tp(make_mesh(TRAINING), 4)
    engine = make_engine(definition, mesh)
    generator = engine.of(PROMPTS[:1], replace(request(), group_size=16, max_new_tokens=56))
    program = generator.engine.programs.lower_programs(truncates=False, recomputes=False)["decode"].compile()
    moved = [one for one in program_collectives(program) if one.is_in_dynamic_loop and one.dtype == "f32"]
    cache = bytes_per_device(generator.footprint().slots[0].keys)
    # Of the smallest matrix that tp splits, a device would send its quarter to three others.
    matrix = 3 * architecture.model_dim * architecture.num_query_heads * architecture.head_dim
    assert moved and max(one.bytes_per_device for one in moved) < min(matrix, cache)


# The choice ------------------------------------------------------------------------------------------------------


def chosen(
    *overrides: str, mesh: Mesh | None = None, architecture: Architecture = QWEN2_5_7B
) -> tuple[Mesh, Settings, DecoderDefinition]:
    settings = load(None, ["model.dtype=bfloat16", *overrides], {}).settings
    definition = DecoderDefinition.create(architecture)
    return rollout_mesh(settings, mesh or make_mesh(TRAINING), definition), settings, definition


@pytest.fixture
def v6e(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "device_kind", lambda _: "TPU v6 lite")


@pytest.mark.usefixtures("v6e")
def test_auto_splits_weights_as_far_as_the_sums_cost_less() -> None:
    mesh, settings, definition = chosen("rollout.prompts_per_step=16", "rollout.max_new_tokens=1024")
    assert dict(mesh.shape) == {"dp": 2, "fsdp": 1, "tp": 4}
    [note] = rollout_mesh_notes(settings, make_mesh(TRAINING), mesh, definition)
    assert note.startswith("rollout.mesh: auto: weights split over tp=4 and rows over dp=2 during generation: ")
    # A small model's weights are read sooner than the sums come back.
    assert chosen(architecture=EVEN)[0] == make_mesh(TRAINING)
    # Without heads to split, all devices share the slots out, if they can.
    one_key_head = replace(QWEN2_5_7B, num_kv_heads=1)
    assert chosen(architecture=one_key_head)[0].shape["tp"] == 4
    assert chosen("rollout.slots=64", architecture=one_key_head)[0].shape["tp"] == 4
    assert chosen("rollout.slots=60", architecture=one_key_head)[0] == make_mesh(TRAINING)
    # A tp that training needs is kept.
    assert chosen(mesh=make_mesh((1, 2, 4)))[0].shape["tp"] == 4
    assert chosen("rollout.scheduler=adaptive")[0] == make_mesh(TRAINING)


def test_without_a_table_of_its_speed_auto_keeps_the_training_mesh() -> None:
    mesh, settings, definition = chosen()
    assert mesh == make_mesh(TRAINING)
    assert rollout_mesh_notes(settings, mesh, mesh, definition) == []


@pytest.mark.parametrize(
    ("value", "shape"), [("training", TRAINING), ("tp=2", (4, 1, 2)), ("dp = 2, tp = 4", (2, 1, 4))]
)
def test_a_mesh_that_is_named_is_used(value: str, shape: tuple[int, int, int]) -> None:
    mesh = chosen(f"rollout.mesh={value}")[0]
    assert mesh == Mesh(np.asarray(jax.devices()).reshape(shape), AXES, axis_types=(AxisType.Auto,) * 3)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("tp=3", r"rollout\.mesh: 'tp=3' does not divide the 8 devices of mesh.shape, 8 on each .* set tp=2 or 4"),
        ("dp=4,tp=4", r"dp x tp must be 8, .* set tp=4, without dp, or"),
        ("tp=8", r"rollout\.mesh: 'tp=8' does not divide the 28 query heads .* devices of a host: 4$"),
    ],
)
def test_a_mesh_that_divides_neither_devices_nor_heads_is_refused(value: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        chosen(f"rollout.mesh={value}")


@pytest.mark.parametrize("value", ["dp=2", "tp=0"])
def test_what_is_no_mesh_is_refused(value: str) -> None:
    with pytest.raises(InputError, match=r"rollout\.mesh.*expected `auto`, `training`, or sizes"):
        load(None, [f"rollout.mesh={value}"], {})
