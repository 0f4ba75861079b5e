"""A priority queue of samples whose priority may change while they wait."""

from __future__ import annotations

import heapq


class PriorityQueue:
    """Orders samples by (rank, sample number), smallest first; sample numbers are unique."""

    def __init__(self) -> None:
        self._keys: dict[str, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, str]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def put(self, uid: str, rank: float, number: int) -> None:
        """Adds a sample, or changes its rank."""
        if self._keys.get(uid) == (rank, number):
            return
        self._keys[uid] = (rank, number)
        heapq.heappush(self._heap, (rank, number, uid))

    def peek(self) -> str | None:
        """Returns the uid of the next sample without removing it; None if the queue is empty."""
        while self._heap:
            rank, number, uid = self._heap[0]
            if self._keys.get(uid) == (rank, number):
                return uid
            heapq.heappop(self._heap)
        return None

    def remove(self, uid: str) -> None:
        """Removes a sample, if it is in the queue."""
        self._keys.pop(uid, None)

    def uids(self) -> list[str]:
        """Returns the uids of all samples in order."""
        return sorted(self._keys, key=self._keys.__getitem__)
