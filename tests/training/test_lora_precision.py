"""Tests of decoding with adapters in each compute type: small adapters are not lost by rounding."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.model.decoder import Params, flatten_by_path
from app.model.lora import LORA_B, combine_params, merge_adapters
from app.model.prefill_and_decode import prefill
from app.runtime.session import Session
from tests.training.test_lora import LORA, launched

BFLOAT16 = "model.dtype=bfloat16"
FIRST_STEPS = 1e-4
"""Size of an entry of B after some steps."""


def opened(config: Path, *overrides: str) -> Session:
    return launched(config, *LORA, *overrides)[0].session


def after_a_few_steps(session: Session) -> Params:
    """Returns adapters that have changed a little."""
    draw = np.random.default_rng(0)
    return jax.tree.map_with_path(
        lambda path, x: jnp.asarray(draw.normal(0, FIRST_STEPS, x.shape), x.dtype) if path[-1].key == LORA_B else x,
        session.scoring.initial_trained_params(),
    )


def rounded_once(params: Params) -> Params:
    """A model as it is published, with weights that are representable in bfloat16."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), params)


def logprobs_by_the_sampler(session: Session, params: Params) -> np.ndarray:
    """Returns logprobs under the weights that the sampler decodes with, computed in float32."""
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), session.to_decode_weights(params))
    ids = jnp.arange(24, dtype=jnp.int32).reshape(4, 6)
    definition = session.to_decode_weights.definition
    hidden, *_ = prefill(definition, exact, ids, jnp.full(4, 6, jnp.int32))
    return np.asarray(jax.nn.log_softmax(definition.bind(exact.params).head.logits(hidden)))


@pytest.mark.slow
def test_the_sampler_moves_as_far_as_the_policy_from_the_first_step_on(config: Path) -> None:
    session = opened(config, BFLOAT16)
    exact = opened(config, "model.dtype=float32", "run.name=exact")
    base, fresh, moved = (
        rounded_once(session.scoring.frozen_params),
        session.scoring.initial_trained_params(),
        after_a_few_steps(session),
    )
    shift, expected = (
        logprobs_by_the_sampler(one, combine_params(moved, base))
        - logprobs_by_the_sampler(one, combine_params(fresh, base))
        for one in (session, exact)
    )
    assert np.abs(expected).max() > 1e-5
    np.testing.assert_allclose(shift, expected, atol=0.02 * np.abs(expected).max())


def test_in_float32_adapters_are_merged_into_what_decodes(config: Path) -> None:
    session = opened(config)
    whole = combine_params(after_a_few_steps(session), session.scoring.frozen_params)
    assert session.to_decode_weights.definition is session.model_spec.definition
    found = session.to_decode_weights(whole)
    plain = merge_adapters(whole, session.model_spec.policy_definition.lora)["blocks"]
    assert flatten_by_path(found.blocks[1]).keys() == flatten_by_path(plain).keys()
    for path, stacked in flatten_by_path(plain).items():
        np.testing.assert_allclose(flatten_by_path(found.blocks[1])[path], stacked[1], atol=1e-6)


@pytest.mark.slow
def test_slots_in_bfloat16_draw_from_adapters_beside_the_kernels(config: Path) -> None:
    launch, learning = launched(config, *LORA, BFLOAT16, "rollout.slots=8")
    session, prompts = launch.session, launch.inputs.prompts[:2]
    draw = np.random.default_rng(0)
    adapters = jax.tree.map(
        lambda x: jnp.asarray(draw.normal(0, 0.2, x.shape), x.dtype), session.scoring.initial_trained_params()
    )
    params = session.scoring.full_params(adapters)
    samples = session.generator.generate(session.to_decode_weights(params), prompts, session.rollout_request())
    scored, _ = session.scoring.score(params, samples, "policy", batcher=learning.policy.updater.micro_batcher)
    for sample in scored:
        assert sample.policy_logprobs is not None
        np.testing.assert_allclose(sample.behavior_logprobs, sample.policy_logprobs, atol=0.2)
