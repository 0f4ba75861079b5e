from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from app.model.decoder import DecoderDefinition
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import SamplingRules
from app.score.scorer import Scorer
from tests.tiny import BIASED, SWITCHED, make_engine, make_mesh, packed_plan, random_params, random_prompts


@pytest.mark.parametrize("architecture", [BIASED, SWITCHED], ids=["biases", "every-switch"])
def test_bfloat16_stays_near_float32_and_sampler_and_scorer_agree_in_it(architecture):
    definition = DecoderDefinition.create(architecture)
    params = random_params(definition)
    prompts = random_prompts(6, vocab_size=architecture.vocab_size)
    engine = make_engine(definition, dtype=jnp.dtype("bfloat16"))
    samples = engine.generate(
        engine.to_decode_weights(params),
        prompts,
        GenerationRequest(
            group_size=2, max_new_tokens=20, rules=SamplingRules(temperature=1.0), seed=0, policy_version=0
        ),
    )
    sampled = np.concatenate([sample.behavior_logprobs for sample in samples])

    def scored(dtype: str) -> np.ndarray:
        scorer = Scorer(definition, make_mesh(), dtype=jnp.dtype(dtype), logits_chunk=8)
        plan = packed_plan(samples, quota=256, row_length=128, share_prompts=True)
        return np.concatenate(scorer.per_token(params, samples, plan, temperature=1.0))

    in_bfloat16, in_float32 = scored("bfloat16"), scored("float32")
    assert in_float32.std() > 0.5
    # bfloat16 keeps 8 bits: about 0.4 % of a unit at each of some twenty roundings.
    assert np.abs(in_bfloat16 - in_float32).max() < 0.2
    assert np.abs(in_bfloat16 - in_float32).mean() < 0.04
    assert 0 < np.abs(sampled - in_bfloat16).max() < 0.1
    assert np.abs(sampled - in_bfloat16).mean() < 0.02
