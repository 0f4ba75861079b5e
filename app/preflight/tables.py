"""Plain-text tables of the reports, laid out by rich."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

UNLIMITED_WIDTH = 1000
"""Columns of a table whose lines never wrap."""


def format_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, right_from: int = 1, width: int = UNLIMITED_WIDTH
) -> list[str]:
    """Returns the lines of a table without borders.

    Args:
        head: titles of the columns.
        right_from: the first column that is aligned to the right, as are all after it.
        width: characters of a line; the text of the last column wraps.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for number, title in enumerate(head):
        wraps = number == len(head) - 1 and width < UNLIMITED_WIDTH
        table.add_column(title, justify="right" if number >= right_from else "left", no_wrap=not wraps, overflow="fold")
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=width, color_system=None, markup=False, emoji=False, highlight=False).print(table)
    return [line.rstrip() for line in text.getvalue().splitlines()]


def format_mebibytes(num_bytes: int | None) -> str:
    """Returns a size in MiB for a cell of a table; `-` for nothing."""
    return f"{num_bytes / 2**20:,.1f}" if num_bytes else "-"


def format_size(num_bytes: float) -> str:
    """Returns a size with the unit that suits it, MiB or GiB."""
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"
