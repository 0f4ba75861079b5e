"""Renders panels as SVG elements for the page and as PNG files."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from app.records.jsonl import check_output_path
from app.report.metrics_history import History
from app.report.plots import Panel, draw_lines
from settings.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEXT_COLOR = "#010203"
"""Color of text and axes. In a page it is replaced with the page's text color, light or dark."""
POINTS_PER_INCH = 72
FIGURE_WIDTH = 5.4
"""Width in inches: narrow, so that letters stay readable on a phone."""
STYLE: Any = {
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",  # included in matplotlib, so that plots are the same on every machine
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
"""Height in inches of the title above a PNG's plot. In the page the title is a heading."""


class RenderedPlot(NamedTuple):
    """A rendered panel as SVG and as PNG."""

    svg: str
    """An SVG element that scales with the page."""
    png: bytes


@contextmanager
def new_figure(width: float, height: float, *, salt: str = "") -> Iterator[Figure]:
    """Yields an empty figure in the style of this program, regardless of the machine's matplotlibrc.

    Args:
        width, height: in inches.
        salt: makes the ids in an SVG reproducible, and different from ids of other plots in the same page.
    """
    # Imported here, because it takes most of a second. No pyplot: it would keep figures and choose a window system.
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE | {"svg.hashsalt": salt})
        figure = Figure(figsize=(width, height))
        FigureCanvasAgg(figure)
        yield figure


def save_figure(figure: Figure, kind: Literal["png", "svg"], *, transparent: bool = False) -> bytes:
    """Returns the content of an image file without a date, so that equal figures give equal bytes.

    Args:
        transparent: whether the background is transparent rather than white.
    """
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    file = io.BytesIO()
    figure.savefig(file, format=kind, dpi=150, metadata=metadata, transparent=transparent)
    return file.getvalue()


def check_picture_path(path: Path, option: str, suffixes: Sequence[str]) -> None:
    """Raises InputError if the path that an option names does not end in one of the suffixes, or cannot be written."""
    if path.suffix.lower() not in suffixes:
        raise InputError(f"{option}: expected a file name ending in {' or '.join(suffixes)}, got {path}")
    check_output_path(path, option)


def render_panel(panel: Panel, history: History) -> RenderedPlot | None:
    """Draws a panel; returns None if it has no data."""
    if not panel.has_data(history):
        return None
    with new_figure(FIGURE_WIDTH, TITLE_HEIGHT + panel.height, salt=panel.name) as figure:
        above, plot = figure.subfigures(2, 1, squeeze=False, height_ratios=[TITLE_HEIGHT, panel.height])[:, 0]
        if panel.draw is None:
            draw_lines(plot, history, panel)
        else:
            panel.draw(plot, history)
        svg = save_figure(figure, "svg", transparent=True).decode()
        figure.set_layout_engine("none")  # keep the layout computed for the SVG
        above.text(0.015, 0.5, panel.title, fontsize=11, fontweight="bold", va="center")
        png = save_figure(figure, "png")
    # The page shows the part below the title.
    box = f"0 {TITLE_HEIGHT * POINTS_PER_INCH:g} {FIGURE_WIDTH * POINTS_PER_INCH:g} {panel.height * POINTS_PER_INCH:g}"
    return RenderedPlot(inline_svg(svg, label=panel.title, box=box), png)


def inline_svg(svg: str, *, label: str, box: str) -> str:
    """Returns an SVG file as an inline element without prolog, metadata and group ids.

    Args:
        label: describes the picture to screen readers.
        box: the part of the picture to show, as the `viewBox` of the element.
    """
    element = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    element = re.sub(r'(<g) id="[^"]*"', r"\1", element).replace(TEXT_COLOR, "currentColor")
    return f'<svg role="img" aria-label="{escape(label)}" viewBox="{box}">' + element[element.index(">") + 1 :]
