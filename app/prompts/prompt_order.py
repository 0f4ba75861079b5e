"""The order in which training asks its prompts: a pure function of seed and position.

Epoch e is a permutation of all rows, drawn from [seed, e]; the stream is epoch after epoch. A step
that takes the end of one epoch and the beginning of the next would now and then ask a prompt twice,
so the next epoch puts off the prompts that the same step has already asked. Every epoch stays a
permutation. With fewer rows than a step asks for, the rows repeat within it; nothing can help that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Int64

Indices = Int64[np.ndarray, "P"]


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """The order is global: it does not depend on the number of hosts (see `host_slice`)."""

    seed: int
    num_rows: int
    shuffle: bool

    def row_indices(self, position: int, count: int) -> Indices:
        """Row indices of one step: `count` of them, from `position` (rows taken before it) on.

        A run takes the same `count` every step; `position` and the fields are all there is to save.
        """
        assert self.num_rows > 0 and position >= 0 and count > 0
        first, last = position // self.num_rows, (position + count - 1) // self.num_rows
        epochs = [self._epoch(epoch, count, position % count) for epoch in range(first, last + 1)]
        start = position - first * self.num_rows
        return np.concatenate(epochs)[start : start + count]

    def _epoch(self, epoch: int, count: int, offset: int) -> Indices:
        """The order of one epoch, for steps that begin at offset, offset + count, ..."""
        if count > self.num_rows:
            return self._permutation(epoch)
        start = self._last_independent_epoch(epoch, count, offset)
        order = self._permutation(start)
        for later in range(start + 1, epoch + 1):
            num_asked = (later * self.num_rows - offset) % count
            asked = order[self.num_rows - num_asked :]
            order = _defer_repeated(self._permutation(later), asked, count - num_asked)
        return order

    def _last_independent_epoch(self, epoch: int, count: int, offset: int) -> int:
        """The last epoch up to this one whose own permutation decides the order that follows.

        Putting off touches only the first `count` places of an epoch, and the next epoch looks only
        at the last `count`: with two steps or more in an epoch, one epoch back is enough. Else back to
        an epoch that begins with a step.
        """
        if 2 * count <= self.num_rows:
            return max(epoch - 1, 0)
        while epoch > 0 and (epoch * self.num_rows - offset) % count:
            epoch -= 1
        return epoch

    def _permutation(self, epoch: int) -> Indices:
        if not self.shuffle:
            return np.arange(self.num_rows)
        return _shuffled(self.seed, epoch, self.num_rows)


def _defer_repeated(order: Indices, recent: Indices, count: int) -> Indices:
    """`order` with its first `count` indices that are not in `asked` moved to the front."""
    front = np.flatnonzero(~np.isin(order, recent))[:count]
    return np.concatenate([order[front], np.delete(order, front)])


@lru_cache(maxsize=4)
def _shuffled(seed: int, epoch: int, num_rows: int) -> Indices:
    order = np.random.default_rng([seed, epoch]).permutation(num_rows)
    order.flags.writeable = False
    return order


def host_slice(indices: Indices, *, process_index: int, process_count: int) -> Indices:
    """Host i's part of a step: the i-th of `process_count` equal runs of `indices`."""
    assert len(indices) % process_count == 0, "prompts of a step are counted per host"
    per_host = len(indices) // process_count
    return indices[process_index * per_host : (process_index + 1) * per_host]
