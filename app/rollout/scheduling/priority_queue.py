"""Samples in the order in which they should be taken; the order of one may change while it waits."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class PriorityQueue:
    """Smallest key first. Keys are (rank, number of the sample), so that no two are equal."""

    def __init__(self, items: Iterable[tuple[str, float, int]] = ()):
        self._keys: dict[str, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, str]] = []
        for uid, rank, number in items:
            self.put(uid, rank, number)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, uid: object) -> bool:
        return uid in self._keys

    def put(self, uid: str, rank: float, number: int) -> None:
        """Adds the sample, or gives it another place."""
        if self._keys.get(uid) == (rank, number):
            return
        self._keys[uid] = (rank, number)
        heapq.heappush(self._heap, (rank, number, uid))

    def peek(self) -> str | None:
        """The next sample, which stays."""
        while self._heap:
            rank, number, uid = self._heap[0]
            if self._keys.get(uid) == (rank, number):
                return uid
            heapq.heappop(self._heap)
        return None

    def pop(self) -> str | None:
        uid = self.peek()
        if uid is not None:
            self.remove(uid)
        return uid

    def remove(self, uid: str) -> None:
        """Takes out a sample that may not be there."""
        self._keys.pop(uid, None)

    def uids(self) -> list[str]:
        """In order."""
        return sorted(self._keys, key=self._keys.__getitem__)

    def to_json(self) -> list[tuple[str, float, int]]:
        return [(uid, *self._keys[uid]) for uid in self.uids()]
