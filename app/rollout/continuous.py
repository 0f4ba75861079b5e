"""Continuous batching: a queue in the order of its prompts, and slots that are never free while it waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence

import numpy as np

from app.policy.kv_cache import DecodeWeights
from app.rollout.engine import BatchShape, Footprint
from app.rollout.rows import Row
from app.rollout.sampling import SamplingRules
from app.rollout.scheduling.segments import balanced_length, budget_length, finished_worth_leaving
from app.rollout.slots import Segment, SlotEngine
from app.rollout.streaming import Streaming
from app.rollout.tally import Tally
from settings.rollout_section import Segment as SegmentRule


class ContinuousBatching(Streaming):
    """One queue and one engine's slots.

    Args:
        rule: how long segments are. Counted in tokens alone, so that a run repeats itself.
    """

    def __init__(self, engine: SlotEngine, *, decode_text: Callable[[Sequence[int]], str], rule: SegmentRule):
        super().__init__(decode_text=decode_text)
        self.engine = engine
        self._rule = rule

    def _in_order(
        self, weights: DecodeWeights, rows: deque[Row], *, rules: SamplingRules, seed: int, policy_version: int
    ) -> Generator[Row, None, None]:
        for row in rows:
            self.engine.check(row)
        self.engine.open(weights, rules=rules, seed=seed, policy_version=policy_version)
        try:
            for _ in self._run(rows):
                while rows and rows[0].finish_reason and rows[0].is_collected:
                    yield rows.popleft()
        finally:
            self.engine.close()
        assert not rows

    def take_tally(self) -> Tally:
        """Of what was generated since the last call."""
        return self.engine.tally.take()

    @property
    def batch_shape(self) -> BatchShape:
        """At its fullest."""
        return self.engine.batch_shape

    def footprint(self) -> Footprint:
        """What full slots hold on the devices."""
        return self.engine.footprint()

    def _run(self, rows: Sequence[Row]) -> Iterator[None]:
        """Until every row is done, stopping wherever some may have become so."""
        engine, waiting = self.engine, deque(rows)
        finished: list[int] = []
        segment: Segment | None = None
        while waiting or engine.resident:
            if waiting and engine.num_free:
                self._prefill_ahead(waiting)
                engine.admit([waiting.popleft() for _ in range(min(engine.num_free, len(waiting)))])
            if not waiting:
                engine.compact()
            self._start(finished, is_waiting=bool(waiting))
            # The devices decode while the host reads what they have drawn before.
            if segment is not None:
                segment.collect()
                yield
            segment = engine.wait()
            finished += [row.num_tokens for row in segment.finished]
        if segment is not None:
            segment.collect()
            yield

    def _prefill_ahead(self, waiting: deque[Row]) -> None:
        """Several prompts at once, where the next is not there: as many as the pool holds."""
        if not self.engine.has_prefilled(waiting[0].prompt):
            prompts = {row.prompt.uid: row.prompt for row in waiting}
            self.engine.prefill(list(prompts.values())[: self.engine.shapes.num_pooled])

    def _start(self, finished: Sequence[int], *, is_waiting: bool) -> None:
        rule, engine = self._rule, self.engine
        active = len(engine.resident)
        bounds = {"minimum": rule.min, "maximum": rule.max}
        length = budget_length(active, capacity=rule.capacity, **bounds)
        if not is_waiting:
            return engine.start(length=length, leave_when_active=engine.next_lower_rung)
        lengths = finished or [row.max_new_tokens for row in engine.resident]
        mean_length, cost = float(np.mean(lengths)), {"overhead_steps": rule.overhead_steps}
        leave = finished_worth_leaving(active, mean_length, **cost)
        if rule.rule != "budget":
            length = balanced_length(mean_length, **cost, **bounds)
        return engine.start(length=length, leave_when_finished=leave)
