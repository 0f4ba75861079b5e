"""The plots of a run in the order of its report page, with titles and captions, drawn on matplotlib figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from app.records.text_format import format_count, format_percent
from app.report.alerts import MISMATCH_THRESHOLD
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
"""A noisy line with at least this many points also gets its trailing mean."""
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = (
    "#1f7fc4", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8a8a8a",
)  # fmt: skip
"""Colors after Okabe and Ito, distinguishable for color-blind readers; legible on white and on near-black."""
PHASE_COLORS = {
    "rollout": BLUE, "reward": ORANGE, "score": SKY, "advantage": PURPLE, "update": RED, "publish": GREY,
    "eval": GREEN, "rest": "#c8c8c8",
}  # fmt: skip


@dataclass(frozen=True)
class Panel:
    """One plot of the report."""

    name: str
    """Name of its PNG file and its anchor in the page."""
    title: str
    caption: str
    """How to read the plot: what is healthy and what to change."""
    metrics: Mapping[str, str]
    """Metrics and their labels; `env/*` matches any name. The panel is drawn if at least one has a value."""
    _: KW_ONLY
    unit: str = ""
    """Label of the axis; empty = the first metric's label."""
    draw: Callable[[Figure, History], None] | None = None
    """Function that draws the panel; None = lines of its metrics."""
    axis: Literal["numbers", "shares", "counts"] = "numbers"
    """Whether the metrics are numbers, fractions shown in percent, or integers."""
    noisy: bool = False
    """Whether the trailing mean is also drawn."""
    scale: float = 1.0
    """Number by which the values are divided."""
    needs_nonzero: bool = False
    """Whether a metric whose values are all 0 is treated as missing."""
    height: float = 2.7
    """Height of the panel in inches."""

    def has_data(self, history: History) -> bool:
        return bool(self.series(history))

    def series(self, history: History) -> dict[str, Series]:
        """Returns the series of each metric that has data, by the metric's label."""
        labels: dict[str, str] = {}
        for name, label in self.metrics.items():
            prefix, is_pattern, _ = name.partition("*")
            found = matching_metric_names(history, prefix, "") if is_pattern else [name]
            labels |= {one: escape_label(one.removeprefix(prefix)) if is_pattern else label for one in found}
        drawn = {label: Series.from_history(history, name) for name, label in labels.items()}
        return {label: one for label, one in drawn.items() if (one.values.any() if self.needs_nonzero else len(one))}


