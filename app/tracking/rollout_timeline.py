"""Plots the timeline of a rollout: which kind of sample each slot of each worker generated over time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from app.records.atomic_write import write_atomic
from app.records.text_format import format_percent
from app.report.matplotlib_figures import POINTS_PER_INCH, inline_svg, new_figure, save_figure
from app.report.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, escape_label
from app.report.write_report import render_page
from app.rollout.scheduling.protocol import EventRecord, SampleRole, Submitted, WorkerJoined
from app.rollout.scheduling.schedule_metrics import ScheduleMetrics, Span, slot_spans
from app.rollout.workers.worker_pool import ScheduleConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IDLE_COLOR, SUSPENDED_COLOR = "#8888883a", PURPLE
COLORS: dict[SampleRole | None, str] = {"probe": ORANGE, "fast": BLUE, "any": BLUE, "heavy": RED}
SLOT_HEIGHT, LANE_GAP = 0.11, 0.8
"""Height of a slot in inches, and gap between workers in slot heights."""
MERGE_GAP = 0.001
"""Segments of a sample are drawn as one bar if the pause between them is at most this fraction of the makespan."""
WIDTH, MIN_HEIGHT, MAX_HEIGHT = 10.0, 2.1, 16.5
"""Width of the plot and limits of its height, in inches; slots become thinner at the maximum height."""
MARGIN = 1.45
"""Total height of titles, axis and legend in inches."""
SUPPORTED_SUFFIXES = (".png", ".html")


@dataclass(frozen=True)
class Timeline:
    """The schedule of a rollout as a plot shows it; times are seconds since the first sample was submitted."""

    heading: str
    figures: str
    """The metrics of the schedule as two lines of text."""
    slots: dict[str, int]
    """Maps the name of each worker to its number of slots."""
    spans: Sequence[Span]
    makespan_s: float
    last_verdict_s: float | None

    @classmethod
    def from_records(
        cls, records: Sequence[EventRecord], metrics: ScheduleMetrics, *, heading: str, schedule: ScheduleConfig
    ) -> Timeline:
        start = next((event.at for event, _ in records if isinstance(event, Submitted)), 0.0)
        spans = [one._replace(start_s=one.start_s - start, end_s=one.end_s - start) for one in slot_spans(records)]
        slots = {event.worker: event.slots for event, _ in records if isinstance(event, WorkerJoined)}
        shares = {"bubble": metrics.bubble, "tail": metrics.tail_fraction, "recall": metrics.probe_recall}
        shares["heavy prompts"] = metrics.heavy_share
        known = [f"{name} {format_percent(share)}" for name, share in shares.items() if share is not None]
        if metrics.threshold is not None:
            known.append(f"threshold {metrics.threshold:.3g} {schedule.pdsr.unit}")
        figures = (
            f"{schedule.policy}: {', '.join([f'makespan {metrics.makespan_s:.3g} s', *known])}\n"
            f"{metrics.stolen_by_fast} heavy samples stolen by fast workers, {metrics.stolen_by_heavy} fast ones by "
            f"heavy, {metrics.breaker_trips} trips, {metrics.suspensions} suspended, {metrics.truncated} truncated, "
            f"{metrics.repacked_tokens:,} tokens recomputed"
        )
        heading += f": {len(slots)} workers, {sum(slots.values())} slots"
        return cls(heading, figures, slots, spans, metrics.makespan_s, metrics.last_verdict_s)

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in inches, including a lane for suspended samples."""
        lanes = sum(slots + LANE_GAP for slots in self.slots.values()) + 1 + LANE_GAP
        return WIDTH, min(max(SLOT_HEIGHT * lanes + MARGIN, MIN_HEIGHT), MAX_HEIGHT)


def write_timeline(path: Path, timeline: Timeline) -> None:
    """Writes the plot as a PNG image or, if `path` ends in .html, as a page."""
    write_atomic(path, timeline_file(timeline, suffix=path.suffix))


