"""Aggregation of per-token losses into a scalar, with weights fixed once per optimizer step.

The loss of an optimizer step is sum(weights * token losses). The weights already include the global denominators, so
the loss does not depend on how tokens are split into micro-batches, packed into rows or distributed over devices.
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
    """Number of tokens that the policy wrote."""
    num_samples: int
    """Number of samples with at least one token that the policy wrote."""

    @classmethod
    def from_samples(cls, samples: Sequence[Sample]) -> StepTotals:
        counts = [int(s.mask.sum()) for s in samples]
        return cls(sum(counts), sum(count > 0 for count in counts))


AggregationFn = Callable[[Sample, StepTotals], Float32[np.ndarray, "C"]]


def token_mean(sample: Sample, totals: StepTotals) -> Float32[np.ndarray, "C"]:
    """Gives each token the weight 1 / (tokens of the step). Source: Yu et al. 2025 (DAPO), eq. 12."""
    return sample.mask.astype(np.float32) / max(totals.num_tokens, 1)


def sequence_mean_token_mean(sample: Sample, totals: StepTotals) -> Float32[np.ndarray, "C"]:
    """Gives each token the weight 1 / (tokens of its sample * samples of the step). Source: Shao et al. 2024, eq. 3."""
    mask = sample.mask.astype(np.float32)
    return mask / max(float(mask.sum()), 1.0) / max(totals.num_samples, 1)


def sequence_mean_token_sum(sample: Sample, totals: StepTotals) -> Float32[np.ndarray, "C"]:
    """Gives each token the weight 1 / (samples of the step), so that a completion counts as one action.

    The logprob of that action is the sum of its tokens' logprobs. Source: Ahmadian et al. 2024 (RLOO), section 2.
    """
    return sample.mask.astype(np.float32) / max(totals.num_samples, 1)


def constant_length(sample: Sample, totals: StepTotals, *, num_tokens: int) -> Float32[np.ndarray, "C"]:
    """Gives each token the weight 1 / (samples of the step * num_tokens), which does not depend on its sample's length.

    `num_tokens` is the maximum completion length, a constant of the run: a length measured in the step would
    reintroduce a length bias. Source: Liu et al. 2025 (Dr. GRPO), section 3.2.
    """
    return sequence_mean_token_sum(sample, totals) / np.float32(num_tokens)


def aggregations(*, max_new_tokens: int) -> Mapping[str, AggregationFn]:
    """Returns, for each value of `algorithm.loss_aggregation`, the function that computes token weights."""
    return {
        "token-mean": token_mean,
        "sequence-mean-token-mean": sequence_mean_token_mean,
        "sequence-mean-token-sum": sequence_mean_token_sum,
        "constant-length": functools.partial(constant_length, num_tokens=max_new_tokens),
    }
