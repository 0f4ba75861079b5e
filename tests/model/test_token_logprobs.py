import functools
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from app.batching.forward_passes import row_logprobs
from app.batching.token_batch import TokenBatch
from app.model.decoder import DecoderDefinition, LMHead
from app.model.segment_layout import single_segment_layout
from app.model.token_logprobs import scaled_logits, token_logprobs
from tests.tiny import ODD, assert_trees_close, make_mesh

ROWS, TOKENS, WIDTH, VOCAB = 3, 14, 5, 23
EVERYWHERE = jnp.ones((ROWS, TOKENS), bool)


@functools.cache
def inputs(num_rows: int = ROWS) -> tuple[Array, Array, Array, Array]:
    """Returns hidden states, head, targets, and the weights of each logprob and of each entropy in a loss."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(num_rows, TOKENS, WIDTH)).astype(np.float32)
    head = 2 * rng.normal(size=(VOCAB, WIDTH)).astype(np.float32)
    weights = rng.normal(size=(2, num_rows, TOKENS)).astype(np.float32)
    targets = jnp.asarray(rng.integers(0, VOCAB, (num_rows, TOKENS)))
    return jnp.asarray(hidden), jnp.asarray(head), targets, jnp.asarray(weights)


def oracle(
    temperature: float, soft_cap: float | None, mask: Any = True, num_rows: int = ROWS
) -> tuple[np.ndarray, ...]:
    """Computes in float64 logprobs, entropies, and the gradients of their weighted sum in hidden states and head."""
    hidden, head, targets, weights = map(np.asarray, inputs(num_rows))
    hidden, head, weights = hidden.astype(np.float64), head.astype(np.float64), weights * np.asarray(mask)
    capped = hidden @ head.T
    capped = capped if soft_cap is None else soft_cap * np.tanh(capped / soft_cap)
    log_softmax = capped / temperature - np.log(np.sum(np.exp(capped / temperature), axis=-1, keepdims=True))
    probabilities = np.exp(log_softmax)
    entropies = -(probabilities * log_softmax).sum(axis=-1)
    by_logits = weights[0, ..., None] * (np.eye(VOCAB)[targets] - probabilities)
    # dH / dlogits = -p (log p + H)
    by_logits -= weights[1, ..., None] * probabilities * (log_softmax + entropies[..., None])
    by_product = by_logits / temperature * (1.0 if soft_cap is None else 1 - (capped / soft_cap) ** 2)
    logprobs = np.take_along_axis(log_softmax, targets[..., None], axis=-1)[..., 0]
    return logprobs, entropies, by_product @ head, np.einsum("rcv,rcd->vd", by_product, hidden)


@functools.cache
def values_and_gradients(chunk: int, soft_cap: float | None, num_rows: int = ROWS) -> Any:
    """Returns a compiled function of hidden states, head, mask and temperature with what `oracle` computes."""
    *_, targets, weights = inputs(num_rows)

    def loss(hidden, head, mask, temperature):
        how = {"temperature": temperature, "chunk": chunk, "entropy_gradient": True}
        logprobs, entropies = token_logprobs(hidden, LMHead(head, soft_cap), targets, mask, **how)
        return jnp.sum(jnp.where(mask, weights[0] * logprobs + weights[1] * entropies, 0.0)), (logprobs, entropies)

    def run(*arguments):
        (_, values), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(*arguments)
        return *values, *gradients

    return jax.jit(run)


@pytest.mark.parametrize(("chunk", "temperature", "soft_cap"), [(1, 1.7, None), (3, 0.3, 3.0), (128, 1.7, None)])
def test_logprobs_entropies_and_their_gradients_equal_a_float64_oracle(chunk, temperature, soft_cap):
    ours = values_and_gradients(chunk, soft_cap)(*inputs()[:2], EVERYWHERE, temperature)
    for value, exact in zip(ours, oracle(temperature, soft_cap), strict=True):
        np.testing.assert_allclose(value, exact, rtol=1e-5, atol=1e-5 * max(1.0, np.abs(exact).max()))


def test_entropy_of_uniform_logits_is_log_vocab_without_gradient():
    hidden, _, targets, _ = inputs()
    entropy = lambda head: token_logprobs(hidden, LMHead(head), targets, EVERYWHERE, temperature=1.0, chunk=4)[1]  # noqa: E731
    np.testing.assert_allclose(entropy(jnp.zeros((VOCAB, WIDTH))), np.log(VOCAB), rtol=1e-6)
    gradient = jax.grad(lambda head: jnp.sum(entropy(head)))(inputs()[1])
    np.testing.assert_array_equal(gradient, 0.0)


def test_chunks_without_targets_are_skipped():
    hidden, head, *_ = inputs()
    # Chunks of 3 contain targets of two rows, and the last three have none.
    mask, first_skipped = jnp.arange(TOKENS) < jnp.array([[3], [5], [4]]), 6
    # Anything that is computed from these states would be NaN.
    broken = hidden.at[:, first_skipped:].set(jnp.nan)
    *ours, by_hidden, by_head = values_and_gradients(3, None)(broken, head, mask, 0.7)
    *exact, exact_by_hidden, exact_by_head = oracle(0.7, None, mask)
    for value, expected in zip(ours, exact, strict=True):
        np.testing.assert_allclose(np.asarray(value)[mask], expected[mask], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(value[:, first_skipped:], 0.0)
    assert_trees_close((by_hidden, by_head), (exact_by_hidden, exact_by_head))


def test_enormous_logits_keep_values_and_gradients_finite():
    hidden, head, *_ = inputs()
    assert all(np.isfinite(x).all() for x in values_and_gradients(3, None)(1e4 * hidden, head, EVERYWHERE, 1.0))


def test_logits_of_bfloat16_states_are_summed_in_float32():
    hidden, head, *_ = inputs()
    narrow = hidden.astype(jnp.bfloat16)
    logits = scaled_logits(narrow, LMHead(head), 2.0)
    assert logits.dtype == jnp.float32
    exact = np.asarray(narrow, np.float64) @ np.asarray(head.astype(jnp.bfloat16), np.float64).T / 2.0
    np.testing.assert_allclose(logits, exact, rtol=1e-5, atol=1e-5)


def test_only_a_chunk_of_completion_tokens_ever_has_logits():
    # The vocabulary's size is a prime, so no other array has it as a dim.
    definition, shape, targets = DecoderDefinition.create(replace(ODD, num_layers=1)), (ROWS, 22), (ROWS, 14)

    def loss(params):
        layout, ones = single_segment_layout(jnp.ones(shape, bool)), jnp.ones(targets, jnp.int32)
        rows = TokenBatch(jnp.ones(shape, jnp.int32), layout, ones, ones, ones > 0)
        how = {"temperature": 1.0, "dtype": jnp.dtype("float32"), "remat": "none", "logits_chunk": 4 * ROWS}
        logprobs, entropy, _ = row_logprobs(definition.bind(params), rows, **how)
        return jnp.sum(logprobs), entropy

    text = str(jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(definition.shapes).compile().as_text())
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\w\[([\d,]+)\]", text)}
    logits = [dims for dims in shapes if ODD.vocab_size in dims and ODD.model_dim not in dims]
    assert max(int(np.prod(dims)) // ODD.vocab_size for dims in logits) == ROWS * 4


@pytest.mark.parametrize(("shape", "num_rows", "soft_cap"), [((2, 2, 2), ROWS, 3.0), ((1, 4, 1), 4, None)])
def test_splitting_the_vocabulary_over_a_mesh_does_not_change_logprobs_or_gradients(shape, num_rows, soft_cap):
    # 23 tokens do not split evenly, and 3 rows stay whole on every device.
    mask = jnp.asarray(np.random.default_rng(1).random((num_rows, TOKENS)) < 0.7)
    run, arguments = values_and_gradients(3, soft_cap, num_rows), (*inputs(num_rows)[:2], mask, 0.7)
    alone = run(*arguments)
    with jax.set_mesh(make_mesh(shape)):
        assert_trees_close(run(*arguments), alone)
