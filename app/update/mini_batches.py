"""A step's samples -> the mini-batches of its optimizer steps, epoch by epoch; the same for policy and critic."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int64

from app.flow import Sample

Drawn = Sequence[Sequence[Int64[np.ndarray, "N"]]]
"""Of every mini-batch of every epoch, which samples it has: their indices."""
Epochs = Sequence[Sequence[Sequence[Sample]]]
"""The samples themselves."""

MiniBatches = Callable[[Sequence[Sample], int], Drawn]
"""(this host's samples, training step) -> its part of every mini-batch."""


def split_by_group(
    samples: Sequence[Sample], num_parts: int, *, order: Callable[[int], np.ndarray] = np.arange
) -> list[Int64[np.ndarray, "N"]]:
    """Indices of the samples, whole groups in `num_parts` parts whose counts of groups differ by at most one.

    Args:
        order: number of groups -> the order in which they are dealt; as they come by default.
    """
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(index)
    parts = np.array_split(np.asarray(list(groups))[order(len(groups))], num_parts)
    return [np.asarray([index for group in part.tolist() for index in groups[group]], np.int64) for part in parts]


def in_order(samples: Sequence[Sample], step: int, *, num_mini_batches: int, epochs: int) -> Drawn:
    """Every epoch goes over the same mini-batches."""
    del step
    return [split_by_group(samples, num_mini_batches)] * epochs


def shuffled(samples: Sequence[Sample], step: int, *, num_mini_batches: int, epochs: int, seed: int) -> Drawn:
    """Every epoch draws its mini-batches anew: which, follows from seed, step and epoch alone."""

    def drawn(epoch: int) -> Callable[[int], np.ndarray]:
        return np.random.default_rng((seed, step, epoch)).permutation

    return [split_by_group(samples, num_mini_batches, order=drawn(epoch)) for epoch in range(epochs)]


def picked(samples: Sequence[Sample], drawn: Drawn) -> Epochs:
    """The samples of every mini-batch; one that comes again is the same list again, and need not be cut anew."""
    lists = {id(part): [samples[i] for i in part] for epoch in drawn for part in epoch}
    return [[lists[id(part)] for part in epoch] for epoch in drawn]
