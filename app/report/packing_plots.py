"""Packed rows as pictures: bars of characters for a terminal, bars on a matplotlib figure for a file."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from string import ascii_uppercase
from typing import TYPE_CHECKING, Literal, NamedTuple

from app.report.plots import BLUE, ORANGE
from app.report.render import STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TERMINAL_COLUMNS = 100
"""Of a terminal."""
MAX_TEXT_ROWS = 40
MAX_FIGURE_ROWS = 160
PADDING_CHARACTER = "."
BAND_GAP, ROW_HEIGHT = 0.9, 0.72
"""In rows: what lies between micro-batches, and the part of a row that its bar takes."""
PADDING_COLOR = "#dcdcdc"


class TokenSpan(NamedTuple):
    """Neighbouring tokens of a row: a prompt, or one completion behind it."""

    segment: int
    """0, 1, ... along the row."""
    is_prompt: bool
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PlottedRow:
    micro_batch: int
    """From 1."""
    device: int
    num_tokens: int
    """Padding included."""
    spans: tuple[TokenSpan, ...]

    @property
    def fill(self) -> float:
        return sum(piece.num_tokens for piece in self.spans) / self.num_tokens

    @property
    def num_samples(self) -> int:
        return sum(not piece.is_prompt for piece in self.spans)

    def spans_with_starts(self) -> Iterator[tuple[int, TokenSpan]]:
        """Each piece with the token of the row that it begins at."""
        first = 0
        for piece in self.spans:
            yield first, piece
            first += piece.num_tokens


def format_rows(rows: Sequence[PlottedRow]) -> str:
    """A line for each row, at most `COLUMNS` wide, all bars in one scale. Ends with how many rows are left out."""
    shown = rows[:MAX_TEXT_ROWS]
    scale = -(-max(row.num_tokens for row in shown) // _bar_width(shown))
    each = "1 token" if scale == 1 else f"{scale} tokens"
    lines = [
        f"a character is {each}: AAAaaa a prompt and its completions, BBBbbb the next, {PADDING_CHARACTER * 3} padding"
    ]
    for number, of_micro_batch in groupby(shown, key=lambda row: row.micro_batch):
        lines.append(f"micro-batch {number}")
        lines += [f"{_device_label(row)}{_bar(row, scale)}{_fill_label(row)}" for row in of_micro_batch]
    if len(shown) < len(rows):
        lines.append(f"{len(rows) - len(shown)} more rows, up to micro-batch {rows[-1].micro_batch}, are not shown")
    return "\n".join(lines)


def _bar_width(rows: Sequence[PlottedRow]) -> int:
    return TERMINAL_COLUMNS - max(len(_device_label(row)) + len(_fill_label(row)) for row in rows)


def _device_label(row: PlottedRow) -> str:
    return f"  device {row.device}  "


def _fill_label(row: PlottedRow) -> str:
    return f"  {row.fill:6.1%} {row.num_samples:>4} sample{'' if row.num_samples == 1 else 's'}"


def _bar(row: PlottedRow, scale: int) -> str:
    """A character says what stands at the middle of its tokens."""
    letters = [PADDING_CHARACTER] * -(-row.num_tokens // scale)
    for first, piece in row.spans_with_starts():
        letter = ascii_uppercase[piece.segment % len(ascii_uppercase)]
        for i in range(_first_middle(first, scale), _first_middle(first + piece.num_tokens, scale)):
            letters[i] = letter if piece.is_prompt else letter.lower()
    return "".join(letters)


def _first_middle(token: int, scale: int) -> int:
    """The first character whose middle is at `token` or behind it."""
    return -(-(token - scale // 2) // scale)


def render_rows(rows: Sequence[PlottedRow], *, title: str, kind: Literal["png", "svg"]) -> bytes:
    """The rows as bars over tokens, micro-batch by micro-batch; the same bytes for the same rows."""
    # As in `app.report.render`: loading takes most of a second, and pyplot would choose a window system.
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = rows[:MAX_FIGURE_ROWS]
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE | {"svg.hashsalt": "rows", "svg.fonttype": "path"})
        num_bands = len({row.micro_batch for row in shown})
        figure = Figure(figsize=(9.0, 1.5 + 0.17 * (len(shown) + BAND_GAP * num_bands)))
        FigureCanvasAgg(figure)
        _draw(figure, shown, title, num_left_out=len(rows) - len(shown))
        picture = io.BytesIO()
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        figure.savefig(picture, format=kind, dpi=150, metadata=metadata)
    return picture.getvalue()


def _draw(figure: Figure, rows: Sequence[PlottedRow], title: str, *, num_left_out: int) -> None:
    from matplotlib.patches import Patch

    axes = figure.add_subplot()
    top, ticks, labels = 0.0, [], []
    for number, of_micro_batch in groupby(rows, key=lambda row: row.micro_batch):
        band = list(of_micro_batch)
        for i, row in enumerate(band):
            _draw_row(axes, row, top + i)
            if i == 0 or row.device != band[i - 1].device:
                ticks.append(top + i + ROW_HEIGHT / 2)
                labels.append(f"micro-batch {number}, device {row.device}" if i == 0 else f"device {row.device}")
        top += len(band) + BAND_GAP
    axes.set_yticks(ticks, labels)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set_axisbelow(True)
    longest = max(row.num_tokens for row in rows)
    axes.set_xlim(0, longest)
    axes.set_xticks(range(0, longest + 1, max(1, longest // 8)))
    axes.set_ylim(top - BAND_GAP, -0.3)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:,.0f}")
    axes.set_xlabel(f"tokens of a row ({num_left_out} more rows are not shown)" if num_left_out else "tokens of a row")
    colors = {"prompt": BLUE, "completion": ORANGE, "padding": PADDING_COLOR}
    patches = [Patch(facecolor=color, label=label) for label, color in colors.items()]
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
    figure.legend(handles=patches, loc="outside lower right", ncols=3, frameon=False)


def _draw_row(axes: Axes, row: PlottedRow, top: float) -> None:
    band = (top, ROW_HEIGHT)
    axes.broken_barh([(0, row.num_tokens)], band, facecolors=PADDING_COLOR, linewidth=0)
    spans = [(first, piece.num_tokens) for first, piece in row.spans_with_starts()]
    colors = [BLUE if piece.is_prompt else ORANGE for piece in row.spans]
    axes.broken_barh(spans, band, facecolors=colors, edgecolor="white", linewidth=0.4)
    axes.annotate(f"{row.fill:.0%}", (1, top + ROW_HEIGHT / 2), xytext=(4, 0), **_RIGHT_OF_AXES)


_RIGHT_OF_AXES = {
    "xycoords": ("axes fraction", "data"),
    "textcoords": "offset points",
    "va": "center",
    "fontsize": 7,
    "annotation_clip": False,
}
