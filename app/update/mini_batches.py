"""A step's samples -> the mini-batches of its optimizer steps, epoch by epoch; the same for policy and critic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from app.flow import Sample

Epochs = Sequence[Sequence[Sequence[Sample]]]
"""Samples of every mini-batch of every epoch."""

MiniBatches = Callable[[Sequence[Sample], int], Epochs]
"""(this host's samples, training step) -> its part of every mini-batch."""


def split_by_group(
    samples: Sequence[Sample], num_parts: int, *, order: Callable[[int], np.ndarray] = np.arange
) -> Iterator[list[Sample]]:
    """Whole groups in `num_parts` parts whose counts of groups differ by at most one.

    Args:
        order: number of groups -> the order in which they are dealt; as they come by default.
    """
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    for part in np.array_split(np.asarray(list(groups))[order(len(groups))], num_parts):
        yield [sample for group in part.tolist() for sample in groups[group]]


def in_order(samples: Sequence[Sample], step: int, *, num_mini_batches: int, epochs: int) -> Epochs:
    """Every epoch goes over the same mini-batches."""
    del step
    return [list(split_by_group(samples, num_mini_batches))] * epochs


def shuffled(samples: Sequence[Sample], step: int, *, num_mini_batches: int, epochs: int, seed: int) -> Epochs:
    """Every epoch draws its mini-batches anew: which, follows from seed, step and epoch alone."""

    def drawn(epoch: int) -> Callable[[int], np.ndarray]:
        return np.random.default_rng((seed, step, epoch)).permutation

    return [list(split_by_group(samples, num_mini_batches, order=drawn(epoch))) for epoch in range(epochs)]
