"""The timeline plot: what every slot of every worker did over time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from app.records.atomic_write import write_atomic
from app.report.html_pages import timeline_page
from app.report.matplotlib_figures import POINTS_PER_INCH, inline_svg, new_figure, save_figure
from app.report.plots import BLUE, GREY, ORANGE, PURPLE, RED, escape_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Activity = Literal["probe", "fast", "heavy", "suspended"]
IDLE_COLOR = "#e4e4e4"
COLORS: dict[str, str] = {"probe": ORANGE, "fast": BLUE, "heavy": RED, "suspended": PURPLE}
SLOT_HEIGHT, LANE_GAP = 0.11, 0.8
"""Height of a slot, in inches, and gap between workers, in slots."""
MERGE_GAP_S = 1e-6
WIDTH, MIN_HEIGHT, MAX_HEIGHT = 10.0, 2.1, 16.5
"""Width of the plot, and limits of its height, in inches; the slots of a higher one are thinner."""
MARGIN = 1.45
"""Height in inches of titles, axis and legend."""
SUPPORTED_SUFFIXES = (".png", ".html")


class TimelineBar(NamedTuple):
    """An interval in which a row decodes or a sample is suspended."""

    worker: str
    slot: int
    """Slot number from 0; unused while suspended."""
    start_s: float
    end_s: float
    activity: Activity
    sample: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """The schedule of a rollout."""

    heading: str
    figures: str
    """The metrics of the schedule, in a line."""
    slots: tuple[tuple[str, int], ...]
    """Each worker's name and number of slots."""
    bars: tuple[TimelineBar, ...]
    makespan_s: float

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in inches, including a lane for suspended samples."""
        lanes = sum(slots + LANE_GAP for _, slots in self.slots) + 1 + LANE_GAP
        return WIDTH, min(max(SLOT_HEIGHT * lanes + MARGIN, MIN_HEIGHT), MAX_HEIGHT)


def write_timeline(path: Path, timeline: Timeline) -> None:
    """Writes the plot as an image or, if `path` ends in .html, as a page."""
    if path.suffix.lower() != ".html":
        return write_atomic(path, render_timeline(timeline, kind="png"))
    width, height = (inches * POINTS_PER_INCH for inches in timeline.size)
    svg = render_timeline(timeline, kind="svg").decode("utf-8")
    element = inline_svg(svg, label=timeline.heading, box=f"0 0 {width:g} {height:g}")
    return write_atomic(path, timeline_page(element, title=timeline.heading).encode("utf-8"))


def render_timeline(timeline: Timeline, *, kind: Literal["png", "svg"]) -> bytes:
    """Returns an image; equal timelines give equal bytes.

    An SVG is for a page, which has the heading and whose background and fonts it uses.
    """
    with new_figure(*timeline.size, salt="timeline") as figure:
        axes = figure.add_subplot()
        _draw(axes, timeline)
        axes.set_xlabel("seconds")
        axes.set_xlim(0, 1.01 * timeline.makespan_s)
        if kind == "png":
            figure.suptitle(escape_label(timeline.heading), x=0.01, ha="left", fontsize=10, fontweight="bold")
        _add_legend(figure)
        return save_figure(figure, kind, transparent=kind == "svg")


def _draw(axes: Axes, timeline: Timeline) -> None:
    top, tops, ticks, labels = 0.0, {}, [], []
    for worker, slots in timeline.slots:
        tops[worker] = top
        axes.broken_barh([(0, timeline.makespan_s)], (top, slots), facecolors=IDLE_COLOR, linewidth=0)
        ticks.append(top + slots / 2)
        labels.append(escape_label(worker))
        top += slots + LANE_GAP
    rows = [bar for bar in timeline.bars if bar.activity != "suspended"]
    rows.sort(key=lambda bar: (bar.worker, bar.slot, bar.start_s))
    for (worker, slot), bars in groupby(rows, key=lambda bar: (bar.worker, bar.slot)):
        merged = _merge_adjacent(bars)
        axes.broken_barh(
            [(bar.start_s, bar.end_s - bar.start_s) for bar in merged], (tops[worker] + slot, 0.92),
            facecolors=[COLORS[bar.activity] for bar in merged], edgecolor="white", linewidth=0.3,
        )  # fmt: skip
    suspended = [(bar.start_s, bar.end_s - bar.start_s) for bar in timeline.bars if bar.activity == "suspended"]
    axes.broken_barh(suspended, (top, 1), facecolors=COLORS["suspended"], linewidth=0)
    axes.set_yticks([*ticks, top + 0.5], [*labels, "suspended"])
    axes.axvline(timeline.makespan_s, color=GREY, linewidth=1.0)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(top + 1.2, -0.3)
    axes.set_title(escape_label(timeline.figures), fontsize=9, loc="left")


def _merge_adjacent(bars: Iterable[TimelineBar]) -> list[TimelineBar]:
    """Merges consecutive segments of a sample into one bar, because there may be hundreds."""
    merged: list[TimelineBar] = []
    for bar in bars:
        last = merged[-1] if merged else bar
        continues = (bar.activity, bar.sample) == (last.activity, last.sample) and last is not bar
        if continues and bar.start_s - last.end_s < MERGE_GAP_S:
            merged[-1] = last._replace(end_s=bar.end_s)
        else:
            merged.append(bar)
    return merged


def _add_legend(figure: Figure) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=color, label=label) for label, color in {**COLORS, "idle": IDLE_COLOR}.items()]
    end = Line2D([], [], color=GREY, linewidth=1.0, label="end")
    figure.legend(handles=[*handles, end], loc="outside lower right", ncols=7, frameon=False)
