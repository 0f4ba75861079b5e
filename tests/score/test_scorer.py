from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.batching.pack import RowShape, pack_tokens, unpack_per_token
from app.batching.plan import Plan
from app.flow import Sample
from app.policy.architecture import Architecture
from app.policy.decoder import DecoderDefinition, Params
from app.policy.row_layout import RowLayout, one_segment
from app.policy.token_logprobs import completion_logprobs
from app.score.scorer import Scorer
from tests.tiny import BIASED, ODD, make_mesh, random_params, random_samples

FLOAT32 = jnp.dtype("float32")
SAMPLES = random_samples(3, 3, vocab_size=ODD.vocab_size, with_holes=True, seed=3)


@functools.cache
def params_of(architecture: Architecture) -> Params:
    return random_params(DecoderDefinition.of(architecture))


@functools.cache
def scorer_of(architecture: Architecture, logits_chunk: int = 128) -> Scorer:
    return Scorer(DecoderDefinition.of(architecture), make_mesh(), dtype=FLOAT32, logits_chunk=logits_chunk)


def score(samples, *, architecture=ODD, temperature=1.0, rows_per_device=16, logits_chunk=128) -> list[np.ndarray]:
    return scorer_of(architecture, logits_chunk).logprobs(
        params_of(architecture), samples, temperature=temperature, rows_per_device=rows_per_device
    )


@functools.cache
def hidden_function(architecture: Architecture):
    definition = DecoderDefinition.of(architecture)
    return jax.jit(lambda params, *rows: definition.bind(params).hidden(*rows, dtype=FLOAT32))


def slow_logprobs(sample: Sample, architecture: Architecture, temperature: float) -> np.ndarray:
    """The whole sequence alone in a row; logits of every position, float64."""
    params, num_prompt = params_of(architecture), len(sample.prompt.token_ids)
    row = np.zeros((1, 16), np.int32)
    ids = np.concatenate([sample.prompt.token_ids, sample.completion_ids])
    row[0, : len(ids)] = ids
    hidden = hidden_function(architecture)(params, row, one_segment(np.ones((1, 16), bool)))[0]
    head = params["embedding"] if architecture.tied_embeddings else params["output"]
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T / temperature
    log_softmax = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return np.array([log_softmax[num_prompt - 1 + t, token] for t, token in enumerate(sample.completion_ids)])


def assert_close(ours, expected, atol=1e-5) -> None:
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=atol)


@pytest.mark.parametrize("architecture", [ODD, BIASED], ids=["tied", "untied-biases"])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_every_completion_token_is_scored_by_the_position_before_it(architecture, temperature):
    expected = [slow_logprobs(s, architecture, temperature) for s in SAMPLES]
    assert_close(score(SAMPLES, architecture=architecture, temperature=temperature), expected, atol=2e-5)


def test_greedy_samples_are_scored_at_temperature_one():
    assert_close(score(SAMPLES, temperature=0.0), score(SAMPLES, temperature=1.0), atol=0)


@pytest.mark.parametrize("rows_per_device", [1, 2, 4])
def test_micro_batches_change_nothing(rows_per_device):
    assert_close(score(SAMPLES, rows_per_device=rows_per_device), score(SAMPLES))


@pytest.mark.parametrize("logits_chunk", [1, 5])
def test_chunks_of_the_head_change_nothing(logits_chunk):
    assert_close(score(SAMPLES, logits_chunk=logits_chunk), score(SAMPLES))


def test_scores_come_back_in_the_order_of_the_samples():
    order = np.random.default_rng(0).permutation(len(SAMPLES))
    scored = score(SAMPLES)
    assert_close(score([SAMPLES[i] for i in order]), [scored[i] for i in order])


def test_tokens_that_the_policy_did_not_write_are_scored_too():
    assert_close(score(SAMPLES), score([replace(s, loss_mask=None) for s in SAMPLES]), atol=0)


PACKED = RowShape(num_tokens=48, num_completion_tokens=32)


@functools.cache
def packed_scores():
    definition = DecoderDefinition.of(ODD)

    @jax.jit
    def scores(params, batch):
        logprobs, _ = completion_logprobs(
            definition.bind(params),
            token_ids=batch.token_ids[0],
            layout=RowLayout(batch.segment_ids[0], batch.branch_ids[0], batch.positions[0]),
            score_index=batch.score_index[0],
            targets=batch.targets[0],
            mask=batch.score_index[0] >= 0,
            temperature=1.0,
            dtype=FLOAT32,
            remat="none",
            logits_chunk=8,
        )
        return logprobs[None]

    return scores


@functools.cache
def alone() -> list[np.ndarray]:
    return score(SAMPLES)


@settings(max_examples=25)
@given(st.lists(st.sampled_from([0, 0, 1, 2]), min_size=9, max_size=9), st.permutations(range(9)))
def test_samples_that_share_a_row_score_as_they_do_alone(row_of, order):
    """Rows of up to three samples; a fourth goes into one of nine rows of its own."""
    rows: list[list[int]] = [[] for _ in range(12)]
    for i in order:
        row = rows[row_of[i]]
        (row if len(row) < 3 else rows[3 + i]).append(i)
    plan = Plan(tuple(map(tuple, rows)), 12)
    packed = packed_scores()(params_of(ODD), pack_tokens(SAMPLES, plan, PACKED))
    assert_close(unpack_per_token(np.asarray(packed), SAMPLES, plan), alone())
