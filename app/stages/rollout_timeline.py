"""The schedule of a rollout as a timeline plot."""

from __future__ import annotations

from collections.abc import Sequence

from app.records.text_format import format_percent
from app.report.slot_timeline import Activity, Timeline, TimelineBar
from app.rollout.scheduling.protocol import EventRecord, SampleRole, Submitted, WorkerJoined
from app.rollout.scheduling.schedule_metrics import ScheduleMetrics, slot_spans

ROLE_ACTIVITIES: dict[SampleRole | None, Activity] = {
    **{"probe": "probe", "fast": "fast", "heavy": "heavy"},
    **{"any": "fast", None: "suspended"},
}


def rollout_timeline(records: Sequence[EventRecord], metrics: ScheduleMetrics, *, model: str, policy: str) -> Timeline:
    """Returns the timeline of a rollout, which starts at its first submission."""
    start = next((event.at for event, _ in records if isinstance(event, Submitted)), 0.0)
    bars = tuple(
        TimelineBar(
            span.worker, span.slot, span.start_s - start, span.end_s - start, ROLE_ACTIVITIES[span.role], span.uid
        )
        for span in slot_spans(records)
    )
    slots = {event.worker: event.slots for event, _ in records if isinstance(event, WorkerJoined)}
    bubble, tail = map(format_percent, (metrics.bubble, metrics.tail_fraction))
    recall = "" if metrics.probe_recall is None else f", recall {metrics.probe_recall:.2f}"
    figures = (
        f"{policy}: {metrics.makespan_s:.3g} s, bubble {bubble}, tail {tail}{recall}, {metrics.breaker_trips} trips, "
        f"{metrics.stolen} stolen, {metrics.suspensions} suspended, {metrics.truncated} truncated, "
        f"{metrics.repacked_tokens:,} tokens recomputed, {metrics.segments} segments"
    )
    heading = f"{model}: {len(slots)} workers, {sum(slots.values())} slots"
    return Timeline(heading, figures, tuple(slots.items()), bars, metrics.makespan_s)
