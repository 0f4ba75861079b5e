"""Draws the plots of a run on matplotlib figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from app.records.text_format import format_percent
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
"""Maximum number of points per line. Longer runs are binned, with the extremes of each bin shaded."""
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

    @property
    def bin_size(self) -> int:
        """Number of steps averaged into one point."""
        return -(-len(training_steps(self.history)) // MAX_POINTS)


DrawFunction = Callable[["Figure", PlotData], None]


def _axes(figure: Figure, data: PlotData, unit: str) -> Axes:
    axes = figure.add_subplot()
    _label(axes, data, unit)
    return axes


def _label(axes: Axes, data: PlotData, unit: str) -> None:
    from matplotlib.ticker import MaxNLocator

    size = data.bin_size
    axes.set_xlabel("step" if size == 1 else f"step (a point is the mean of {size}, extremes shaded)")
    axes.set_ylabel(unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.margins(x=0.02)


def _format_as_percent(axes: Axes) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))


def _line(axes: Axes, data: PlotData, series: Series, label: str, **style: Any) -> None:
    """Draws one metric; a single point becomes a dot."""
    bins = series.binned(data.bin_size)
    marker = "o" if len(bins.steps) == 1 else style.pop("marker", "")
    axes.plot(bins.steps, bins.means, label=label, marker=marker, markersize=4, **style)
    if data.bin_size > 1:
        axes.fill_between(bins.steps, bins.lows, bins.highs, color=style.get("color"), alpha=0.2, linewidth=0)


def _noisy_line(axes: Axes, data: PlotData, series: Series, label: str, *, color: str) -> None:
    """Draws one metric as a thin line, and its trailing mean as a thick one."""
    if len(series) < MIN_POINTS_TO_SMOOTH:
        _line(axes, data, series, label, color=color)
        return
    width = max(5, len(series) // 20)
    _line(axes, data, series, f"{label}, each step", color=color, linewidth=0.8, alpha=0.55)
    smooth = Series(series.steps, series.trailing_mean(width)).binned(data.bin_size)
    axes.plot(smooth.steps, smooth.means, color=color, linewidth=2, label=f"mean of the last {width} steps")


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
    means, deviations = (data.series(f"reward/{part}").binned(data.bin_size) for part in ("mean", "std"))
    if len(means.steps) == len(deviations.steps):
        low, high = means.means - deviations.means, means.means + deviations.means
        axes.fill_between(means.steps, low, high, color=BLUE, alpha=0.13, linewidth=0, label="± std of the samples")
    _noisy_line(axes, data, data.series("reward/mean"), "mean", color=BLUE)
    functions = matching_metric_names(data.history, "reward/", "/mean")
    for i, name in enumerate(functions if len(functions) > 1 else []):
        color, style = (ORANGE, GREEN, PURPLE, SKY, RED)[i % 5], ("--", ":", "-.")[i % 3]
        label = escape_label(name.removeprefix("reward/").removesuffix("/mean"))
        _line(axes, data, data.series(name), label, color=color, linestyle=style)
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
    axes.plot(series.steps, series.values, color=BLUE, marker="o", markersize=4, label="accuracy", linewidth=2)
    for i, name in enumerate(matching_metric_names(data.history, "eval/accuracy/", "")):
        part = data.series(name)
        color, style = (ORANGE, GREEN, PURPLE, SKY, RED)[i % 5], ("--", ":", "-.")[i % 3]
        label = escape_label(name.removeprefix("eval/accuracy/"))
        axes.plot(part.steps, part.values, color=color, linestyle=style, label=label)
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
    low, high = (data.series(f"completions/{end}_length").binned(data.bin_size) for end in ("min", "max"))
    if len(low.steps) == len(high.steps):
        upper.fill_between(low.steps, low.lows, high.highs, color=BLUE, alpha=0.13, linewidth=0)
    for end, style in (("max", "--"), ("mean", "-"), ("min", ":")):
        _line(upper, data, data.series(f"completions/{end}_length"), end, color=BLUE, linestyle=style)
    upper.set_ylim(bottom=0)
    _line(lower, data, data.series("completions/truncated_fraction"), "_", color=RED)
    lower.set_ylim(-0.03, 1.03)
    _format_as_percent(lower)
    _legend(figure)


def draw_clipping(figure: Figure, data: PlotData) -> None:
    axes = _axes(figure, data, "tokens")
    low, high = (data.series(f"policy/clip_fraction_{side}") for side in ("low", "high"))
    _line(axes, data, low, "below 1 − clip_low", color=BLUE)
    _line(axes, data, high, "above 1 + clip_high", color=ORANGE, linestyle="--")
    dual = data.series("policy/clip_fraction_dual")
    if dual.values.any():  # off by default
        _line(axes, data, dual, "above dual_clip", color=GREEN, linestyle=":")
    axes.set_ylim(bottom=0)
    _format_as_percent(axes)
    _legend(figure)


def draw_times(figure: Figure, data: PlotData) -> None:
    """Draws the seconds of each phase, stacked; the legend shows each phase's share of the whole run."""
    axes = _axes(figure, data, "seconds per step")
    steps, parts = _seconds_by_phase(data)
    totals = np.sum(list(parts.values()), axis=0)
    whole = totals.sum() or 1.0
    starts = np.arange(0, len(steps), data.bin_size)
    counts = np.diff(np.append(starts, len(steps)))
    edges = np.repeat(np.append(steps[starts] - 0.5, steps[-1] + 0.5), 2)[1:-1]
    below = np.zeros(len(edges))
    for name, values in parts.items():
        above = below + np.repeat(np.add.reduceat(values, starts) / counts, 2)
        if share := values.sum() / whole:
            # Two digits also of phases that are nearly free, as advantages should be.
            label = f"{name} {format_percent(share)}" if share >= 0.01 else f"{name} {100 * share:.2g} %"
            axes.fill_between(edges, below, above, color=PHASE_COLORS[name], linewidth=0, label=label)
        below = above
    axes.set_ylim(bottom=0)
    _clip_peaks(axes, steps, totals)
    _legend(figure)