def _bin_size(history: History) -> int:
    """Returns the number of steps averaged into one point."""
    return -(-len(training_steps(history)) // MAX_POINTS)


def _points(history: History, name: str) -> Series:
    """Returns the points to draw for a metric."""
    return Series.from_history(history, name).binned(_bin_size(history))


def _axes(figure: Figure, history: History, unit: str) -> Axes:
    axes = figure.add_subplot()
    _label(axes, history, unit)
    return axes


def _label(axes: Axes, history: History, unit: str) -> None:
    from matplotlib.ticker import MaxNLocator

    size = _bin_size(history)
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


def _noisy_line(axes: Axes, history: History, series: Series, label: str) -> None:
    """Draws one metric as a thin line, and its trailing mean as a thick one."""
    if len(series) < MIN_POINTS_TO_SMOOTH:
        return _line(axes, series, label, color=BLUE)
    width = max(5, len(series) // 20)
    smooth = Series(series.steps, series.trailing_mean(width))
    _line(axes, series.binned(_bin_size(history)), f"{label}, each step", color=BLUE, linewidth=0.8, alpha=0.55)
    return _line(axes, smooth.binned(_bin_size(history)), f"mean of the last {width} steps", color=BLUE, linewidth=2)


def _lines_of_parts(axes: Axes, parts: Mapping[str, Series]) -> None:
    """Draws the parts of a metric with their labels."""
    for i, (label, points) in enumerate(parts.items()):
        color, style = (ORANGE, GREEN, PURPLE, SKY, RED)[i % 5], ("--", ":", "-.")[i % 3]
        _line(axes, points, escape_label(label), color=color, linestyle=style)


def _legend(figure: Figure) -> None:
    """Adds the legend above the plot, so that it covers no data."""
    handles, labels = [], []
    for axes in figure.axes:
        more_handles, more_labels = axes.get_legend_handles_labels()
        handles, labels = handles + more_handles, labels + more_labels
    if labels:
        figure.legend(handles, labels, loc="outside upper left", ncols=3, frameon=False)


def escape_label(name: str) -> str:
    """Escapes a name, so that matplotlib neither typesets it as math nor hides it."""
    text = name.encode("ascii", "replace").decode("ascii").replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def draw_reward(figure: Figure, history: History) -> None:
    axes = _axes(figure, history, "reward")
    means, deviations = _points(history, "reward/mean"), _points(history, "reward/std")
    if len(means) == len(deviations):
        low, high = means.values - deviations.values, means.values + deviations.values
        axes.fill_between(means.steps, low, high, color=BLUE, alpha=0.13, linewidth=0, label="± std of the samples")
    _noisy_line(axes, history, Series.from_history(history, "reward/mean"), "mean")
    functions = matching_metric_names(history, "reward/", "/mean")
    parts = {name.removeprefix("reward/").removesuffix("/mean"): _points(history, name) for name in functions}
    _lines_of_parts(axes, parts if len(parts) > 1 else {})
    _legend(figure)


def draw_accuracy(figure: Figure, history: History) -> None:
    by_plug_in = accuracy_is_plug_in_mean(history)
    axes = _axes(figure, history, "mean value of the grader" if by_plug_in else "right answers")
    series = Series.from_history(history, "eval/accuracy")
    if not by_plug_in:
        counts = Series.from_history(history, EVAL_PROMPTS)
        _draw_intervals(axes, series, dict(zip(counts.steps, counts.values, strict=True)))
        axes.set_ylim(-0.03, 1.03)
        _format_as_percent(axes)
    _line(axes, series, "accuracy", color=BLUE, marker="o", linewidth=2)
    levels = matching_metric_names(history, "eval/accuracy/", "")
    _lines_of_parts(axes, {name.removeprefix("eval/accuracy/"): Series.from_history(history, name) for name in levels})
    _legend(figure)


def _draw_intervals(axes: Axes, shares: Series, num_prompts: Mapping[float, float]) -> None:
    """Draws the intervals of fractions of right answers at steps with a known number of prompts."""
    known = [i for i, step in enumerate(shares.steps) if num_prompts.get(step, 0) > 0 and 0 <= shares.values[i] <= 1]
    if not known:
        return
    counts = [num_prompts[step] for step in shares.steps[known]]
    bounds = np.array([wilson_interval(share, n) for share, n in zip(shares.values[known], counts, strict=True)]).T
    reach = np.abs(bounds - shares.values[known])
    number = " to ".join(f"{count:.0f}" for count in sorted({min(counts), max(counts)}))
    label = f"95 % interval ({number} prompts)"
    axes.errorbar(shares.steps[known], shares.values[known], reach, fmt="none", ecolor=BLUE, capsize=3, label=label)


def draw_lengths(figure: Figure, history: History) -> None:
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    _label(lower, history, "truncated")
    upper.set_ylabel("tokens")
    for end, style in (("max", "--"), ("mean", "-"), ("min", ":")):
        _line(upper, _points(history, f"completions/{end}_length"), end, color=BLUE, linestyle=style)
    upper.set_ylim(bottom=0)
    _line(lower, _points(history, "completions/truncated_fraction"), "_", color=RED)
    lower.set_ylim(-0.03, 1.03)
    _format_as_percent(lower)
    _legend(figure)


def draw_times(figure: Figure, history: History) -> None:
    """Draws the seconds of each phase, stacked; the legend shows each phase's share of the whole run."""
    axes = _axes(figure, history, "seconds per step")
    parts = _seconds_by_phase(history)
    whole = sum(part.values.sum() for part in parts.values()) or 1.0
    below: np.ndarray | float = 0.0
    for name, part in parts.items():
        points = part.binned(_bin_size(history))
        edges = np.append(points.steps - _bin_size(history) / 2, points.steps[-1] + _bin_size(history) / 2)
        above = below + np.repeat(points.values, 2)
        if share := part.values.sum() / whole:
            # Two digits also for very short phases, as advantages should be.
            label = f"{name} {format_percent(share)}" if share >= 0.01 else f"{name} {100 * share:.2g} %"
            axes.fill_between(
                np.repeat(edges, 2)[1:-1], below, above, color=PHASE_COLORS[name], linewidth=0, label=label
            )
        below = above
    axes.set_ylim(bottom=0)
    _clip_peaks(axes, np.sum([part.values for part in parts.values()], axis=0))
    _legend(figure)


def _seconds_by_phase(history: History) -> dict[str, Series]:
    """Returns the seconds of each phase in every step. `rest` is the step's time outside its phases."""
    records = training_steps(history)
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


def draw_lines(figure: Figure, history: History, panel: Panel) -> None:
    """Draws the metrics of a panel on one axis."""
    from matplotlib.ticker import MaxNLocator

    drawn = panel.series(history)
    axes = _axes(figure, history, panel.unit or next(iter(drawn)))
    for i, (label, series) in enumerate(drawn.items()):
        scaled = Series(series.steps, series.values / panel.scale)
        if panel.noisy:
            _noisy_line(axes, history, scaled, label)
        else:
            color, style = (BLUE, RED, ORANGE, GREEN, PURPLE, SKY)[i % 6], ("-", "--", ":")[i % 3]
            _line(axes, scaled.binned(_bin_size(history)), label, color=color, linestyle=style)
    if panel.axis == "counts":
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if panel.axis == "shares":
        _format_as_percent(axes)
    if min(series.values.min(initial=0) for series in drawn.values()) >= 0:
        axes.set_ylim(0, 1.05 * axes.dataLim.y1 or None)
    if panel.unit or len(axes.lines) > 1:
        _legend(figure)


# fmt: off
PANELS = (
    Panel("reward", "Reward",
        "The reward should rise over tens of steps; single steps are noise. If it rises while accuracy does not, the "
        "policy exploits the reward function: read some samples.",
        {"reward/mean": ""}, draw=draw_reward),
    Panel("accuracy", "Held-out accuracy",
        "Share of right answers to prompts not used for training; if a plug-in or environment grades, the mean of its "
        "values. Differences within the interval may be chance: raise eval.num_prompts to narrow it.",
        {"eval/accuracy": ""}, draw=draw_accuracy),
    Panel("lengths", "Completion lengths and truncated share",
        "Top: shortest, mean and longest completion of a step. Bottom: share truncated at rollout.max_new_tokens; if "
        "it is above 10 %, raise that limit or reward short answers.",
        {"completions/mean_length": ""}, draw=draw_lengths, height=3.6),
    Panel("entropy", "Entropy",
        "Entropy of the policy. A slow fall is normal; a sudden fall to nearly 0 is a collapse: lower "
        "optimizer.learning_rate, raise algorithm.clip_high, or set algorithm.beta.",
        {"policy/entropy": "nats per token"}, noisy=True),
    Panel("zero_variance", "Groups whose rewards are all equal",
        "Share of prompts whose samples all got the same reward. Near 100 % the reward gives no learning "
        "signal: prompts are too easy or too hard, or rollout.group_size is too small.",
        {"reward/zero_variance_fraction": "groups"}, axis="shares", noisy=True),
    Panel("reward_failures", "Samples without a reward value",
        "Failures of reward functions, None values, and samples dropped by reward.on_error: drop. There should be no "
        "failures: read reward_errors in rollouts/, and run `grpo score --role reward` on a file there.",
        {"reward/error_count": "failures", "reward/abstained_count": "None values",
         "reward/dropped_count": "dropped samples"},
        unit="number per step", axis="counts", needs_nonzero=True),
    Panel("kl", "KL to the initial model or the teacher",
        "KL of the policy to the initial model. Below 0.1 is usual; if it keeps growing, raise algorithm.beta or "
        "lower optimizer.learning_rate. The KL to a teacher should fall.",
        {"policy/kl": "nats per token", "policy/teacher_kl": "nats per token, to the teacher"}, noisy=True),
    Panel("grad_norm", "Gradient norm",
        "Norm before clipping to optimizer.max_grad_norm. A steady norm is healthy; if spikes grow, lower "
        "optimizer.learning_rate.",
        {"policy/grad_norm": "norm"}, noisy=True),
    Panel("loss", "Loss",
        "The policy's loss is minus the mean advantage at ratio 1 and says little; the loss of the critic or SFT "
        "should fall.",
        {"loss": "policy", "value/loss": "critic"}, unit="loss"),
    Panel("learning_rate", "Learning rate",
        "Learning rate of each step's last update, set by optimizer.schedule.",
        {"policy/learning_rate": "policy", "value/learning_rate": "critic"}, unit="learning rate"),
    Panel("explained_variance", "Variance explained by the critic",
        "Share of the returns' variance that the critic's values explain. It starts at about 0 and should rise; if it "
        "stays there, raise critic.learning_rate or critic.warmup_steps.",
        {"value/explained_variance": "explained variance"}, noisy=True),
    Panel("turns", "Turns and tool calls",
        "Means over the samples. If failed calls do not become fewer, read the answers of the tools in rollouts.html.",
        {"episode/turns_mean": "turns", "episode/tool_calls_mean": "tool calls", "episode/tool_errors_mean": "failed"},
        unit="number per sample"),
    Panel("ends", "How episodes end",
        "Share of samples by their end: `terminated` by the environment, by a limit, or `dropped` after a failure.",
        {"episode/end/*": ""}, unit="samples", axis="shares", needs_nonzero=True),
    Panel("environment", "Numbers that the environment reports",
        "Means of the numbers and scores that the environment reports.",
        {"env/*": "", "env/score/*": ""}, unit="mean"),
    Panel("clip_fractions", "Clipped tokens",
        "Share of tokens whose gradient is limited because their ratio left the clip range or reached "
        "algorithm.dual_clip. If it is above 20 %, lower optimizer.learning_rate or algorithm.epochs.",
        {"policy/clip_fraction_low": "below 1 − clip_low", "policy/clip_fraction_high": "above 1 + clip_high",
         "policy/clip_fraction_dual": "above dual_clip"},
        unit="tokens", axis="shares", needs_nonzero=True),
    Panel("sampler_mismatch", "Difference between sampler and trainer",
        "Mean difference between their logprobs of the same tokens, in nats: about 1e-7 in float32 and below "
        f"{MISMATCH_THRESHOLD:g} in bfloat16; if it is larger, updates are off-policy. With rollout.max_staleness, "
        "rollout.weights or rollout.kv_cache a difference is expected.",
        {"rollout/sampler_scorer_logprob_diff_mean": "nats per token"}),
    Panel("times", "Where the time goes",
        "Seconds of each phase, stacked, with shares of the whole run. `rest` is the saving of samples and metrics.",
        {"time/step_s": ""}, draw=draw_times, needs_nonzero=True),
    Panel("tokens_per_s", "Speed",
        "Completion tokens per second of the whole step. Steps that compile programs are slow: see below.",
        {"perf/tokens_per_s": "tokens per second"}, noisy=True),
    Panel("idle_slots", "Idle slots and the tail of rollouts",
        "Share of the slots' time without decoding, of the makespan after 90 % of the samples were finished, and of "
        "prompts that P-DSR classified as heavy. If slots are idle, use fewer, or another rollout.scheduler.",
        {"perf/rollout/bubble": "idle", "perf/rollout/tail_fraction": "tail", "perf/rollout/heavy_share": "heavy"},
        unit="share", axis="shares"),
    Panel("makespan", "Makespan and the last verdict",
        "Seconds from the first submission to the last token, and to the last verdict of P-DSR, which should be early.",
        {"perf/rollout/makespan_s": "makespan", "perf/rollout/last_verdict_s": "last verdict"}, unit="seconds"),
    Panel("threshold", "Threshold of P-DSR",
        "Length above which prompts are heavy. It follows the lengths of samples.",
        {"perf/rollout/threshold": "rollout.pdsr.unit"}),
    Panel("moved_samples", "Samples that changed their kind of worker",
        "Admissions of heavy samples on fast workers and of fast ones on heavy workers, and samples that reached the "
        "limit of a fast worker. If many do, raise rollout.pdsr.fast_limit_tokens.",
        {"perf/rollout/stolen_by_fast": "heavy on fast", "perf/rollout/stolen_by_heavy": "fast on heavy",
         "perf/rollout/breaker_trips": "moved at the limit", "perf/rollout/truncated": "cut off there"},
        unit="samples", axis="counts", needs_nonzero=True),
    Panel("memory", "Peak memory so far",
        "Memory of the device that uses most; on a CPU, of the whole process. To reduce it, lower "
        "algorithm.max_tokens_per_device or set model.remat: block.",
        {"perf/peak_memory_bytes": "GiB"}, scale=2**30),
    Panel("compilations", "Compilations",
        "XLA programs compiled in each step. There should be none after the first steps; later ones are caused by new "
        "sequence lengths.",
        {"perf/compilations": "programs"}, axis="counts", needs_nonzero=True),
)
# fmt: on
