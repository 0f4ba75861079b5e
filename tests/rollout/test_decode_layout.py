"""Tests that samples depend neither on where weights lie during decoding, nor on who computes the attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.mesh.device_mesh import with_tp
from app.mesh.placement import abstract_arrays, bytes_per_device, row_sharding
from app.model import prefill_and_decode
from app.model.decode_weights import DecodeConversion, abstract_decode_weights, transferred_bytes
from app.model.decoder import DecoderDefinition
from app.model.kernels import tpu_decode
from app.model.kv_cache import LayerCache, abstract_cache, constrain_cache
from app.model.prefill_and_decode import decode_step
from app.records.sample import Sample
from app.rollout.engine.continuous_batching import ContinuousBatchGenerator
from app.rollout.engine.engine import SlotEngine
from app.rollout.engine.shapes import make_slot_shapes
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import SamplingRules
from scripts.bench.hlo_collectives import LoopedCollective, program_collectives
from settings.schema.rollout import SegmentSettings
from tests.tiny import EVEN, make_engine, make_mesh, random_params, random_prompts, spell

DEFINITION = DecoderDefinition.create(EVEN)
FLOAT32 = jnp.dtype("float32")
PROMPTS = random_prompts(4, vocab_size=50, longest=8)
REQUEST = GenerationRequest(group_size=2, max_new_tokens=6, rules=SamplingRules(1.0), seed=1, policy_version=2)


def samples_of(shape: tuple[int, int, int]) -> list[Sample]:
    mesh = make_mesh(shape)
    params = jax.device_put(random_params(DEFINITION), DEFINITION.shardings(mesh))
    engine = make_engine(DEFINITION, mesh)
    return engine.generate(engine.to_decode_weights(params), PROMPTS, REQUEST)


@functools.cache
def expected() -> list[Sample]:
    return samples_of((1, 1, 1))


def assert_same_samples(ours: list[Sample]) -> None:
    for sample, other in zip(ours, expected(), strict=True):
        np.testing.assert_array_equal(sample.completion_ids, other.completion_ids)
        np.testing.assert_allclose(sample.behavior_logprobs, other.behavior_logprobs, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 8, 1), (2, 2, 2)])
def test_samples_do_not_depend_on_where_weights_lie(shape: tuple[int, int, int]):
    assert_same_samples(samples_of(shape))


def test_slots_draw_the_same_samples_on_any_mesh():
    mesh = make_mesh((1, 4, 1))
    shapes = make_slot_shapes(4, max_prompt_length=8, max_new_tokens=6, prefill_length_min=8, segment_max=6, exact=True)
    engine = SlotEngine(DEFINITION, mesh, shapes, eos_ids=(), dtype=FLOAT32, exact=True)
    params = jax.device_put(random_params(DEFINITION), DEFINITION.shardings(mesh))
    weights = make_engine(DEFINITION, mesh).to_decode_weights(params)
    batching = ContinuousBatchGenerator(engine, decode_text=spell, segment_rule=SegmentSettings(min=1))
    assert_same_samples(batching.generate(weights, PROMPTS, REQUEST))


@pytest.fixture
def decode_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this platform decode by the TPU's kernel, in Pallas' interpreter and small blocks."""
    attend = functools.partial(tpu_decode.attend, interpret=True)
    monkeypatch.setattr(tpu_decode, "attend", attend)
    monkeypatch.setattr(prefill_and_decode, "decode_block_size", lambda *_, **__: 16)


LONG_PROMPTS = random_prompts(4, vocab_size=50, longest=40)


def long_samples(shape: tuple[int, int, int]) -> list[Sample]:
    mesh = make_mesh(shape)
    params = jax.device_put(random_params(DEFINITION), DEFINITION.shardings(mesh))
    engine = make_engine(DEFINITION, mesh)
    return engine.generate(engine.to_decode_weights(params), LONG_PROMPTS, REQUEST)


