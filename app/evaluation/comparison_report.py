"""Two evaluations of the same prompts, side by side: as a table for people, and as a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from app.records.atomic_write import write_atomic
from app.records.jsonl import check_output_path
from app.report.before_after import format_metric
from app.report.confidence_intervals import Interval, MetricEstimate
from app.report.plots import BLUE, GREY, ORANGE, escape_label
from app.report.render import STYLE
from settings.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLOT_SUFFIXES = (".png", ".svg")
ROW_HEIGHT, MARGIN, WIDTH = 0.42, 1.5, 9.0
"""Inches."""
MARKER_OFFSET = 0.16
"""Of a row: what lies between before and after."""
MIN_SHOWN_P = 1e-6


@dataclass(frozen=True, slots=True)
class PairedMetric:
    name: str
    """Of the metric."""
    before: MetricEstimate
    after: MetricEstimate
    difference: MetricEstimate
    """After - before, over the prompts that both know it of."""


@dataclass(frozen=True, slots=True)
class EvaluationComparison:
    before: str
    after: str
    """What was evaluated."""
    num_prompts: int
    judge: str
    has_plugin_judge: bool
    """The judge's values need not be shares."""
    metrics: Sequence[PairedMetric]
    num_better: int
    num_worse: int
    num_equal: int
    """Prompts whose accuracy rose, fell and stayed. The others have none before or after."""
    test: str
    p_value: float
    notes: Sequence[str]
    """What else differs."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "before": self.before,
            "after": self.after,
            "prompts": self.num_prompts,
            "judge": self.judge,
            "metrics": {
                row.name: {
                    end: {"value": measured.value, "interval": measured.interval}
                    for end, measured in (("before", row.before), ("after", row.after), ("difference", row.difference))
                }
                for row in self.metrics
            },
            "better": self.num_better,
            "worse": self.num_worse,
            "alike": self.num_equal,
            "test": self.test,
            "p": self.p_value,
            "notes": [*self.notes],
        }

    @property
    def verdict(self) -> str:
        """What the test says."""
        p = f"p < {MIN_SHOWN_P:g}" if self.p_value < MIN_SHOWN_P else f"p = {self.p_value:.2g}"
        return f"{self.num_better} prompts better, {self.num_worse} worse, {self.num_equal} alike: {p} ({self.test})"

    def to_text(self) -> str:
        lines = [
            f"before  {self.before}",
            f"after   {self.after}",
            f"{self.num_prompts} prompts, judged by {self.judge}; 95 % intervals in brackets",
            "",
            f"{'':<24}{'before':>24}{'after':>24}{'difference':>28}",
        ]
        for row in self.metrics:
            ends = [self._format_estimate(row.name, measured) for measured in (row.before, row.after)]
            change = self._format_difference(row)
            lines.append(f"{row.name.removeprefix('eval/'):<24}{ends[0]:>24}{ends[1]:>24}{change:>28}")
        return "\n".join([*lines, "", self.verdict, *(f"note: {note}" for note in self.notes)])

    def _format_estimate(self, name: str, measured: MetricEstimate) -> str:
        value = format_metric(name, measured.value, by_plug_in=self.has_plugin_judge)
        interval = format_interval(name, measured.interval, has_plugin_judge=self.has_plugin_judge)
        return f"{value} [{interval}]" if interval else value

    def _format_difference(self, metric: PairedMetric) -> str:
        """With its sign; of shares in percentage points."""
        value, interval = metric.difference
        if value is None:
            return "–"
        scale, unit = (
            (100.0, " pp")
            if format_metric(metric.name, 0.0, by_plug_in=self.has_plugin_judge)[-1] == "%"
            else (1.0, "")
        )
        places = "+.0f" if metric.name.endswith("_count") else "+.1f" if unit or not self.has_plugin_judge else "+.3g"
        reach = "" if interval is None else " [" + ", ".join(f"{scale * end:{places}}" for end in interval) + "]"
        return f"{scale * value:{places}}{unit}{reach}"


def is_shown(name: str, measured: MetricEstimate) -> bool:
    """Whether it is worth a row: failures only where there were any."""
    return measured.value is not None and (not name.endswith("_count") or measured.value > 0)


def format_interval(name: str, interval: Interval | None, *, has_plugin_judge: bool) -> str:
    """Low to high; nothing where there is none."""
    return (
        ""
        if interval is None
        else " – ".join(format_metric(name, end, by_plug_in=has_plugin_judge) for end in interval)
    )


def check_plot_path(path: Path) -> None:
    """Raises InputError where no picture can be written."""
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise InputError(f"--picture: expected a name that ends in .png or .svg, got {path}")
    check_output_path(path)


def write_plot(path: Path, comparison: EvaluationComparison) -> None:
    write_atomic(path, draw_paired_plot(comparison, kind="svg" if path.suffix.lower() == ".svg" else "png"))


def draw_paired_plot(comparison: EvaluationComparison, *, kind: Literal["png", "svg"]) -> bytes:
    """Before and after with their intervals, and what lies between; the same bytes for the same comparison."""
    # As in `app.report.render`: loading takes most of a second, and pyplot would choose a window system.
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = plottable_metrics(comparison)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE | {"svg.hashsalt": "paired", "svg.fonttype": "path"})
        figure = Figure(figsize=(WIDTH, MARGIN + ROW_HEIGHT * max(len(rows), 2)))
        FigureCanvasAgg(figure)
        _draw_axes(figure, comparison, rows)
        picture = io.BytesIO()
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        figure.savefig(picture, format=kind, dpi=150, metadata=metadata)
    return picture.getvalue()


def plottable_metrics(comparison: EvaluationComparison) -> list[PairedMetric]:
    """Those that one axis can hold: the shares, or the values of a plug-in that judges."""
    accuracies = [row for row in comparison.metrics if row.name.startswith("eval/accuracy")]
    shares = [row for row in comparison.metrics if not row.name.endswith(("_length", "_count"))]
    return accuracies if comparison.has_plugin_judge else shares


def _draw_axes(figure: Figure, comparison: EvaluationComparison, metrics: Sequence[PairedMetric]) -> None:
    from matplotlib.ticker import PercentFormatter

    ends, change = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    for place, row in enumerate(metrics):
        _draw_point(ends, row.before, place - MARKER_OFFSET, GREY)
        _draw_point(ends, row.after, place + MARKER_OFFSET, BLUE)
        _draw_point(change, row.difference, place, ORANGE)
    change.axvline(0, color=GREY, linewidth=1.0, zorder=0)
    ends.set_yticks(range(len(metrics)), [escape_label(row.name.removeprefix("eval/")) for row in metrics])
    ends.set_ylim(len(metrics) - 0.5, -0.5)
    for axes in (ends, change):
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.05)
        if not comparison.has_plugin_judge:
            axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    if not comparison.has_plugin_judge:
        ends.set_xlim(-0.02, 1.02)
    ends.set_xlabel("mean over prompts, 95 % interval")
    change.set_xlabel("after − before, prompt by prompt")
    _add_legend(figure, comparison)


def _draw_point(axes: Axes, measured: MetricEstimate, y: float, color: str) -> None:
    """A dot in its interval."""
    value, interval = measured
    if value is None:
        return
    if interval is not None:
        axes.plot(interval, (y, y), color=color, linewidth=1.6)
    axes.plot([value], [y], color=color, marker="o", markersize=5, linestyle="")


def _add_legend(figure: Figure, comparison: EvaluationComparison) -> None:
    from matplotlib.lines import Line2D

    named = {f"before: {comparison.before}": GREY, f"after: {comparison.after}": BLUE, "difference": ORANGE}
    handles = [
        Line2D([], [], color=color, marker="o", markersize=5, label=escape_label(x)) for x, color in named.items()
    ]
    figure.suptitle(f"{comparison.num_prompts} prompts. {comparison.verdict}", x=0.01, ha="left", fontsize=9)
    figure.legend(handles=handles, loc="outside lower left", ncols=1, frameon=False)
