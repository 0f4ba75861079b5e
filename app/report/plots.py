"""Draws the plots of a run on matplotlib figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from app.records.text_format import format_count, format_percent
from app.report.confidence_intervals import wilson_interval
from app.report.metrics_history import (
    EVAL_PROMPTS,
    History,
    Series,
    accuracy_is_plug_in_mean,
    finite_metric,
    matching_metric_names,
    training_steps,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_POINTS = 500
"""Maximum number of points per line; the steps of longer runs are averaged."""
MIN_POINTS_TO_SMOOTH = 20
"""Minimum number of points for drawing the trailing mean of a noisy line as well."""
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = (
    "#1f7fc4", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8a8a8a",
)  # fmt: skip
"""Colors after Okabe and Ito, distinguishable for color-blind readers; legible on white and on near-black."""
PHASE_COLORS = {
    "rollout": BLUE, "reward": ORANGE, "score": SKY, "advantage": PURPLE, "update": RED, "publish": GREY,
    "eval": GREEN, "rest": "#c8c8c8",
}  # fmt: skip


@dataclass(frozen=True)
class PlotData:
    """The data for all plots."""

    history: History

    def series(self, name: str) -> Series:
        return Series.from_history(self.history, name)

    def points(self, name: str) -> Series:
        """Returns the points that are drawn of a metric."""
        return self.series(name).binned(self.bin_size)

    @property
    def bin_size(self) -> int:
        """Number of steps averaged into one point."""
        return -(-len(training_steps(self.history)) // MAX_POINTS)


@dataclass(frozen=True)
class Plot:
    """What a panel draws."""

    metrics: tuple[str, ...]
    """It is drawn if one of them has a value."""
    draw: Callable[[Figure, PlotData], None]
    needs_nonzero: bool = False
    """Whether values that are all 0 count as none."""

    def has_data(self, data: PlotData) -> bool:
        found = [data.series(name).values for name in self.metrics]
        return any(values.any() if self.needs_nonzero else len(values) for values in found)


def _axes(figure: Figure, data: PlotData, unit: str) -> Axes:
    axes = figure.add_subplot()
    _label(axes, data, unit)
    return axes


def _label(axes: Axes, data: PlotData, unit: str) -> None:
    from matplotlib.ticker import MaxNLocator

    size = data.bin_size
    axes.set_xlabel("step" if size == 1 else f"step (a point is the mean of {size})")
    axes.set_ylabel(unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.margins(x=0.02)


def _format_as_percent(axes: Axes) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))


def _line(axes: Axes, points: Series, label: str, *, marker: str = "", **style: Any) -> None:
    """Draws one metric; a single point becomes a dot."""
    marker = "o" if len(points) == 1 else marker
    axes.plot(points.steps, points.values, label=label, marker=marker, markersize=4, **style)


def _noisy_line(axes: Axes, data: PlotData, series: Series, label: str) -> None:
    """Draws one metric as a thin line, and its trailing mean as a thick one."""
    if len(series) < MIN_POINTS_TO_SMOOTH:
        return _line(axes, series, label, color=BLUE)
    width = max(5, len(series) // 20)
    smooth = Series(series.steps, series.trailing_mean(width))
    _line(axes, series.binned(data.bin_size), f"{label}, each step", color=BLUE, linewidth=0.8, alpha=0.55)
    return _line(axes, smooth.binned(data.bin_size), f"mean of the last {width} steps", color=BLUE, linewidth=2)


def _lines_of_parts(axes: Axes, parts: Mapping[str, Series]) -> None:
    """Draws the parts of a metric under their labels."""
    for i, (label, points) in enumerate(parts.items()):
        color, style = (ORANGE, GREEN, PURPLE, SKY, RED)[i % 5], ("--", ":", "-.")[i % 3]
        _line(axes, points, escape_label(label), color=color, linestyle=style)


def _legend(figure: Figure) -> None:
    """Adds the legend above the plot, where it covers no data."""
    handles, labels = [], []
    for axes in figure.axes:
        more_handles, more_labels = axes.get_legend_handles_labels()
        handles, labels = handles + more_handles, labels + more_labels
    if labels:
        figure.legend(handles, labels, loc="outside upper left", ncols=3, frameon=False)


def escape_label(name: str) -> str:
    """Escapes an arbitrary name, so that matplotlib neither typesets it as math nor hides it."""
    text = name.encode("ascii", "replace").decode("ascii").replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def draw_reward(figure: Figure, data: PlotData) -> None:
    axes = _axes(figure, data, "reward")
    means, deviations = data.points("reward/mean"), data.points("reward/std")
    if len(means) == len(deviations):
        low, high = means.values - deviations.values, means.values + deviations.values
        axes.fill_between(means.steps, low, high, color=BLUE, alpha=0.13, linewidth=0, label="± std of the samples")
    _noisy_line(axes, data, data.series("reward/mean"), "mean")
    functions = matching_metric_names(data.history, "reward/", "/mean")
    parts = {name.removeprefix("reward/").removesuffix("/mean"): data.points(name) for name in functions}
    _lines_of_parts(axes, parts if len(parts) > 1 else {})
    _legend(figure)


def draw_accuracy(figure: Figure, data: PlotData) -> None:
    by_plug_in = accuracy_is_plug_in_mean(data.history)
    axes = _axes(figure, data, "mean value of the plug-in" if by_plug_in else "right answers")
    series = data.series("eval/accuracy")
    if not by_plug_in:
        counts = data.series(EVAL_PROMPTS)
        _draw_intervals(axes, series, dict(zip(counts.steps, counts.values, strict=True)))
        axes.set_ylim(-0.03, 1.03)
        _format_as_percent(axes)
    _line(axes, series, "accuracy", color=BLUE, marker="o", linewidth=2)
    levels = matching_metric_names(data.history, "eval/accuracy/", "")
    _lines_of_parts(axes, {name.removeprefix("eval/accuracy/"): data.series(name) for name in levels})
    _legend(figure)


def _draw_intervals(axes: Axes, shares: Series, num_prompts: Mapping[float, float]) -> None:
    """Draws the intervals of shares of right answers at the steps whose number of prompts is known."""
    known = [i for i, step in enumerate(shares.steps) if num_prompts.get(step, 0) > 0 and 0 <= shares.values[i] <= 1]
    if not known:
        return
    counts = [num_prompts[step] for step in shares.steps[known]]
    bounds = np.array([wilson_interval(share, n) for share, n in zip(shares.values[known], counts, strict=True)]).T
    reach = np.abs(bounds - shares.values[known])
    number = " to ".join(f"{count:.0f}" for count in sorted({min(counts), max(counts)}))
    label = f"95 % interval ({number} prompts)"
    axes.errorbar(shares.steps[known], shares.values[known], reach, fmt="none", ecolor=BLUE, capsize=3, label=label)


def draw_lengths(figure: Figure, data: PlotData) -> None:
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    _label(lower, data, "truncated")
    upper.set_ylabel("tokens")
    for end, style in (("max", "--"), ("mean", "-"), ("min", ":")):
        _line(upper, data.points(f"completions/{end}_length"), end, color=BLUE, linestyle=style)
    upper.set_ylim(bottom=0)
    _line(lower, data.points("completions/truncated_fraction"), "_", color=RED)
    lower.set_ylim(-0.03, 1.03)
    _format_as_percent(lower)
    _legend(figure)


def draw_times(figure: Figure, data: PlotData) -> None:
    """Draws the seconds of each phase, stacked; the legend shows each phase's share of the whole run."""
    axes = _axes(figure, data, "seconds per step")
    parts = _seconds_by_phase(data)
    whole = sum(part.values.sum() for part in parts.values()) or 1.0
    below: np.ndarray | float = 0.0
    for name, part in parts.items():
        points = part.binned(data.bin_size)
        edges = np.append(points.steps - data.bin_size / 2, points.steps[-1] + data.bin_size / 2)
        above = below + np.repeat(points.values, 2)
        if share := part.values.sum() / whole:
            # Two digits also of phases that are nearly free, as advantages should be.
            label = f"{name} {format_percent(share)}" if share >= 0.01 else f"{name} {100 * share:.2g} %"
            axes.fill_between(
                np.repeat(edges, 2)[1:-1], below, above, color=PHASE_COLORS[name], linewidth=0, label=label
            )
        below = above
    axes.set_ylim(bottom=0)
    _clip_peaks(axes, np.sum([part.values for part in parts.values()], axis=0))
    _legend(figure)


