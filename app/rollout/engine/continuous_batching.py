"""Continuous batching: samples wait in one queue, in prompt order, and enter slots as soon as these are free."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence

import jax

from app.distributed.collectives import any_host
from app.distributed.stop_check import STOP_CHECK_INTERVAL_S, StoppedError
from app.mesh.device_mesh import num_hosts
from app.model.decode_weights import DecodeWeights
from app.rollout.counters import RolloutCounters
from app.rollout.engine.engine import SegmentResult, SlotEngine
from app.rollout.engine.sample_generator import SampleGenerator
from app.rollout.engine.shapes import Footprint
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import SamplingRules
from app.rollout.scheduling.scheduling_policy import admission_budget
from app.rollout.scheduling.segment_limits import SegmentLimits, prior_mean_length, segment_limits
from app.rollout.sequence import DecodeText, RolloutSequence, gather_sequences
from settings.schema.rollout import SegmentSettings


class ContinuousBatchGenerator(SampleGenerator):
    """Generates the samples of one queue in the slots of one engine.

    If the engine spans the devices of all hosts, the queue contains the samples of all hosts. All hosts make the same
    decisions, which depend only on token counts, and each host yields its own samples.

    Args:
        segment_rule: minimum and maximum length of a segment, in tokens per row.
    """

    def __init__(
        self, engine: SlotEngine, *, decode_text: DecodeText, stop_text: DecodeText, segment_rule: SegmentSettings
    ):
        super().__init__(engine, decode_text=decode_text, stop_text=stop_text)
        self._segment_rule = segment_rule
        self._spans_hosts = num_hosts(engine.programs.mesh) > 1
        self.on_progress: Callable[[int, int, int], None] | None = None
        """Called once per segment with the numbers of finished samples, all samples and generated tokens."""

    def compile(self, rules: SamplingRules) -> None:
        self.engine.compile(rules)

    def _run_in_order(
        self, weights: DecodeWeights, rows: deque[RolloutSequence], request: GenerationRequest
    ) -> Generator[RolloutSequence, None, None]:
        for row in rows:
            row.worker = str(jax.process_index())
        queue = gather_sequences(rows) if self._spans_hosts else rows
        self.engine.open(weights, request)
        try:
            for _ in self._decode_segments(queue):
                while rows and rows[0].finish_reason and rows[0].is_collected:
                    yield rows.popleft()
        finally:
            self.engine.close()
            if self.conversations is not None:
                self.conversations.abandon(rows)
        assert not rows

    def take_counters(self) -> RolloutCounters:
        """Returns the counts since the last call. If hosts share the queue, only process 0 gets them."""
        counters = self.engine.counters.take()
        return RolloutCounters() if self._spans_hosts and jax.process_index() > 0 else counters

    def footprint(self) -> Footprint:
        """Returns the shapes of the weights and the KV cache on the devices."""
        return self.engine.footprint()

    def _decode_segments(self, rows: Sequence[RolloutSequence]) -> Iterator[None]:
        """Decodes until every row is done; yields whenever more rows may be done and collected."""
        engine, waiting, lengths, num_rows = self.engine, deque(rows), list[int](), len(rows)
        answered: deque[RolloutSequence] = deque()
        segment: SegmentResult | None = None
        while waiting or answered or engine.active_rows or segment is not None or self._num_acting:
            self._raise_if_stopped()
            if self.on_progress is not None:
                self.on_progress(len(lengths), num_rows, engine.counters.generated_tokens)
            self._admit(answered, waiting, num_unsent=0 if segment is None else len(segment.acting))
            if engine.active_rows:
                engine.start_segment(self._limits(has_waiting=bool(answered or waiting), lengths=lengths))
            # The devices decode while the host reads the tokens of the previous segment.
            if segment is not None:
                segment.collect()
                if self.conversations is not None:
                    self.conversations.abandon(segment.finished)
                    for row in segment.acting:
                        self.conversations.send(row)
                yield
                segment = None
            if engine.active_rows:
                segment = engine.finish_segment()
                # Tokens of earlier segments; this segment's tokens are read during the next one.
                engine.finish_stopped_rows()
                lengths += [row.num_tokens for row in segment.finished]
            if self.conversations is not None and self._num_acting:
                is_idle = segment is None and not answered
                for row in self.conversations.take(timeout_s=STOP_CHECK_INTERVAL_S if is_idle else 0):
                    if row.finish_reason is None:
                        answered.append(row)
                    else:
                        engine.forget(row.key)
                        lengths.append(row.num_tokens)
                yield

    def _raise_if_stopped(self) -> None:
        """Raises StoppedError if a stop was requested on this host or, if hosts share the queue, on any host."""
        stops = self.stop_requested()
        if self._spans_hosts:
            stops = any_host(stops)
        if stops:
            raise StoppedError

    @property
    def _num_acting(self) -> int:
        return 0 if self.conversations is None else self.conversations.num_acting

    def _limits(self, *, has_waiting: bool, lengths: Sequence[int]) -> SegmentLimits:
        engine = self.engine
        prior = prior_mean_length(max(row.max_new_tokens for row in engine.active_rows))
        return segment_limits(
            self._segment_rule,
            num_active=len(engine.active_rows),
            # Rows whose turns end early wait for the segment's end before their environments are called.
            has_waiting=has_waiting or self.conversations is not None,
            mean_length=max(sum(lengths) / len(lengths), 1.0) if lengths else prior,
            batch_sizes=engine.shapes.batch_buckets[:-1],
            capacity=engine.programs.capacity,
        )

    def _admit(self, answered: deque[RolloutSequence], waiting: deque[RolloutSequence], *, num_unsent: int) -> None:
        """Admits answered rows to free slots, then new rows unless too many rows wait for their environments.

        Args:
            num_unsent: number of rows whose finished turn is not yet sent to the environment.
        """
        admitted = [answered.popleft() for _ in range(min(len(answered), self.engine.num_free_slots))]
        num_new = self.engine.num_free_slots - len(admitted)
        if self.conversations is not None:
            num_new = admission_budget(
                num_new,
                self._num_acting + num_unsent + len(answered),
                num_slots=self.engine.shapes.num_slots,
                limit=self.conversations.limits.max_suspended,
            )
        if waiting and num_new > 0:
            self.engine.prefill(row.prompt for row in waiting)
            admitted += [waiting.popleft() for _ in range(min(num_new, len(waiting)))]
        if admitted:
            self.engine.admit(admitted)
