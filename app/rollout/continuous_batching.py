"""Continuous batching: a queue in the order of its prompts, and slots that are never free while it waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence

import jax

from app.distributed.cancellation import StoppedError
from app.model.kv_cache import DecodeWeights
from app.records.sample import Prompt
from app.rollout.batch_engine import BatchShape, Footprint
from app.rollout.counters import Tally
from app.rollout.generator import Streaming
from app.rollout.sampling import SamplingRules
from app.rollout.scheduling.segment_limits import expected_length, segment_limits
from app.rollout.sequence import Row
from app.rollout.slot_engine import Segment, SlotEngine
from settings.schema.rollout import Segment as SegmentRule


class ContinuousBatching(Streaming):
    """One queue and one engine's slots.

    Args:
        rule: how long segments are. Counted in tokens alone, so that a run repeats itself.
    """

    def __init__(self, engine: SlotEngine, *, decode_text: Callable[[Sequence[int]], str], rule: SegmentRule):
        super().__init__(decode_text=decode_text)
        self.engine = engine
        self._rule = rule

    def compile(self, rules: SamplingRules) -> None:
        """See `Streaming`."""
        self.engine.compile(rules)

    def _in_order(
        self, weights: DecodeWeights, rows: deque[Row], *, rules: SamplingRules, seed: int, policy_version: int
    ) -> Generator[Row, None, None]:
        for row in rows:
            self.engine.check(row)
            row.worker = str(jax.process_index())
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
        """Until every row is done, pausing wherever some may have become so.

        Raises:
            StoppedError: asked to stop.
        """
        engine, waiting = self.engine, deque(rows)
        num_finished = sum_finished = 0
        segment: Segment | None = None
        while waiting or engine.resident:
            if self.asked_to_stop():
                raise StoppedError
            if waiting and engine.num_free:
                self._prefill_ahead(waiting)
                engine.admit([waiting.popleft() for _ in range(min(engine.num_free, len(waiting)))])
            if not waiting:
                engine.compact()
            otherwise = expected_length(max(row.max_new_tokens for row in engine.resident))
            limits = segment_limits(
                self._rule,
                active=len(engine.resident),
                some_wait=bool(waiting),
                mean_length=max(sum_finished / num_finished, 1.0) if num_finished else otherwise,
                rungs=engine.shapes.batch_rungs[:-1],
            )
            engine.start(**limits._asdict())
            # The devices decode while the host reads what they have drawn before.
            if segment is not None:
                segment.collect()
                yield
            segment = engine.wait()
            num_finished += len(segment.finished)
            sum_finished += sum(row.num_tokens for row in segment.finished)
        if segment is not None:
            segment.collect()
            yield

    def _prefill_ahead(self, waiting: deque[Row]) -> None:
        """Several prompts at once, where the next is not there: as many as the pool holds."""
        if self.engine.has_prefilled(waiting[0].prompt):
            return
        prompts: dict[str, Prompt] = {}
        for row in waiting:
            if row.prompt.uid not in prompts and len(prompts) == self.engine.shapes.num_pooled:
                break
            prompts[row.prompt.uid] = row.prompt
        self.engine.prefill(list(prompts.values()))
