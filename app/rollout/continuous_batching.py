"""Continuous batching: a queue in the order of its prompts, and slots that are never free while it waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence

import jax

from app.distributed.cancellation import StoppedError
from app.model.kv_cache import DecodeWeights
from app.records.sample import Prompt
from app.rollout.batch_engine import BatchShape, Footprint
from app.rollout.counters import RolloutCounters
from app.rollout.generator import SampleGenerator
from app.rollout.sampling import SamplingRules
from app.rollout.scheduling.segment_limits import prior_mean_length, segment_limits
from app.rollout.sequence import RolloutSequence
from app.rollout.slot_engine import SegmentResult, SlotEngine
from settings.schema.rollout import SegmentSettings as SegmentRule


class ContinuousBatchGenerator(SampleGenerator):
    """One queue and one engine's slots.

    Args:
        rule: how long segments are. Counted in tokens alone, so that a run repeats itself.
    """

    def __init__(self, engine: SlotEngine, *, decode_text: Callable[[Sequence[int]], str], segment_rule: SegmentRule):
        super().__init__(decode_text=decode_text)
        self.engine = engine
        self._segment_rule = segment_rule

    def compile(self, rules: SamplingRules) -> None:
        """See `Streaming`."""
        self.engine.compile(rules)

    def _run_in_order(
        self,
        weights: DecodeWeights,
        rows: deque[RolloutSequence],
        *,
        rules: SamplingRules,
        seed: int,
        policy_version: int,
    ) -> Generator[RolloutSequence, None, None]:
        for row in rows:
            self.engine.check_fits(row)
            row.worker = str(jax.process_index())
        self.engine.open(weights, rules=rules, seed=seed, policy_version=policy_version)
        try:
            for _ in self._decode_segments(rows):
                while rows and rows[0].finish_reason and rows[0].is_collected:
                    yield rows.popleft()
        finally:
            self.engine.close()
        assert not rows

    def take_counters(self) -> RolloutCounters:
        """Of what was generated since the last call."""
        return self.engine.counters.take()

    @property
    def batch_shape(self) -> BatchShape:
        """At its fullest."""
        return self.engine.batch_shape

    def footprint(self) -> Footprint:
        """What full slots hold on the devices."""
        return self.engine.footprint()

    def _decode_segments(self, rows: Sequence[RolloutSequence]) -> Iterator[None]:
        """Until every row is done, pausing wherever some may have become so.

        Raises:
            StoppedError: asked to stop.
        """
        engine, waiting = self.engine, deque(rows)
        num_finished = sum_finished = 0
        segment: SegmentResult | None = None
        while waiting or engine.active_rows:
            if self.stop_requested():
                raise StoppedError
            if waiting and engine.num_free_slots:
                self._prefill_ahead(waiting)
                engine.admit([waiting.popleft() for _ in range(min(engine.num_free_slots, len(waiting)))])
            if not waiting:
                engine.compact()
            otherwise = prior_mean_length(max(row.max_new_tokens for row in engine.active_rows))
            limits = segment_limits(
                self._segment_rule,
                num_active=len(engine.active_rows),
                has_waiting=bool(waiting),
                mean_length=max(sum_finished / num_finished, 1.0) if num_finished else otherwise,
                batch_sizes=engine.shapes.batch_buckets[:-1],
            )
            engine.start_segment(**limits._asdict())
            # The devices decode while the host reads what they have drawn before.
            if segment is not None:
                segment.collect()
                yield
            segment = engine.finish_segment()
            num_finished += len(segment.finished)
            sum_finished += sum(row.num_tokens for row in segment.finished)
        if segment is not None:
            segment.collect()
            yield

    def _prefill_ahead(self, waiting: deque[RolloutSequence]) -> None:
        """Several prompts at once, where the next is not there: as many as the pool holds."""
        if self.engine.has_prefilled(waiting[0].prompt):
            return
        prompts: dict[str, Prompt] = {}
        for row in waiting:
            if row.prompt.uid not in prompts and len(prompts) == self.engine.shapes.num_pooled_prompts:
                break
            prompts[row.prompt.uid] = row.prompt
        self.engine.prefill(list(prompts.values()))
