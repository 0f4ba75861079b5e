"""Two evaluations of the same prompts, side by side: as a table for people, and as a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from app.records.atomic_write import write_whole
from app.records.jsonl import check_output
from app.report.before_after import figure_text
from app.report.confidence_intervals import Interval, Measured
from app.report.plots import BLUE, GREY, ORANGE, as_label
from app.report.render import STYLE
from settings.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = (".png", ".svg")
ROW_HEIGHT, MARGIN, WIDTH = 0.42, 1.5, 9.0
"""Inches."""
APART = 0.16
"""Of a row: what lies between before and after."""
SMALLEST_P = 1e-6


@dataclass(frozen=True, slots=True)
class PairedRow:
    name: str
    """Of the metric."""
    before: Measured
    after: Measured
    difference: Measured
    """After - before, over the prompts that both know it of."""


@dataclass(frozen=True, slots=True)
class Comparison:
    before: str
    after: str
    """What was evaluated."""
    num_prompts: int
    judge: str
    by_plug_in: bool
    """The judge's values need not be shares."""
    rows: Sequence[PairedRow]
    num_better: int
    num_worse: int
    num_alike: int
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
                for row in self.rows
            },
            "better": self.num_better,
            "worse": self.num_worse,
            "alike": self.num_alike,
            "test": self.test,
            "p": self.p_value,
            "notes": [*self.notes],
        }

    @property
    def verdict(self) -> str:
        """What the test says."""
        p = f"p < {SMALLEST_P:g}" if self.p_value < SMALLEST_P else f"p = {self.p_value:.2g}"
        return f"{self.num_better} prompts better, {self.num_worse} worse, {self.num_alike} alike: {p} ({self.test})"

    def to_text(self) -> str:
        lines = [
            f"before  {self.before}",
            f"after   {self.after}",
            f"{self.num_prompts} prompts, judged by {self.judge}; 95 % intervals in brackets",
            "",
            f"{'':<24}{'before':>24}{'after':>24}{'difference':>28}",
        ]
        for row in self.rows:
            ends = [self._cell(row.name, measured) for measured in (row.before, row.after)]
            change = self._difference(row)
            lines.append(f"{row.name.removeprefix('eval/'):<24}{ends[0]:>24}{ends[1]:>24}{change:>28}")
        return "\n".join([*lines, "", self.verdict, *(f"note: {note}" for note in self.notes)])

    def _cell(self, name: str, measured: Measured) -> str:
        value = figure_text(name, measured.value, by_plug_in=self.by_plug_in)
        interval = interval_text(name, measured.interval, by_plug_in=self.by_plug_in)
        return f"{value} [{interval}]" if interval else value

    def _difference(self, row: PairedRow) -> str:
        """With its sign; of shares in percentage points."""
        value, interval = row.difference
        if value is None:
            return "–"
        scale, unit = (100.0, " pp") if figure_text(row.name, 0.0, by_plug_in=self.by_plug_in)[-1] == "%" else (1.0, "")
        places = "+.0f" if row.name.endswith("_count") else "+.1f" if unit or not self.by_plug_in else "+.3g"
        reach = "" if interval is None else " [" + ", ".join(f"{scale * end:{places}}" for end in interval) + "]"
        return f"{scale * value:{places}}{unit}{reach}"


def is_told(name: str, measured: Measured) -> bool:
    """Whether it is worth a row: failures only where there were any."""
    return measured.value is not None and (not name.endswith("_count") or measured.value > 0)


def interval_text(name: str, interval: Interval | None, *, by_plug_in: bool) -> str:
    """Low to high; nothing where there is none."""
    return "" if interval is None else " – ".join(figure_text(name, end, by_plug_in=by_plug_in) for end in interval)


def check_picture(path: Path) -> None:
    """Raises InputError where no picture can be written."""
    if path.suffix.lower() not in KINDS:
        raise InputError(f"--picture: expected a name that ends in .png or .svg, got {path}")
    check_output(path)


def write_picture(path: Path, comparison: Comparison) -> None:
    write_whole(path, paired_picture(comparison, kind="svg" if path.suffix.lower() == ".svg" else "png"))


def paired_picture(comparison: Comparison, *, kind: Literal["png", "svg"]) -> bytes:
    """Before and after with their intervals, and what lies between; the same bytes for the same comparison."""
    # As in `app.report.render`: loading takes most of a second, and pyplot would choose a window system.
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = drawn_rows(comparison)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE | {"svg.hashsalt": "paired", "svg.fonttype": "path"})
        figure = Figure(figsize=(WIDTH, MARGIN + ROW_HEIGHT * max(len(rows), 2)))
        FigureCanvasAgg(figure)
        _draw(figure, comparison, rows)
        picture = io.BytesIO()
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        figure.savefig(picture, format=kind, dpi=150, metadata=metadata)
    return picture.getvalue()


def drawn_rows(comparison: Comparison) -> list[PairedRow]:
    """Those that one axis can hold: the shares, or the values of a plug-in that judges."""
    accuracies = [row for row in comparison.rows if row.name.startswith("eval/accuracy")]
    shares = [row for row in comparison.rows if not row.name.endswith(("_length", "_count"))]
    return accuracies if comparison.by_plug_in else shares


def _draw(figure: Figure, comparison: Comparison, rows: Sequence[PairedRow]) -> None:
    from matplotlib.ticker import PercentFormatter

    ends, change = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    for place, row in enumerate(rows):
        _point(ends, row.before, place - APART, GREY)
        _point(ends, row.after, place + APART, BLUE)
        _point(change, row.difference, place, ORANGE)
    change.axvline(0, color=GREY, linewidth=1.0, zorder=0)
    ends.set_yticks(range(len(rows)), [as_label(row.name.removeprefix("eval/")) for row in rows])
    ends.set_ylim(len(rows) - 0.5, -0.5)
    for axes in (ends, change):
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.05)
        if not comparison.by_plug_in:
            axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    if not comparison.by_plug_in:
        ends.set_xlim(-0.02, 1.02)
    ends.set_xlabel("mean over prompts, 95 % interval")
    change.set_xlabel("after − before, prompt by prompt")
    _explain(figure, comparison)


def _point(axes: Axes, measured: Measured, place: float, color: str) -> None:
    """A dot in its interval."""
    value, interval = measured
    if value is None:
        return
    if interval is not None:
        axes.plot(interval, (place, place), color=color, linewidth=1.6)
    axes.plot([value], [place], color=color, marker="o", markersize=5, linestyle="")


def _explain(figure: Figure, comparison: Comparison) -> None:
    from matplotlib.lines import Line2D

    named = {f"before: {comparison.before}": GREY, f"after: {comparison.after}": BLUE, "difference": ORANGE}
    handles = [Line2D([], [], color=color, marker="o", markersize=5, label=as_label(x)) for x, color in named.items()]
    figure.suptitle(f"{comparison.num_prompts} prompts. {comparison.verdict}", x=0.01, ha="left", fontsize=9)
    figure.legend(handles=handles, loc="outside lower left", ncols=1, frameon=False)
