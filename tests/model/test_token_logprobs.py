from __future__ import annotations

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from app.batching.forward_passes import row_logprobs
from app.batching.token_batch import TokenBatch
from app.model.decoder import DecoderDefinition, LMHead
from app.model.segment_layout import single_segment_layout
from app.model.token_logprobs import ShardedHead, scaled_logits, token_logprobs
from tests.tiny import ODD, assert_trees_close, make_mesh

ROWS, TOKENS, WIDTH, VOCAB = 3, 14, 5, 23
EVERYWHERE = jnp.ones((ROWS, TOKENS), bool)


@functools.cache
def inputs() -> tuple[Array, ...]:
    """Returns hidden states, head, targets, and the weight of each logprob in a loss."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(ROWS, TOKENS, WIDTH)).astype(np.float32)
    head = 2 * rng.normal(size=(VOCAB, WIDTH)).astype(np.float32)
    weights = rng.normal(size=(ROWS, TOKENS)).astype(np.float32)
    return tuple(map(jnp.asarray, (hidden, head, rng.integers(0, VOCAB, (ROWS, TOKENS)), weights)))


def oracle(temperature: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Computes logprobs, entropies, and the gradients of sum(weights * logprobs) in float64."""
    hidden, head, targets, weights = map(np.asarray, inputs())
    hidden, head = hidden.astype(np.float64), head.astype(np.float64)
    logits = hidden @ head.T / temperature
    log_softmax = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    probabilities = np.exp(log_softmax)
    logprobs = np.take_along_axis(log_softmax, targets[..., None], axis=-1)[..., 0]
    by_logits = weights[..., None] * (np.eye(VOCAB)[targets] - probabilities) / temperature
    by_head = np.einsum("rcv,rcd->vd", by_logits, hidden)
    return logprobs, -(probabilities * log_softmax).sum(axis=-1), by_logits @ head, by_head


@functools.cache
def values_and_gradients(chunk: int):
    """Returns a compiled function of hidden states, head and temperature with the value and gradients of the loss."""
    _, _, targets, weights = inputs()

    def loss(hidden, head, temperature):
        logprobs, entropy = token_logprobs(
            hidden, LMHead(head), targets, EVERYWHERE, temperature=temperature, chunk=chunk
        )
        return jnp.sum(weights * logprobs), (logprobs, entropy)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize("temperature", [0.3, 1.7])
@pytest.mark.parametrize("chunk", [1, 3, 14, 128])
def test_values_and_gradients_equal_a_float64_oracle_for_every_chunk(chunk, temperature):
    (_, values), gradients = values_and_gradients(chunk)(*inputs()[:2], temperature)
    for ours, exact in zip((*values, *gradients), oracle(temperature), strict=True):
        np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-5)


def test_entropy_of_uniform_logits_is_the_log_of_the_vocabulary_and_carries_no_gradient():
    hidden, _, targets, _ = inputs()
    entropy = lambda head: token_logprobs(hidden, LMHead(head), targets, EVERYWHERE, temperature=1.0, chunk=4)[1]  # noqa: E731
    np.testing.assert_allclose(entropy(jnp.zeros((VOCAB, WIDTH))), np.log(VOCAB), rtol=1e-6)
    gradient = jax.grad(lambda head: jnp.sum(entropy(head)))(inputs()[1])
    np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.parametrize("chunk", [3, 14])
@pytest.mark.parametrize("temperature", [0.3, 1.7])
def test_gradients_of_an_entropy_that_is_learned_from_equal_a_float64_oracle(chunk, temperature):
    targets = inputs()[2]
    hidden, head, _, weights = map(np.asarray, inputs())

    def loss(hidden, head):
        _, entropies = token_logprobs(
            hidden, LMHead(head), targets, EVERYWHERE, temperature=temperature, chunk=chunk, entropy_gradient=True
        )
        return jnp.sum(weights * entropies)

    logits = hidden.astype(np.float64) @ head.astype(np.float64).T / temperature
    log_softmax = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    probabilities = np.exp(log_softmax)
    entropies = -(probabilities * log_softmax).sum(axis=-1, keepdims=True)
    # dH / dlogits = -p (log p + H)
    by_logits = -weights[..., None] * probabilities * (log_softmax + entropies) / temperature
    exact = by_logits @ head, np.einsum("rcv,rcd->vd", by_logits, hidden)
    assert_trees_close(jax.jit(jax.grad(loss, argnums=(0, 1)))(hidden, head), exact)


PLACES = jnp.arange(TOKENS) < jnp.array([[3], [5], [4]])
"""Positions of targets, at the start of every row; chunks of 3 contain targets of two rows, and the last three have
none."""


