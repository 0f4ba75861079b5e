"""A schedule as a panel of the timeline plot, and its metrics as a row of the table below the plot."""

from __future__ import annotations

from collections.abc import Sequence

from app.records.text_format import format_percent
from app.report.slot_timeline import Activity, TimelineBar, TimelinePanel
from app.rollout.scheduling.metrics import ScheduleMetrics, slot_spans, slots_per_worker
from app.rollout.scheduling.protocol import EventRecord, SampleRole, Submitted

ROLE_ACTIVITIES: dict[SampleRole | None, Activity] = {
    **{"probe": "probe", "fast": "fast", "heavy": "heavy"},
    **{"any": "fast", None: "suspended"},
}
METRIC_HEADINGS = (
    "bubble",
    "tail",
    "recall",
    "trips",
    "stolen",
    "suspended",
    "truncated",
    "recomputed tokens",
    "segments",
)


def metric_cells(metrics: ScheduleMetrics) -> tuple[str, ...]:
    """Returns the values under `METRIC_HEADINGS`."""
    return (
        format_percent(metrics.bubble),
        format_percent(metrics.tail_fraction),
        "" if metrics.probe_recall is None else f"{metrics.probe_recall:.2f}",
        *map(str, (metrics.breaker_trips, metrics.stolen, metrics.suspensions, metrics.truncated)),
        f"{metrics.repacked_tokens:,}",
        str(metrics.segments),
    )


def timeline_panel(name: str, records: Sequence[EventRecord], metrics: ScheduleMetrics) -> TimelinePanel:
    """Returns a panel of the plot with the events of a rollout, starting at its first submission."""
    start = next((event.at for event, _ in records if isinstance(event, Submitted)), 0.0)
    bars = tuple(
        TimelineBar(
            span.worker, span.slot, span.start_s - start, span.end_s - start, ROLE_ACTIVITIES[span.role], span.uid
        )
        for span in slot_spans(records)
    )
    bubble, tail = map(format_percent, (metrics.bubble, metrics.tail_fraction))
    title = f"{name}: {metrics.makespan_s:.3g} s, bubble {bubble}, tail {tail}"
    return TimelinePanel(title, tuple(slots_per_worker(records).items()), bars, metrics.makespan_s)
