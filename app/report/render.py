"""Panels as pictures: SVG for the page, PNG beside it."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from html import escape
from typing import Any

from app.report.panels import PANELS, Panel
from app.report.plots import PlotData

TEXT_COLOR = "#010203"
"""Of text and axes. In a page it becomes the page's own text colour, light or dark."""
POINTS_PER_INCH = 72
FIGURE_WIDTH = 5.4
"""Inches: narrow, so that letters stay readable where a phone shrinks it."""
STYLE: Any = {
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",  # comes with matplotlib, so every machine draws the same
    "font.size": 9,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.formatter.useoffset": False,
    "grid.alpha": 0.25,
    "lines.linewidth": 1.6,
    "legend.fontsize": 8,
    "svg.fonttype": "none",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), TEXT_COLOR),
}
TITLE_HEIGHT = 0.28
"""Inches above a PNG's plot. In the page the title is a heading."""


@dataclass(frozen=True, slots=True)
class RenderedPlot:
    """A panel that has data."""

    svg: str
    """One element that scales with the page."""
    png: bytes


def render_panel(panel: Panel, data: PlotData) -> RenderedPlot | None:
    """The panel drawn, the same bytes for the same data; None where there is nothing to plot."""
    if not panel.is_present(data):
        return None
    # Here, because it takes most of a second to load. No pyplot: it would keep figures and choose a window system.
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # not what this machine's matplotlibrc asks for
        matplotlib.rcParams.update(STYLE | {"svg.hashsalt": panel.name})
        figure = Figure(figsize=(FIGURE_WIDTH, TITLE_HEIGHT + panel.height))
        FigureCanvasAgg(figure)
        above, plot = figure.subfigures(2, 1, squeeze=False, height_ratios=[TITLE_HEIGHT, panel.height])[:, 0]
        panel.draw(plot, data)
        png, svg = io.BytesIO(), io.StringIO()
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
        figure.set_layout_engine("none")  # what was laid out for the SVG stays
        above.text(0.015, 0.5, panel.title, fontsize=11, fontweight="bold", va="center")
        figure.savefig(png, format="png", dpi=150, metadata={"Software": None})
    return RenderedPlot(_inline_panel(svg.getvalue(), panel), png.getvalue())


def render_panels(data: PlotData) -> dict[str, RenderedPlot | None]:
    """Every panel by name."""
    return {panel.name: render_panel(panel, data) for panel in PANELS}


def _inline_panel(svg: str, panel: Panel) -> str:
    """Without the strip on top."""
    box = f"0 {TITLE_HEIGHT * POINTS_PER_INCH:g} {FIGURE_WIDTH * POINTS_PER_INCH:g} {panel.height * POINTS_PER_INCH:g}"
    return inline_svg(svg, label=panel.title, box=box)


def inline_svg(svg: str, *, label: str, box: str) -> str:
    """An SVG file as an element of a page that shows its `box`: without prolog, metadata and the ids of its groups."""
    element = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    element = re.sub(r'(<g) id="[^"]*"', r"\1", element).replace(TEXT_COLOR, "currentColor")
    return f'<svg role="img" aria-label="{escape(label)}" viewBox="{box}">' + element[element.index(">") + 1 :]
