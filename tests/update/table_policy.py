"""Defines a policy that is a table of logits, one row per completion token, to test the loss without a decoder.

`oracle` computes loss and gradient in float64, token by token.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from app.batching.micro_batch_plan import MicroBatchPlan
from app.batching.token_batch import pack_per_token
from app.records.sample import Sample
from app.update.loss_aggregation import AggregationFn, StepTotals, aggregations
from app.update.policy_loss import LossStats, PolicyBatch, PolicyLoss
from tests.tiny import one_a_row, pack_update, plan_of, random_samples

VOCAB, LONGEST = 5, 9
AGGREGATIONS = aggregations(max_new_tokens=LONGEST)
# Only one sample of the last group is left, and one sample has no token in the loss.
SAMPLES = random_samples(4, 3, vocab_size=VOCAB, longest_completion=LONGEST, with_holes=True)[:-2]
SAMPLES[4] = replace(SAMPLES[4], loss_mask=np.zeros(len(SAMPLES[4].completion_ids), bool))
STARTS = np.cumsum([0, *(len(s.completion_ids) for s in SAMPLES)])
TABLE = np.random.default_rng(0).normal(0, 1.5, (STARTS[-1], VOCAB)).astype(np.float32)
# All plans have one shape, so that a loss is compiled only once.
SHAPE = {"rows_per_micro_batch": 2, "num_tokens": 80, "num_targets": 80}
SHARED_ROWS = plan_of(((5, 0, 3), (1, 7), (), (9, 2, 6, 4, 8)), **SHAPE)
LAYOUTS = one_a_row(len(SAMPLES), **SHAPE), SHARED_ROWS

TokenTerm = Callable[[Sample, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""(sample, its current logprobs) -> (loss of every token, its derivative with respect to the logprob)."""


@functools.cache
def gradient_of(loss: PolicyLoss) -> Callable[..., Any]:
    def share(table: Array, batch: PolicyBatch, place: Array) -> tuple[Array, LossStats]:
        log_softmax = jax.nn.log_softmax(table[place])
        chosen = jnp.take_along_axis(log_softmax, batch.tokens.targets[..., None], axis=-1)[..., 0]
        return loss(chosen, -jnp.sum(jnp.exp(log_softmax) * log_softmax, axis=-1), batch)

    return jax.jit(jax.value_and_grad(share, has_aux=True))


def loss_and_gradient(
    loss: PolicyLoss,
    table: Float32[np.ndarray, "tokens V"],
    samples: Sequence[Sample],
    plan: MicroBatchPlan,
    *,
    weights: AggregationFn,
) -> tuple[Float32[np.ndarray, "tokens V"], LossStats]:
    """Returns the gradient with respect to all logits, and loss and metrics, summed over micro-batches."""
    lengths = [len(s.completion_ids) for s in samples]
    starts = {s.uid: end - length for s, end, length in zip(samples, np.cumsum(lengths), lengths, strict=True)}

    def places_of(sample: Sample) -> np.ndarray:
        return starts[sample.uid] + np.arange(len(sample.completion_ids))

    gradients, parts = [], []
    for batch, micro_batch in zip(pack_update(samples, plan, weights=weights), plan.micro_batches, strict=True):
        place = pack_per_token(samples, micro_batch, places_of).astype(np.int32)
        (_, part), gradient = gradient_of(loss)(table, batch, place)
        gradients.append(np.asarray(gradient))
        parts.append(jax.tree.map(np.asarray, part))
    return sum(gradients[1:], gradients[0]), sum(parts[1:], parts[0])


def float64_policy(index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns logprobs [C, V], the logprob [C] of every token, and entropies [C] of one of `SAMPLES` in float64."""
    logits = TABLE[STARTS[index] : STARTS[index + 1]].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    chosen = logprobs[np.arange(len(logits)), SAMPLES[index].completion_ids]
    return logprobs, chosen, -(np.exp(logprobs) * logprobs).sum(axis=-1)


CURRENT = [float64_policy(i)[1] for i in range(len(SAMPLES))]
ENTROPIES = [float64_policy(i)[2] for i in range(len(SAMPLES))]


def oracle(
    samples: Sequence[Sample], weights: AggregationFn, term: TokenTerm, *, entropy_coef: float = 0.0
) -> tuple[float, np.ndarray]:
    """Computes loss and gradient of the table in float64; the samples are `SAMPLES` with other fields."""
    totals = StepTotals.from_samples(samples)
    loss, gradient = 0.0, np.zeros(TABLE.shape)
    for i, sample in enumerate(samples):
        logprobs, current, entropies = float64_policy(i)
        probabilities, chosen = np.exp(logprobs), np.eye(VOCAB)[sample.completion_ids]
        losses, slopes = term(sample, current)
        counted = weights(sample, totals).astype(np.float64)
        loss += float(counted @ (losses - entropy_coef * entropies))
        slopes_of_entropy = -probabilities * (logprobs + entropies[:, None])
        slopes = slopes[:, None] * (chosen - probabilities) - entropy_coef * slopes_of_entropy
        gradient[STARTS[i] : STARTS[i + 1]] = counted[:, None] * slopes
    return loss, gradient


def over_tokens(samples: Sequence[Sample], columns: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the values of all tokens that the policy generated."""
    return np.concatenate([x[s.mask] for x, s in zip(columns, samples, strict=True)])
