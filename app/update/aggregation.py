"""How per-token losses become one number: as weights, fixed once per optimizer step.

The loss of an optimizer step is sum(weights * token losses). Because the weights already hold the
global denominators, it does not matter how the tokens are later cut into micro-batches, packed into
rows or spread over devices: the parts just add.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32

from app.flow import Sample


class Totals(NamedTuple):
    """Counts over all hosts and micro-batches of one optimizer step."""

    num_tokens: int
    """Tokens the policy wrote."""
    num_samples: int
    """Samples with at least one such token."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Totals:
        counts = [int(s.mask.sum()) for s in samples]
        return cls(sum(counts), sum(count > 0 for count in counts))


Weights = Callable[[Sample, Totals], Float32[np.ndarray, "C"]]


def token_mean(sample: Sample, totals: Totals) -> Float32[np.ndarray, "C"]:
    """Every token weighs 1 / (tokens of the step). Source: Yu et al. 2025 (DAPO), eq. 12."""
    return sample.mask.astype(np.float32) / max(totals.num_tokens, 1)


def sequence_mean_token_mean(sample: Sample, totals: Totals) -> Float32[np.ndarray, "C"]:
    """Every sample weighs the same, its tokens share it. Source: Shao et al. 2024 (GRPO), eq. 3."""
    mask = sample.mask.astype(np.float32)
    return mask / max(float(mask.sum()), 1.0) / max(totals.num_samples, 1)


AGGREGATIONS: Mapping[str, Weights] = MappingProxyType(
    {"token-mean": token_mean, "sequence-mean-token-mean": sequence_mean_token_mean}
)
