"""Two evaluations of the same prompts, side by side: as a table and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from app.records.atomic_write import write_atomic
from app.records.text_format import format_interval, format_table
from app.report.before_after import format_metric
from app.report.confidence_intervals import MetricEstimate
from app.report.matplotlib_figures import new_figure, save_figure
from app.report.plots import BLUE, GREY, ORANGE, escape_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW_HEIGHT, MARGIN, WIDTH = 0.42, 1.5, 9.0
"""Sizes in inches."""
MARKER_OFFSET = 0.16
"""Distance of the markers of before and after from the middle of their row, in rows."""
MIN_SHOWN_P = 1e-6


@dataclass(frozen=True, slots=True)
class PairedMetric:
    """One metric before and after."""

    name: str
    """Name as in `metrics.jsonl`, such as `eval/accuracy`."""
    before: MetricEstimate
    after: MetricEstimate
    difference: MetricEstimate
    """Difference after - before, over the prompts that have a value in both."""


@dataclass(frozen=True, slots=True)
class EvaluationComparison:
    """The result of comparing two evaluations prompt by prompt."""

    before: str
    after: str
    """Label of the evaluated model."""
    num_prompts: int
    judge: str
    has_plugin_judge: bool
    """Whether the judge is a plug-in, whose values need not be shares."""
    metrics: Sequence[PairedMetric]
    num_better: int
    num_worse: int
    num_equal: int
    """Prompts with higher, lower and equal accuracy; a prompt without a value on either side is not counted."""
    test: str
    p_value: float
    notes: Sequence[str]
    """Other differences between the two evaluations."""

    def to_dict(self) -> dict[str, Any]:
        metrics = {
            row.name: {end: getattr(row, end)._asdict() for end in ("before", "after", "difference")}
            for row in self.metrics
        }
        return {
            "before": self.before,
            "after": self.after,
            "prompts": self.num_prompts,
            "judge": self.judge,
            "metrics": metrics,
            "better": self.num_better,
            "worse": self.num_worse,
            "alike": self.num_equal,
            "test": self.test,
            "p": self.p_value,
            "notes": [*self.notes],
        }

    @property
    def verdict(self) -> str:
        """The counts of changed prompts and the p-value."""
        p = f"p < {MIN_SHOWN_P:g}" if self.p_value < MIN_SHOWN_P else f"p = {self.p_value:.2g}"
        return f"{self.num_better} prompts better, {self.num_worse} worse, {self.num_equal} equal: {p} ({self.test})"

    def to_text(self) -> str:
        rows = [
            (
                row.name.removeprefix("eval/"),
                *(" ".join(format_estimate(row.name, end, self.has_plugin_judge)) for end in (row.before, row.after)),
                self._format_difference(row.name, row.difference),
            )
            for row in self.metrics
        ]
        lines = [
            f"before  {self.before}",
            f"after   {self.after}",
            f"{self.num_prompts} prompts, judged by {self.judge}; 95 % intervals in brackets",
            "",
            format_table(rows, header=("", "before", "after", "difference")),
            "",
            self.verdict,
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _format_difference(self, name: str, difference: MetricEstimate) -> str:
        """Formats a difference with its sign; differences of shares are in percentage points."""
        if difference.value is None:
            return "–"

        def signed(change: float) -> str:
            text = format_metric(name, change, by_plug_in=self.has_plugin_judge)
            return "+" * (not text.startswith("-")) + text.removesuffix(" %")

        unit = " pp" if format_metric(name, 0.0, by_plug_in=self.has_plugin_judge).endswith("%") else ""
        return f"{signed(difference.value)}{unit} {format_interval(difference.interval, signed)}".rstrip()


def format_estimate(name: str, estimate: MetricEstimate, has_plugin_judge: bool) -> tuple[str, str]:
    """Returns a metric's value and its interval as text; the interval is empty if there is none."""

    def format_value(value: float | None) -> str:
        return format_metric(name, value, by_plug_in=has_plugin_judge)

    return format_value(estimate.value), format_interval(estimate.interval, format_value)


def is_shown(name: str, measured: MetricEstimate) -> bool:
    """Returns whether a metric gets a row: it must have a value, and counts of errors must not be 0."""
    return measured.value is not None and (not name.endswith("_count") or measured.value > 0)


def write_plot(path: Path, comparison: EvaluationComparison) -> None:
    """Plots before and after with their intervals, and the differences; equal comparisons produce equal bytes."""
    metrics = plottable_metrics(comparison)
    with new_figure(WIDTH, MARGIN + ROW_HEIGHT * max(len(metrics), 2)) as figure:
        _draw_axes(figure, comparison, metrics)
        write_atomic(path, save_figure(figure, "png"))


def plottable_metrics(comparison: EvaluationComparison) -> list[PairedMetric]:
    """Returns the metrics that fit on one axis: shares, or the accuracies of a plug-in judge."""
    if comparison.has_plugin_judge:
        return [row for row in comparison.metrics if row.name.startswith("eval/accuracy")]
    return [row for row in comparison.metrics if not row.name.endswith(("_length", "_count"))]


def _draw_axes(figure: Figure, comparison: EvaluationComparison, metrics: Sequence[PairedMetric]) -> None:
    from matplotlib.ticker import PercentFormatter

    values, changes = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    places = np.arange(len(metrics))
    _draw_points(values, [row.before for row in metrics], places - MARKER_OFFSET, GREY, f"before: {comparison.before}")
    _draw_points(values, [row.after for row in metrics], places + MARKER_OFFSET, BLUE, f"after: {comparison.after}")
    _draw_points(changes, [row.difference for row in metrics], places, ORANGE, "difference")
    changes.axvline(0, color=GREY, linewidth=1.0, zorder=0)
    values.set_yticks(places, [escape_label(row.name.removeprefix("eval/")) for row in metrics])
    values.set_ylim(len(metrics) - 0.5, -0.5)
    for axes in (values, changes):
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.05)
        if not comparison.has_plugin_judge:
            axes.xaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    if not comparison.has_plugin_judge:
        values.set_xlim(-0.02, 1.02)
    values.set_xlabel("mean over prompts, 95 % interval")
    changes.set_xlabel("after − before, per prompt")
    figure.suptitle(f"{comparison.num_prompts} prompts. {comparison.verdict}", x=0.01, ha="left", fontsize=9)
    figure.legend(loc="outside lower left", ncols=1, frameon=False)


def _draw_points(axes: Axes, estimates: Sequence[MetricEstimate], places: np.ndarray, color: str, label: str) -> None:
    """Draws each estimate as a dot with its interval, at the given height."""
    values = np.array([np.nan if one.value is None else one.value for one in estimates])
    ends = np.array([one.interval or (value, value) for one, value in zip(estimates, values, strict=True)])
    style = {"fmt": "o", "color": color, "markersize": 5, "elinewidth": 1.6, "label": escape_label(label)}
    axes.errorbar(values, places, xerr=np.abs(ends.reshape(-1, 2).T - values), **style)