def _seconds_by_phase(data: PlotData) -> dict[str, Series]:
    """Returns the seconds of each phase in every step. `rest` is the step's time outside its phases."""
    records = training_steps(data.history)
    steps = np.array([float(record["step"]) for record in records])

    def column(name: str) -> np.ndarray:
        return np.array([finite_metric(record, f"time/{name}_s") or 0.0 for record in records])

    parts = {name: column(name) for name in PHASE_COLORS if name != "rest"}
    inside = sum(values for name, values in parts.items() if name != "eval")
    parts["rest"] = np.maximum(column("step") - inside, 0.0)
    return {name: Series(steps, values) for name, values in parts.items()}


def _clip_peaks(axes: Axes, totals: np.ndarray) -> None:
    """Limits the axis if a few steps, usually those that compile, take much longer than all others."""
    usual = np.percentile(totals, 90)
    if not totals.max() > 3 * usual > 0:
        return
    axes.set_ylim(0, 1.5 * usual)
    text = f"beyond the axis: {format_count(int((totals > 1.5 * usual).sum()), 'step')} up to {totals.max():.1f} s"
    axes.text(0.99, 0.97, text, transform=axes.transAxes, ha="right", va="top", fontsize=8)


def lines(
    names: Mapping[str, str],
    unit: str,
    *,
    axis: Literal["numbers", "shares", "counts"] = "numbers",
    noisy: bool = False,
    scale: float = 1.0,
    needs_nonzero: bool = False,
) -> Plot:
    """Returns a plot of metrics, divided by `scale`, on one axis.

    Args:
        names: maps each metric to its label.
        axis: whether the metrics are any numbers, shares shown in percent, or integers.
        noisy: also draw the trailing mean.
    """

    def draw(figure: Figure, data: PlotData) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = _axes(figure, data, unit)
        drawn = [data.series(name) for name in names]
        for i, (series, label) in enumerate(zip(drawn, names.values(), strict=True)):
            scaled = Series(series.steps, series.values / scale)
            if noisy:
                _noisy_line(axes, data, scaled, label)
            else:
                color, style = (BLUE, RED, ORANGE)[i % 3], ("-", "--", ":")[i % 3]
                _line(axes, scaled.binned(data.bin_size), label, color=color, linestyle=style)
        if axis == "counts":
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        if axis == "shares":
            _format_as_percent(axes)
        if min(series.values.min(initial=0) for series in drawn) >= 0:
            axes.set_ylim(bottom=0)
        if noisy or len(names) > 1:
            _legend(figure)

    return Plot(tuple(names), draw, needs_nonzero)
