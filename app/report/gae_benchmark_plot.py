"""A GAE benchmark as a picture: for every shape, what each backend takes over the chunk size, above a copy's time."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from app.report.plots import BLUE, GREEN, GREY, ORANGE
from app.report.render import STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {"chunked": BLUE, "fused": GREEN, "serial": ORANGE}
PANEL_WIDTH, PANEL_HEIGHT, MARGIN = 4.2, 2.7, 1.1
"""Inches."""


class PlottedTiming(NamedTuple):
    """One backend on one panel."""

    backend: str
    chunk_size: int | None
    """None where the backend has no chunks."""
    median_s: float
    p90_s: float
    is_auto: bool
    """What `auto` takes here."""


@dataclass(frozen=True, slots=True)
class BenchmarkPanel:
    """One shape, with one kind of decay."""

    rows: int
    tokens: int
    decay: str
    """`scalar` or `masked`."""
    copy_s: float
    timings: tuple[PlottedTiming, ...]

    @property
    def title(self) -> str:
        decay = {"scalar": "one decay for all tokens", "masked": "masked: a decay of each token"}[self.decay]
        return f"{self.rows} rows x {self.tokens:,} tokens\n{decay}"


def render_benchmark(panels: Sequence[BenchmarkPanel], *, title: str) -> bytes:
    """The panels as a PNG, a column for each shape; the same bytes for the same numbers."""
    # As in `app.report.render`: loading takes most of a second, and pyplot would choose a window system.
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shapes = list(dict.fromkeys((panel.rows, panel.tokens) for panel in panels))
    decays = list(dict.fromkeys(panel.decay for panel in panels))
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        size = (max(6.0, PANEL_WIDTH * len(shapes)), MARGIN + PANEL_HEIGHT * len(decays))
        figure = Figure(figsize=size)
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(decays), len(shapes), squeeze=False)
        for panel in panels:
            _draw(grid[decays.index(panel.decay), shapes.index((panel.rows, panel.tokens))], panel)
        _add_legend(figure, panels, title)
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=150, metadata={"Software": None})
    return picture.getvalue()


def _draw(axes: Axes, panel: BenchmarkPanel) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    chunked = sorted((s for s in panel.timings if s.chunk_size is not None), key=lambda s: s.chunk_size or 0)
    sizes = [s.chunk_size or 0 for s in chunked]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.axhline(1e3 * panel.copy_s, color=GREY, linestyle="--", linewidth=1.2)
    for speed in panel.timings:
        if speed.chunk_size is None:
            color = COLORS[speed.backend]
            axes.axhline(1e3 * speed.median_s, color=color, linewidth=2.6 if speed.is_auto else 1.6)
            axes.axhspan(1e3 * speed.median_s, 1e3 * speed.p90_s, color=color, alpha=0.15, linewidth=0)
    medians, p90s = [1e3 * s.median_s for s in chunked], [1e3 * s.p90_s for s in chunked]
    axes.plot(sizes, medians, color=COLORS["chunked"], marker="o", markersize=4)
    axes.fill_between(sizes, medians, p90s, color=COLORS["chunked"], alpha=0.15, linewidth=0)
    taken = [s for s in chunked if s.is_auto]
    axes.plot(
        [s.chunk_size or 0 for s in taken], [1e3 * s.median_s for s in taken], linestyle="", marker="o", markersize=9,
        markerfacecolor="none", markeredgecolor=COLORS["chunked"], markeredgewidth=1.6,
    )  # fmt: skip
    times = [1e3 * panel.copy_s, *(1e3 * s.p90_s for s in panel.timings)]
    axes.set_ylim(min(times) / 1.6, max(times) * 1.6)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title(panel.title, fontsize=9, loc="left")
    axes.set_xlabel("chunk size, tokens")
    axes.set_ylabel("milliseconds")


def _add_legend(figure: Figure, panels: Sequence[BenchmarkPanel], title: str) -> None:
    from matplotlib.lines import Line2D

    drawn = {speed.backend for panel in panels for speed in panel.timings}
    handles = [
        Line2D([], [], color=color, marker="o" if backend == "chunked" else "", markersize=4, label=backend)
        for backend, color in COLORS.items()
        if backend in drawn
    ]
    handles.append(Line2D([], [], color=GREY, linestyle="--", linewidth=1.2, label="copy of the same bytes"))
    ring = {"marker": "o", "markersize": 9, "markerfacecolor": "none", "markeredgewidth": 1.6, "linestyle": ""}
    handles.append(Line2D([], [], color=BLUE, label="thick or ringed: what auto takes", **ring))
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
    in_a_line = len(handles) if figure.get_figwidth() > 2 * PANEL_WIDTH - 1 else 3
    figure.legend(handles=handles, loc="outside lower left", ncols=in_a_line, frameon=False)
