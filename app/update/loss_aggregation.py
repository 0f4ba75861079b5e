"""How per-token losses become one number: as weights, fixed once per optimizer step.

The loss of an optimizer step is sum(weights * token losses). Because the weights already hold the
global denominators, it does not matter how the tokens are later cut into micro-batches, packed into
rows or spread over devices: the parts just add.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32

from app.records.sample import Sample


class StepTotals(NamedTuple):
    """Counts over all hosts and micro-batches of one optimizer step."""

    num_tokens: int
    """Tokens the policy wrote."""
    num_samples: int
    """Samples with at least one such token."""

    @classmethod
    def from_samples(cls, samples: Sequence[Sample]) -> StepTotals:
        counts = [int(s.mask.sum()) for s in samples]
        return cls(sum(counts), sum(count > 0 for count in counts))


AggregationFn = Callable[[Sample, StepTotals], Float32[np.ndarray, "C"]]


def token_mean(sample: Sample, totals: StepTotals) -> Float32[np.ndarray, "C"]:
    """Every token weighs 1 / (tokens of the step). Source: Yu et al. 2025 (DAPO), eq. 12."""
    return sample.mask.astype(np.float32) / max(totals.num_tokens, 1)


def sequence_mean_token_mean(sample: Sample, totals: StepTotals) -> Float32[np.ndarray, "C"]:
    """Every sample weighs the same, its tokens share it. Source: Shao et al. 2024 (GRPO), eq. 3."""
    mask = sample.mask.astype(np.float32)
    return mask / max(float(mask.sum()), 1.0) / max(totals.num_samples, 1)


def sequence_mean_token_sum(sample: Sample, totals: StepTotals) -> Float32[np.ndarray, "C"]:
    """Every token weighs 1 / (samples of the step): a completion is one action, its logprob the sum of its tokens'.

    Source: Ahmadian et al. 2024 (RLOO), section 2.
    """
    return sample.mask.astype(np.float32) / max(totals.num_samples, 1)


def constant_length(sample: Sample, totals: StepTotals, *, num_tokens: int) -> Float32[np.ndarray, "C"]:
    """Every token weighs 1 / (samples of the step * num_tokens), however long its sample became.

    `num_tokens` is a constant of the run, the longest completion allowed: never a length of this step, which would
    bring the bias back. Source: Liu et al. 2025 (Dr. GRPO), section 3.2.
    """
    return sequence_mean_token_sum(sample, totals) / np.float32(num_tokens)


def aggregations(*, max_new_tokens: int) -> Mapping[str, AggregationFn]:
    """`algorithm.loss_aggregation` -> what each token's loss counts."""
    return {
        "token-mean": token_mean,
        "sequence-mean-token-mean": sequence_mean_token_mean,
        "sequence-mean-token-sum": sequence_mean_token_sum,
        "constant-length": functools.partial(constant_length, num_tokens=max_new_tokens),
    }
