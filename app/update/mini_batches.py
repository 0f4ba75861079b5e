"""A step's samples -> the mini-batches of its optimizer steps, epoch by epoch; the same for policy and critic."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Int64

from app.records.sample import Sample

MiniBatchIndices = Sequence[Sequence[Int64[np.ndarray, "N"]]]
"""Of every mini-batch of every epoch, which samples it has: their indices."""
EpochMiniBatches = Sequence[Sequence[Sequence[Sample]]]
"""The samples themselves."""

MiniBatchSplitter = Callable[[Sequence[Sample], int], MiniBatchIndices]
"""(this host's samples, training step) -> its part of every mini-batch."""


GroupOrder = Callable[[int], Int64[np.ndarray, "K"]]
"""Number of a block -> for each of its groups in turn, the mini-batch that gets it."""


def split_by_group(
    samples: Sequence[Sample], num_parts: int, *, order: GroupOrder | None = None
) -> list[Int64[np.ndarray, "N"]]:
    """Indices of this host's samples in each of `num_parts` mini-batches, whole groups in the order they came.

    The step's groups, host after host, make blocks of `num_parts` one after another, and each mini-batch gets one
    group of every block. A host has whole blocks, so mini-batches are the same on any number of hosts, and no sample
    moves. Where groups are missing, the last block is short.

    Args:
        order: the k-th group of a block goes to the k-th mini-batch by default.
    """
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(index)
    members = list(groups.values())
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
    """Every epoch goes over the same mini-batches."""
    del step
    return [split_by_group(samples, num_mini_batches)] * epochs


def shuffled_mini_batches(
    samples: Sequence[Sample], step: int, *, num_mini_batches: int, epochs: int, seed: int
) -> MiniBatchIndices:
    """Every epoch draws its mini-batches anew, a stratified draw: each block is permuted by itself.

    Which they are follows from seed, step, epoch and the number of the block among those of all hosts.
    """

    def drawn(epoch: int) -> GroupOrder:
        return lambda block: np.random.default_rng((seed, step, epoch, block)).permutation(num_mini_batches)

    return [split_by_group(samples, num_mini_batches, order=drawn(epoch)) for epoch in range(epochs)]


def select_samples(samples: Sequence[Sample], mini_batch_indices: MiniBatchIndices) -> EpochMiniBatches:
    """The samples of every mini-batch; one that comes again is the same list again, and need not be cut anew."""
    lists = {id(part): [samples[i] for i in part] for epoch in mini_batch_indices for part in epoch}
    return [[lists[id(part)] for part in epoch] for epoch in mini_batch_indices]
