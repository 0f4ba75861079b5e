"""Formats sizes, counts, intervals and tables for people, and escapes untrusted text for terminals."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence

TABLE_WIDTH = 1000
"""Width in characters, larger than any table, so that tables are not wrapped to the terminal."""


def to_printable(text: str) -> str:
    """Returns the text on one line, with every character that a terminal would interpret escaped as in Python.

    These are escape sequences, carriage returns, changes of text direction, and characters without a UTF-8 encoding.
    """
    return "".join(_escape_character(character) for character in text)


def to_printable_lines(text: str) -> str:
    """Escapes the text as `to_printable` does, but keeps line breaks and tabs."""
    return "\n".join("\t".join(map(to_printable, line.split("\t"))) for line in text.split("\n"))


def _escape_character(character: str) -> str:
    if character == "\n":
        return "↵ "
    # isprintable is False for control, format, surrogate and private-use characters, and for spaces other than " ".
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


def format_bytes(num_bytes: float) -> str:
    """Formats a size in bytes: in GiB from 1 GiB, in KiB below 0.1 MiB, otherwise in MiB."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:,.2f} GiB"
    return f"{num_bytes / 2**20:,.1f} MiB" if 10 * num_bytes >= 2**20 else f"{num_bytes / 2**10:,.1f} KiB"


def format_count(count: int, noun: str) -> str:
    """Formats a number of things: `1 step`, `2,000 steps`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def format_percent(share: float) -> str:
    """Formats a fraction as a percentage with one decimal: 0.256 is `25.6 %`."""
    return f"{100 * share:z.1f} %"


def format_ranges(numbers: Iterable[int]) -> str:
    """Formats integers, in ascending order and without repetitions, as ranges such as `0-3, 6`."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in ranges)


def format_interval(interval: tuple[float, float] | None, format_number: Callable[[float], str]) -> str:
    """Formats an interval as `[low, high]`; returns an empty string without one."""
    return "" if interval is None else f"[{', '.join(map(format_number, interval))}]"


def format_table(
    rows: Sequence[Sequence[str]], *, header: Sequence[str], num_left: int = 1, width: int = TABLE_WIDTH
) -> str:
    """Formats rows as an aligned table of plain text.

    Args:
        num_left: number of columns, from the first, that are aligned to the left; all others are aligned to the right.
        width: maximum number of characters of a line, at which the last column wraps.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(header):
        wraps = number == len(header) - 1 and width < TABLE_WIDTH
        justify = "left" if number < num_left else "right"
        table.add_column(Text(name), justify=justify, no_wrap=not wraps, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    text = io.StringIO()
    Console(file=text, width=width, color_system=None, force_terminal=False, force_jupyter=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
