"""Continuous batching: one queue of samples in prompt order, and slots refilled while samples are waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence

import jax

from app.distributed.stop_check import StoppedError
from app.model.decode_weights import DecodeWeights
from app.records.sample import Prompt
from app.rollout.batch_engine import Footprint
from app.rollout.counters import RolloutCounters
from app.rollout.request import GenerationRequest
from app.rollout.sample_generator import SampleGenerator
from app.rollout.sampling.token_sampling import SamplingRules
from app.rollout.scheduling.segment_limits import prior_mean_length, segment_limits
from app.rollout.sequence import RolloutSequence
from app.rollout.slots.slot_engine import SegmentResult, SlotEngine
from app.rollout.stop_strings import DecodeText
from settings.schema.rollout import SegmentSettings


class ContinuousBatchGenerator(SampleGenerator):
    """Generates one queue of samples in the slots of one engine.

    Args:
        segment_rule: rule for the length of segments. It depends only on token counts, so runs are exactly repeatable.
    """

    def __init__(self, engine: SlotEngine, *, decode_text: DecodeText, segment_rule: SegmentSettings):
        super().__init__(decode_text=decode_text)
        self.engine = engine
        self._segment_rule = segment_rule

    def compile(self, rules: SamplingRules) -> None:
        """Compiles the engine's programs; see `SampleGenerator.compile`."""
        self.engine.compile(rules)

    def _run_in_order(
        self, weights: DecodeWeights, rows: deque[RolloutSequence], request: GenerationRequest
    ) -> Generator[RolloutSequence, None, None]:
        for row in rows:
            self.engine.check_fits(row)
            row.worker = str(jax.process_index())
        self.engine.open(weights, request)
        try:
            for _ in self._decode_segments(rows):
                while rows and rows[0].finish_reason and rows[0].is_collected:
                    yield rows.popleft()
        finally:
            self.engine.close()
        assert not rows

    def take_counters(self) -> RolloutCounters:
        """Returns the counts since the last call."""
        return self.engine.counters.take()

    def footprint(self) -> Footprint:
        """Returns the arrays on the devices when all slots are full."""
        return self.engine.footprint()

    def _decode_segments(self, rows: Sequence[RolloutSequence]) -> Iterator[None]:
        """Decodes until every row is done; yields each time the tokens of a segment have been collected.

        Raises:
            StoppedError: a stop was requested.
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
            prior = prior_mean_length(max(row.max_new_tokens for row in engine.active_rows))
            limits = segment_limits(
                self._segment_rule,
                num_active=len(engine.active_rows),
                has_waiting=bool(waiting),
                mean_length=max(sum_finished / num_finished, 1.0) if num_finished else prior,
                batch_sizes=engine.shapes.batch_buckets[:-1],
                capacity=engine.programs.capacity,
            )
            engine.start_segment(**limits._asdict())
            # The devices decode while the host reads the tokens of the previous segment.
            if segment is not None:
                segment.collect()
                yield
            segment = engine.finish_segment()
            # Of the segments before: the tokens of this one are read during the next one.
            engine.finish_stopped_rows()
            num_finished += len(segment.finished)
            sum_finished += sum(row.num_tokens for row in segment.finished)
        if segment is not None:
            segment.collect()
            yield

    def _prefill_ahead(self, waiting: deque[RolloutSequence]) -> None:
        """Prefills as many waiting prompts as one program takes, unless the next one is already in the cache."""
        if self.engine.has_prefilled(waiting[0].prompt):
            return
        prompts: dict[str, Prompt] = {}
        for row in waiting:
            prompts[row.prompt.uid] = row.prompt
            if len(prompts) == self.engine.shapes.prefill_rows[-1]:
                break
        self.engine.prefill(list(prompts.values()))
