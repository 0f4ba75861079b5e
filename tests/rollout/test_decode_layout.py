"""Tests that samples depend neither on where weights lie during decoding, nor on who computes the attention."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.mesh.device_mesh import with_tp
from app.mesh.placement import abstract_arrays
from app.model import prefill_and_decode
from app.model.decode_weights import DecodeConversion, transferred_bytes
from app.model.decoder import DecoderDefinition
from app.records.sample import Sample
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import SamplingRules
from scripts.bench.hlo_collectives import program_collectives
from tests.tiny import EVEN, make_engine, make_mesh, random_params, random_prompts

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


@pytest.fixture
def decode_kernel(monkeypatch: pytest.MonkeyPatch, interpreted: None) -> None:
    """Makes this platform decode by the TPU's kernel, in Pallas' interpreter and small blocks."""
    monkeypatch.setattr(prefill_and_decode, "decode_block_size", lambda *_, **__: 16)


LONG_PROMPTS = random_prompts(4, vocab_size=50, longest=40)


def long_samples(shape: tuple[int, int, int]) -> list[Sample]:
    mesh = make_mesh(shape)
    params = jax.device_put(random_params(DEFINITION), DEFINITION.shardings(mesh))
    engine = make_engine(DEFINITION, mesh)
    return engine.generate(engine.to_decode_weights(params), LONG_PROMPTS, REQUEST)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 1), (1, 2, 2)])
def test_the_decode_kernel_draws_the_samples_of_xla(
    shape: tuple[int, int, int], request: pytest.FixtureRequest
) -> None:
    without = long_samples(shape)
    request.getfixturevalue("decode_kernel")
    for sample, other in zip(long_samples(shape), without, strict=True):
        np.testing.assert_array_equal(sample.completion_ids, other.completion_ids)
        np.testing.assert_allclose(sample.behavior_logprobs, other.behavior_logprobs, atol=1e-5)


@pytest.mark.parametrize(("shape", "tp"), [((1, 8, 1), 1), ((1, 8, 1), 2), ((1, 4, 2), 2), ((2, 2, 2), 4)])
def test_the_report_foresees_what_a_new_version_of_the_weights_moves(shape: tuple[int, int, int], tp: int):
    training = make_mesh(shape)
    generating = with_tp(training, tp)
    trained = abstract_arrays(DEFINITION.shapes, DEFINITION.shardings(training))
    with jax.set_mesh(training):
        conversion = jax.jit(DecodeConversion(DEFINITION, generating, FLOAT32).lay_out).lower(trained).compile()
    moved = sum(one.bytes_per_device for one in program_collectives(conversion))
    assert moved == transferred_bytes(DEFINITION, training, generating, FLOAT32) > 0