def timeline_file(timeline: Timeline, *, suffix: str) -> bytes:
    """Returns the plot as the bytes of a PNG image or, for the suffix .html, of a page."""
    if suffix.lower() != ".html":
        return render_timeline(timeline, kind="png")
    width, height = (inches * POINTS_PER_INCH for inches in timeline.size)
    svg = render_timeline(timeline, kind="svg").decode("utf-8")
    picture = inline_svg(svg, label=timeline.heading, box=f"0 0 {width:g} {height:g}")
    return render_page("timeline.html", picture=picture, title=timeline.heading).encode("utf-8")


def render_timeline(timeline: Timeline, *, kind: Literal["png", "svg"]) -> bytes:
    """Returns the bytes of an image; they are equal for equal timelines.

    An SVG is made for an HTML page: it has no title and no background, and uses the page's fonts.
    """
    with new_figure(*timeline.size, salt="timeline") as figure:
        axes = figure.add_subplot()
        _draw(axes, timeline)
        if kind == "png":
            figure.suptitle(escape_label(timeline.heading), x=0.01, ha="left", fontsize=10, fontweight="bold")
        _add_legend(figure, axes)
        return save_figure(figure, kind, transparent=kind == "svg")


def _draw(axes: Axes, timeline: Timeline) -> None:
    top, tops, ticks, labels = 0.0, {}, [], []
    for worker, slots in timeline.slots.items():
        tops[worker] = top
        axes.broken_barh([(0, timeline.makespan_s)], (top, slots), facecolors=IDLE_COLOR, linewidth=0)
        ticks.append(top + slots / 2)
        labels.append(escape_label(worker))
        top += slots + LANE_GAP
    rows = [span for span in timeline.spans if span.role is not None]
    rows.sort(key=lambda span: (span.worker, span.slot, span.start_s))
    for (worker, slot), spans in groupby(rows, key=lambda span: (span.worker, span.slot)):
        merged = _merge_adjacent(spans, gap_s=MERGE_GAP * timeline.makespan_s)
        axes.broken_barh(
            [(span.start_s, span.end_s - span.start_s) for span in merged], (tops[worker] + slot, 0.92),
            facecolors=[COLORS[span.role] for span in merged], edgecolor="white", linewidth=0.3,
        )  # fmt: skip
    suspended = [(span.start_s, span.end_s - span.start_s) for span in timeline.spans if span.role is None]
    axes.broken_barh(suspended, (top, 1), facecolors=SUSPENDED_COLOR, edgecolor=SUSPENDED_COLOR, linewidth=1.0)
    axes.set_yticks([*ticks, top + 0.5], [*labels, "suspended"])
    axes.axvline(timeline.makespan_s, color=GREY, linewidth=1.0, label="end")
    if timeline.last_verdict_s is not None:
        axes.axvline(timeline.last_verdict_s, color=GREEN, linewidth=1.5, linestyle="--", label="last verdict")
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(top + 1.2, -0.3)
    axes.set_title(escape_label(timeline.figures), fontsize=9, loc="left")
    axes.set_xlabel("seconds")
    axes.set_xlim(0, 1.01 * timeline.makespan_s)


def _merge_adjacent(spans: Iterable[Span], *, gap_s: float) -> list[Span]:
    """Merges the segments of a sample, of which there may be hundreds, into one span; omits empty segments."""
    merged: list[Span] = []
    for span in spans:
        last = merged[-1] if merged else None
        if last and (last.role, last.uid) == (span.role, span.uid) and span.start_s - last.end_s <= gap_s:
            merged[-1] = last._replace(end_s=span.end_s)
        elif span.end_s > span.start_s:
            merged.append(span)
    return merged


def _add_legend(figure: Figure, axes: Axes) -> None:
    from matplotlib.patches import Patch

    colors = {role: COLORS[role] for role in ("probe", "fast", "heavy")}
    colors |= {"suspended": SUSPENDED_COLOR, "idle": IDLE_COLOR}
    handles: list[Any] = [Patch(facecolor=color, label=label) for label, color in colors.items()]
    lines, _ = axes.get_legend_handles_labels()
    figure.legend(handles=[*handles, *lines], loc="outside lower left", ncols=7, frameon=False)
