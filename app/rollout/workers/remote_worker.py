"""A rollout worker whose slots are in another process: what both ends have in common, however they exchange messages.

The rows stay in the process of the scheduler. A segment sends copies of the rows that it admits, and returns the tokens
that it draws, so that at most one segment is lost with the other process. Caches of suspended rows stay where they are.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
from jaxtyping import Int32

from app.model.kv_cache import KVCache
from app.rollout.counters import RolloutCounters
from app.rollout.scheduling.protocol import RunSegment, SegmentEnded
from app.rollout.sequence import RolloutSequence, SuspendedSequence
from app.rollout.workers.worker import Admission, RolloutWorker

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class RemoteCache:
    """A suspended row's cache, in the process of the worker that suspended it."""

    key: Any
    """What that process, or Ray, finds it by."""


class RemoteSegment(NamedTuple):
    """Result of a segment in another process."""

    ended: SegmentEnded
    tokens: dict[str, Int32[np.ndarray, "fields C"]]
    """Tokens of each row that drew some or is done, by uid; see `RolloutSequence.segment_tokens`."""
    policy_version: int
    """Version of the weights that drew them."""
    counters: RolloutCounters
    prompt_routes: dict[str, Int32[np.ndarray, "S words"]]
    """Of each row that has drawn its first tokens, by uid, if routes are recorded."""


@dataclass(eq=False, kw_only=True)
class RemoteWorker(RolloutWorker):
    """The scheduler's end of a worker in another process. `engine` only describes its slots and is never opened."""

    @property
    def num_devices(self) -> int:
        """0, because the worker uses no devices of this process."""
        return 0

    @abstractmethod
    def _send_segment(
        self, command: RunSegment, admissions: Sequence[Admission], caches: dict[str, RemoteCache]
    ) -> None:
        """Sends a command without waiting for its end.

        Args:
            admissions: rows to admit, without their caches.
            caches: where the caches of some of them are, by uid.
        """

    @abstractmethod
    def _receive_segment(self) -> RemoteSegment:
        """Waits for the end of the segment; raises the worker's error if it failed."""

    @abstractmethod
    def _send_suspend(self, uid: str) -> RemoteCache:
        """Takes a row out of its slot, without waiting for it."""

    def suspend(self, row: RolloutSequence) -> SuspendedSequence:
        """Takes a row out of its slot; only workers of its kind can use its cache."""
        cache = self._send_suspend(self._admissions.pop(row).uid)
        return SuspendedSequence(row, cast(KVCache, cache))

    def start_segment(self, command: RunSegment, admissions: deque[Admission]) -> None:
        """Sends the rows; see `RolloutWorker.start_segment`."""
        started = self.clock()
        # There, blocks of ended rows are free once others need them.
        self.ended_keys.clear()
        incoming, caches = [], {}
        while admissions:
            one = admissions.popleft()
            try:
                if one.suspended is not None:
                    cache = one.suspended.result(self.cache_timeout_s).cache
                    caches[one.uid] = cast(RemoteCache, cache)
            except Exception as error:
                log.warning("rollout worker %s recomputes the cache of %s", self.name, one.uid, exc_info=error)
            one = self._admissions[one.row] = one._replace(suspended=None)
            incoming.append(one)
        rows = without_columns(one.row for one in incoming)
        for one in incoming:
            # Not in the copies: slots count the prompt of a row that has not started.
            one.row.started_s = one.row.started_s or time.perf_counter()
        sent = [one._replace(row=row) for one, row in zip(incoming, rows, strict=True)]
        self._send_segment(command, sent, caches)
        self._running = command, started

    def finish_segment(self, *, not_before: float = 0.0) -> SegmentEnded:
        """Waits for the segment and adds its tokens to the rows; see `RolloutWorker.finish_segment`."""
        assert self._running is not None
        (_, started), self._running = self._running, None
        result = self._receive_segment()
        at = self.clock()
        self._segment_counters.append(result.counters)
        rows = {admission.uid: row for row, admission in self._admissions.items()}
        for report in result.ended.rows:
            row, tokens = rows[report.uid], result.tokens.get(report.uid)
            row.worker = self.name
            if tokens is None:
                continue
            row.segment_tokens.append(tokens)
            row.prompt_routes = result.prompt_routes.get(report.uid, row.prompt_routes)
            row.segment_versions.append((result.policy_version, tokens.shape[1]))
            row.num_tokens += tokens.shape[1]
            row.num_segments += 1
            if report.finish is not None:
                row.finish(report.finish)
            row.turn_end = report.turn_end
            if report.finish is not None or row.is_acting:
                del self._admissions[row]
        return replace(result.ended, at=at, worker=self.name, seconds=at - max(started, not_before))


class ServedRows:
    """The other end: copies of the rows of one worker, and what each of its segments adds to them."""

    def __init__(self, worker: RolloutWorker):
        self._worker = worker
        self._rows: dict[str, RolloutSequence] = {}
        self._num_tokens: dict[str, int] = {}

    def admit(self, admissions: Iterable[Admission]) -> None:
        """Adds the rows that the next segment admits."""
        self._rows |= {one.uid: one.row for one in admissions}
        self._num_tokens = {uid: row.num_tokens for uid, row in self._rows.items()}

    def take(self, uid: str) -> RolloutSequence:
        """Removes a row that leaves the worker, and returns it."""
        return self._rows.pop(uid)

    def segment_result(self, ended: SegmentEnded) -> RemoteSegment:
        """Returns what the segment has drawn, and forgets its finished rows."""
        tokens, prompt_routes, version = {}, {}, 0
        for report in ended.rows:
            row = self._rows[report.uid]
            if report.finish is not None or row.is_acting:
                del self._rows[report.uid]
            # A row that waited for blocks, or only took known tokens, drew nothing.
            if row.num_tokens > self._num_tokens[report.uid] or report.finish is not None:
                tokens[report.uid], version = row.segment_tokens[-1], row.segment_versions[-1][0]
                if not self._num_tokens[report.uid] and row.prompt_routes is not None:
                    prompt_routes[report.uid] = row.prompt_routes
        return RemoteSegment(ended, tokens, version, self._worker.take_counters(), prompt_routes)


def without_columns(rows: Iterable[RolloutSequence]) -> list[RolloutSequence]:
    """Returns copies without the fields of prompts that slots do not read. Siblings share their prompt."""
    prompts: dict[int, Any] = {}
    copies = []
    for row in rows:
        if id(row.prompt) not in prompts:
            prompts[id(row.prompt)] = replace(row.prompt, source="", answer=None, extra={})
        copies.append(replace(row, prompt=prompts[id(row.prompt)], opening=None))
    return copies