@pytest.mark.parametrize("chunk", [2, 3])
def test_chunks_without_targets_change_no_logprob_and_no_gradient(chunk):
    hidden, head, targets, weights = inputs()

    def loss(hidden, head, mask):
        logprobs, entropies = token_logprobs(
            hidden, LMHead(head), targets, mask, temperature=0.7, chunk=chunk, entropy_gradient=True
        )
        return jnp.sum(jnp.where(PLACES, weights * logprobs + entropies, 0.0)), (logprobs, entropies)

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, skipped), gradients = run(hidden, head, PLACES)
    (_, full), expected = run(hidden, head, EVERYWHERE)
    for ours, theirs in zip(skipped, full, strict=True):
        np.testing.assert_array_equal(np.asarray(ours)[PLACES], np.asarray(theirs)[PLACES])
        np.testing.assert_array_equal(ours[:, -(-5 // chunk) * chunk :], 0.0)
    assert_trees_close(gradients, expected)


def test_the_head_is_applied_as_often_as_there_are_chunks_with_targets(monkeypatch):
    hidden, head, targets, _ = inputs()
    passes = []
    logits = ShardedHead._logits

    def counted(self, *arguments):
        jax.debug.callback(lambda: passes.append("pass"))
        return logits(self, *arguments)

    monkeypatch.setattr(ShardedHead, "_logits", counted)

    def total(hidden, mask):
        return jnp.sum(token_logprobs(hidden, LMHead(head), targets, mask, temperature=1.0, chunk=3)[0])

    for mask, num_chunks in ((PLACES, 2), (EVERYWHERE, 5), (~EVERYWHERE, 0)):
        jax.block_until_ready(jax.grad(total)(hidden, mask))
        jax.effects_barrier()
        # Once forward, once again backward.
        assert len(passes) == 2 * num_chunks
        passes.clear()


def test_enormous_logits_keep_the_gradient_of_the_entropy_finite():
    hidden, head, targets, _ = inputs()

    def total(hidden):
        return jnp.sum(
            token_logprobs(hidden, LMHead(head), targets, EVERYWHERE, temperature=1.0, chunk=5, entropy_gradient=True)[
                1
            ]
        )

    assert np.isfinite(jax.grad(total)(1e4 * hidden)).all()


def test_logits_of_bfloat16_states_are_accumulated_in_float32():
    hidden, head, _, _ = inputs()
    narrow = hidden.astype(jnp.bfloat16)
    logits = scaled_logits(narrow, LMHead(head), 2.0)
    assert logits.dtype == jnp.float32
    exact = np.asarray(narrow, np.float64) @ np.asarray(head.astype(jnp.bfloat16), np.float64).T / 2.0
    np.testing.assert_allclose(logits, exact, rtol=1e-5, atol=1e-5)


def test_logits_are_capped_before_the_temperature_divides_them():
    hidden, head, _, _ = inputs()
    exact = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T
    assert np.abs(exact).max() > 10
    capped = scaled_logits(hidden, LMHead(head, soft_cap=3.0), 0.5)
    np.testing.assert_allclose(capped, 3 * np.tanh(exact / 3) / 0.5, rtol=1e-5, atol=1e-5)


# Sizes that meet nowhere else in the program: the vocabulary is a prime.
ROW_TOKENS, COMPLETION_TOKENS = 22, 14


def program(logits_chunk: int):
    """Returns the compiled loss and gradient of rows with 22 tokens, of which 14 are scored."""
    definition = DecoderDefinition.create(replace(ODD, num_layers=1))
    shape = (ROWS, ROW_TOKENS)

    def loss(params):
        segments, branches, positions = single_segment_layout(jnp.ones(shape, bool))
        ones = jnp.ones((ROWS, COMPLETION_TOKENS), jnp.int32)
        logprobs, entropy, _ = row_logprobs(
            definition.bind(params),
            TokenBatch(jnp.ones(shape, jnp.int32), positions, segments, branches, ones, ones, ones > 0),
            temperature=1.0,
            dtype=jnp.dtype("float32"),
            remat="none",
            logits_chunk=logits_chunk,
        )
        return jnp.sum(logprobs), entropy

    return jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(definition.shapes).compile()


def most_tokens_with_logits(compiled) -> int:
    """Returns the largest number of tokens whose logits any array of the optimized program holds."""
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\w\[([\d,]+)\]", str(compiled.as_text()))}
    logits = [dims for dims in shapes if ODD.vocab_size in dims and ODD.model_dim not in dims]
    return max(int(np.prod(dims)) // ODD.vocab_size for dims in logits)


def test_only_a_chunk_of_completion_tokens_ever_has_logits():
    assert most_tokens_with_logits(program(logits_chunk=4 * ROWS)) == ROWS * 4


@pytest.mark.parametrize(
    ("shape", "rows", "soft_cap"),
    [((2, 2, 2), 4, 3.0), ((2, 2, 2), ROWS, None), ((1, 4, 1), 4, None), ((1, 1, 4), ROWS, 3.0)],
)
def test_parts_of_the_vocabulary_on_a_mesh_give_the_numbers_of_one_device(shape, rows, soft_cap):
    # 23 tokens do not split evenly, and 3 rows stay whole on every device.
    rng = np.random.default_rng(1)
    hidden = jnp.asarray(rng.normal(size=(rows, TOKENS, WIDTH)).astype(np.float32))
    weights = jnp.asarray(rng.normal(size=(2, rows, TOKENS)).astype(np.float32))
    targets, mask = jnp.asarray(rng.integers(0, VOCAB, (rows, TOKENS))), jnp.asarray(rng.random((rows, TOKENS)) < 0.7)

    def loss(hidden, table):
        logprobs, entropies = token_logprobs(
            hidden, LMHead(table, soft_cap), targets, mask, temperature=0.7, chunk=3, entropy_gradient=True
        )
        return jnp.sum(jnp.where(mask, weights[0] * logprobs + weights[1] * entropies, 0.0))

    differentiated = jax.value_and_grad(loss, argnums=(0, 1))
    alone = jax.jit(differentiated)(hidden, inputs()[1])
    with jax.set_mesh(make_mesh(shape)):
        assert_trees_close(jax.jit(differentiated)(hidden, inputs()[1]), alone)
