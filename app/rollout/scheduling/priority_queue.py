"""A priority queue of samples whose priority may change while they wait."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator


class PriorityQueue:
    """Orders samples by (rank, sample number), smallest first; sample numbers are unique."""

    def __init__(self) -> None:
        self._keys: dict[str, tuple[float, int, str]] = {}
        self._sorted: list[tuple[float, int, str]] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[str]:
        """Yields the uids in order."""
        return (uid for _, _, uid in self._sorted)

    def put(self, uid: str, rank: float, number: int) -> None:
        """Adds a sample, or changes its rank."""
        self.remove(uid)
        self._keys[uid] = (rank, number, uid)
        insort(self._sorted, self._keys[uid])

    def remove(self, uid: str) -> None:
        """Removes a sample, if it is in the queue."""
        if (key := self._keys.pop(uid, None)) is not None:
            del self._sorted[bisect_left(self._sorted, key)]