def _seconds_by_phase(data: PlotData) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns the steps and the seconds of each phase. `rest` is the step's time outside its phases."""
    records = training_steps(data.history)

    def column(name: str) -> np.ndarray:
        return np.array([finite_metric(record, f"time/{name}_s") or 0.0 for record in records])

    parts = {name: column(name) for name in PHASE_COLORS if name != "rest"}
    inside = sum(values for name, values in parts.items() if name != "eval")
    parts["rest"] = np.maximum(column("step") - inside, 0.0)
    return np.array([float(record["step"]) for record in records]), parts


def _clip_peaks(axes: Axes, steps: np.ndarray, totals: np.ndarray) -> None:
    """Limits the axis if a few steps, usually those that compile, take much longer than all others."""
    usual = np.percentile(totals, 90)
    if not totals.max() > 3 * usual > 0:
        return
    top = 1.5 * usual
    axes.set_ylim(0, top)
    beyond = np.flatnonzero(totals > top)
    text = f"step {steps[beyond[0]]:.0f}: {totals[beyond[0]]:.1f} s"
    if len(beyond) > 1:
        text = f"{len(beyond)} steps up to {totals.max():.1f} s"
    axes.text(0.99, 0.97, f"beyond the axis: {text}", transform=axes.transAxes, ha="right", va="top", fontsize=8)


def draw_lines(
    names: Mapping[str, str],
    unit: str,
    *,
    axis: Literal["numbers", "shares", "counts"] = "numbers",
    noisy: bool = False,
    scale: float = 1.0,
) -> DrawFunction:
    """Returns a function that draws metrics, divided by `scale`, on one axis.

    Args:
        names: maps each metric to its label.
        axis: whether the metrics are any numbers, between 0 and 1 and shown in percent, or integers.
        noisy: also draw the trailing mean.
    """

    def draw(figure: Figure, data: PlotData) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = _axes(figure, data, unit)
        drawn = [data.series(name) for name in names]
        for i, (series, label) in enumerate(zip(drawn, names.values(), strict=True)):
            scaled = Series(series.steps, series.values / scale)
            if noisy:
                _noisy_line(axes, data, scaled, label, color=BLUE)
            else:
                color, style = (BLUE, RED, ORANGE)[i % 3], ("-", "--", ":")[i % 3]
                _line(axes, data, scaled, label, color=color, linestyle=style)
        if axis == "counts":
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        if axis == "shares":
            axes.set_ylim(-0.03, 1.03)
            _format_as_percent(axes)
        elif min(series.values.min(initial=0) for series in drawn) >= 0:
            axes.set_ylim(bottom=0)
        if noisy or len(names) > 1:
            _legend(figure)

    return draw
