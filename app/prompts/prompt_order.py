"""The order of the training prompts: a pure function of seed and position.

Epoch e is a permutation of all rows, seeded by [seed, e]. A step that spans two epochs could contain a prompt twice, so
the later epoch defers prompts that are already in the step. Every epoch remains a permutation. If there are fewer rows
than prompts per step, rows repeat within a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Int64

Indices = Int64[np.ndarray, "P"]

PATTERN_LENGTH = 10_000
"""Period of the pattern in which the sources of a mixture alternate, in prompts."""


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """The global order of prompts, which does not depend on the number of hosts."""

    seed: int | tuple[int, int]
    num_rows: int
    shuffle: bool
    window: int | None = None
    """Number of consecutive prompts, from any position, that must differ: at most a third of the rows. None = only
    prompts within a step must differ."""

    def row_indices(self, position: int, count: int) -> Indices:
        """Returns the row indices of a step.

        Args:
            position: number of rows taken before the step; the only state of the order that a checkpoint needs.
            count: number of rows in the step, the same in every step of a run.
        """
        assert self.num_rows > 0 and position >= 0 and count > 0
        first, last = position // self.num_rows, (position + count - 1) // self.num_rows
        epochs = [self._epoch(epoch, count, position % count) for epoch in range(first, last + 1)]
        start = position - first * self.num_rows
        return np.concatenate(epochs)[start : start + count]

    def _epoch(self, epoch: int, count: int, offset: int) -> Indices:
        """Returns the order of an epoch if steps begin at positions offset, offset + count, ..."""
        if self.window is not None and epoch > 0:
            # Prompts deferred in the previous epoch are before its last third.
            recent = self._permutation(epoch - 1)[self.num_rows - self.window :]
            return _defer_repeated(self._permutation(epoch), recent, self.window)
        if self.window is not None or count > self.num_rows:
            return self._permutation(epoch)
        start = self._last_independent_epoch(epoch, count, offset)
        order = self._permutation(start)
        for later in range(start + 1, epoch + 1):
            num_taken = (later * self.num_rows - offset) % count
            taken = order[self.num_rows - num_taken :]
            order = _defer_repeated(self._permutation(later), taken, count - num_taken)
        return order

    def _last_independent_epoch(self, epoch: int, count: int, offset: int) -> int:
        """Returns the newest epoch whose permutation suffices, without earlier epochs, to compute the order of `epoch`.

        Deferring changes only the first `count` places of an epoch, and the next epoch depends only on the last
        `count`. So if an epoch has at least two steps, this is the previous epoch; otherwise it is the last epoch that
        begins with a step.
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


@dataclass(frozen=True, slots=True)
class MixtureOrder:
    """The global order of the prompts of several sources, each with its own epochs.

    The sources alternate evenly: after any number of prompts, each has had its share within one or two prompts. The
    shares are multiples of 1 / `PATTERN_LENGTH`. Each epoch of a source is a permutation of its rows whose first third
    does not repeat rows from the last third of the previous epoch, so that no step has a prompt twice unless it takes
    more than a third of a source.

    Source of the pattern: Sainte-Laguë, La représentation proportionnelle, 1910.
    """

    seed: int
    rows: Sequence[Indices]
    weights: Sequence[float]
    shuffle: bool

    def row_indices(self, position: int, count: int) -> Indices:
        """Returns the row indices of a step; see `PromptOrder.row_indices`."""
        shares = np.asarray(self.weights) / sum(self.weights)
        num_places = np.maximum(np.rint(shares * PATTERN_LENGTH).astype(np.int64), 1)
        ranks = [np.arange(num) for num in num_places]
        pattern = np.argsort(np.concatenate([(rank + 0.5) / len(rank) for rank in ranks]), kind="stable")
        round_, place = np.divmod(np.arange(position, position + count), len(pattern))
        sources = np.repeat(np.arange(len(ranks)), num_places)[pattern[place]]
        numbers = round_ * num_places[sources] + np.concatenate(ranks)[pattern[place]]
        indices = np.empty(count, np.int64)
        for source, rows in enumerate(self.rows):
            order = PromptOrder((self.seed, source), len(rows), self.shuffle, window=len(rows) // 3)
            places = np.flatnonzero(sources == source)
            if len(places):
                indices[places] = rows[order.row_indices(int(numbers[places[0]]), len(places))]
        return indices


def _defer_repeated(order: Indices, recent: Indices, count: int) -> Indices:
    """Returns the order with the first `count` indices that are not in `recent` moved to the front."""
    front = np.flatnonzero(~np.isin(order, recent))[:count]
    return np.concatenate([order[front], np.delete(order, front)])


@lru_cache(maxsize=16)
def _shuffled(seed: int | tuple[int, int], epoch: int, num_rows: int) -> Indices:
    order = np.random.default_rng([seed, epoch]).permutation(num_rows)
    order.flags.writeable = False
    return order
