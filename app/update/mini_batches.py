"""Splits a step's samples into mini-batches for every epoch; policy and critic use the same split."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Int64

from app.records.sample import Sample, group_indices

MiniBatchIndices = Sequence[Sequence[Int64[np.ndarray, "N"]]]
"""Indices of the samples in every mini-batch of every epoch."""
EpochMiniBatches = Sequence[Sequence[Sequence[Sample]]]
"""Samples in every mini-batch of every epoch."""

MiniBatchSplitter = Callable[[Sequence[Sample], int], MiniBatchIndices]
"""(this host's samples, training step) -> this host's part of every mini-batch."""

GroupOrder = Callable[[int], Int64[np.ndarray, "K"]]
"""Index of a block of groups -> the mini-batch of each group in the block; see `split_by_group`."""


def split_by_group(
    samples: Sequence[Sample], num_parts: int, *, order: GroupOrder | None = None
) -> list[Int64[np.ndarray, "N"]]:
    """Returns the indices of this host's samples in each of `num_parts` mini-batches, without splitting groups.

    The step's groups, in the order of hosts, form consecutive blocks of `num_parts`, and each mini-batch gets one group
    of every block. Blocks never span hosts, so mini-batches do not depend on the number of hosts. If groups are
    missing, the last block of a host is shorter.

    Args:
        order: mini-batch of each group in a block; None = the k-th group goes to the k-th mini-batch.
    """
    members = group_indices(samples)
    firsts = range(0, len(members), num_parts)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for block, first in enumerate(firsts, start=jax.process_index() * len(firsts)):
        goes_to = np.arange(num_parts) if order is None else order(block)
        for part, group in zip(goes_to.tolist(), members[first : first + num_parts], strict=False):
            parts[part] += group
    return [np.asarray(part, np.int64) for part in parts]


def repeated_mini_batches(
    samples: Sequence[Sample], step: int, *, num_mini_batches: int, epochs: int
) -> MiniBatchIndices:
    """Splits the samples into mini-batches once, and returns this split for every epoch."""
    del step
    return [split_by_group(samples, num_mini_batches)] * epochs


def shuffled_mini_batches(
    samples: Sequence[Sample], step: int, *, num_mini_batches: int, epochs: int, seed: int
) -> MiniBatchIndices:
    """Returns random mini-batches, different in every epoch: each block of `split_by_group` is permuted separately.

    A block's permutation depends only on the seed, the step, the epoch and the block's index over all hosts.
    """

    def permuted(epoch: int) -> GroupOrder:
        return lambda block: np.random.default_rng((seed, step, epoch, block)).permutation(num_mini_batches)

    return [split_by_group(samples, num_mini_batches, order=permuted(epoch)) for epoch in range(epochs)]


def select_samples(samples: Sequence[Sample], mini_batch_indices: MiniBatchIndices) -> EpochMiniBatches:
    """Returns the samples of every mini-batch; repeated mini-batches share one list object, so it is packed once."""
    lists = {id(part): [samples[i] for i in part] for epoch in mini_batch_indices for part in epoch}
    return [[lists[id(part)] for part in epoch] for epoch in mini_batch_indices]