def long_samples_of_slots(mesh_shape: tuple[int, int, int]) -> list[Sample]:
    mesh = make_mesh(mesh_shape)
    shapes = make_slot_shapes(
        4, max_prompt_length=40, max_new_tokens=6, prefill_length_min=8, segment_max=3, exact=True
    )
    engine = SlotEngine(DEFINITION, mesh, shapes, eos_ids=(), dtype=FLOAT32, exact=True)
    params = jax.device_put(random_params(DEFINITION), DEFINITION.shardings(mesh))
    batching = ContinuousBatchGenerator(engine, decode_text=spell, segment_rule=SegmentSettings(min=1))
    weights = make_engine(DEFINITION, mesh).to_decode_weights(params)
    return batching.generate(weights, LONG_PROMPTS, REQUEST)


@pytest.mark.parametrize("generate", [long_samples, long_samples_of_slots])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 1), (1, 2, 2)])
def test_the_decode_kernel_draws_the_samples_of_xla(
    generate: Callable[..., list[Sample]], shape: tuple[int, int, int], request: pytest.FixtureRequest
) -> None:
    without = generate(shape)
    request.getfixturevalue("decode_kernel")
    for sample, other in zip(generate(shape), without, strict=True):
        np.testing.assert_array_equal(sample.completion_ids, other.completion_ids)
        np.testing.assert_allclose(sample.behavior_logprobs, other.behavior_logprobs, atol=1e-5)


def collectives_of_decoding() -> list[LoopedCollective]:
    """Returns the collectives of a decode loop on eight devices that share every weight."""
    mesh = make_mesh((1, 8, 1))
    weights = abstract_decode_weights(DEFINITION, mesh, FLOAT32)
    one: Any = jax.ShapeDtypeStruct((8, EVEN.num_kv_heads, 16, EVEN.head_dim), FLOAT32)
    cache = abstract_cache((LayerCache(one, one),) * EVEN.num_layers, mesh)
    of_rows: Any = jax.ShapeDtypeStruct((8,), jnp.int32, sharding=row_sharding(mesh))

    def decode(weights: Any, cache: Any, token_ids: jax.Array, positions: jax.Array) -> Any:
        def step(carry: tuple) -> tuple:
            cache, token_ids, positions = carry
            hidden, cache, _ = decode_step(
                DEFINITION, weights, cache, token_ids, positions, jnp.ones_like(positions, bool)
            )
            token_ids = jnp.argmax(hidden, axis=-1).astype(jnp.int32)
            return constrain_cache(cache), token_ids, positions + 1

        return jax.lax.while_loop(lambda carry: ~jnp.all(carry[1] == 0), step, (cache, token_ids, positions))

    with jax.set_mesh(mesh):
        return program_collectives(jax.jit(decode).lower(weights, cache, of_rows, of_rows).compile())


def test_no_weight_moves_while_tokens_are_drawn():
    assert [one for one in collectives_of_decoding() if one.dtype == "f32"] == []


@pytest.mark.parametrize(("shape", "tp"), [((1, 8, 1), 1), ((1, 8, 1), 2), ((1, 4, 2), 2), ((2, 2, 2), 4)])
def test_the_report_foresees_what_a_new_version_of_the_weights_moves(shape: tuple[int, int, int], tp: int):
    training = make_mesh(shape)
    generating = with_tp(training, tp)
    trained = abstract_arrays(DEFINITION.shapes, DEFINITION.shardings(training))
    with jax.set_mesh(training):
        conversion = jax.jit(DecodeConversion(DEFINITION, generating, FLOAT32).lay_out).lower(trained).compile()
    moved = sum(one.bytes_per_device for one in program_collectives(conversion))
    assert moved == transferred_bytes(DEFINITION, training, generating, FLOAT32) > 0


def test_decode_weights_lie_as_their_shapes_say():
    """Programs are compiled for these shapes."""
    mesh = make_mesh((2, 2, 2))
    params = jax.device_put(random_params(DEFINITION), DEFINITION.shardings(mesh))
    weights = make_engine(DEFINITION, mesh).to_decode_weights(params)
    foreseen = abstract_decode_weights(DEFINITION, mesh, FLOAT32)
    same = jax.tree.map(lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim), weights, foreseen)
    assert all(jax.tree.leaves(same))
    assert bytes_per_device(weights) == bytes_per_device(foreseen)
