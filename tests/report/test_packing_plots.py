"""Packed rows in a terminal and in a file."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from app.report.packing_plots import (
    MAX_FIGURE_ROWS,
    MAX_TEXT_ROWS,
    TERMINAL_COLUMNS,
    PlottedRow,
    TokenSpan,
    format_rows,
    render_rows,
)

ROWS = [
    PlottedRow(
        1,
        0,
        16,
        (
            TokenSpan(0, True, 2),
            TokenSpan(0, False, 3),
            TokenSpan(0, False, 4),
            TokenSpan(1, True, 1),
            TokenSpan(1, False, 4),
        ),
    ),
    PlottedRow(1, 1, 16, (TokenSpan(0, True, 8), TokenSpan(0, False, 8))),
    PlottedRow(2, 0, 8, (TokenSpan(0, True, 1), TokenSpan(0, False, 1))),
    PlottedRow(2, 1, 8, ()),
]


def long_row(num_tokens: int) -> PlottedRow:
    return PlottedRow(1, 0, num_tokens, (TokenSpan(0, True, num_tokens // 2), TokenSpan(0, False, num_tokens // 4)))


def test_segments_prompts_completions_and_padding_are_told_apart() -> None:
    assert format_rows(ROWS) == (
        "a character is 1 token: AAAaaa a prompt and its completions, BBBbbb the next, ... padding\n"
        "micro-batch 1\n"
        "  device 0  AAaaaaaaaBbbbb..   87.5%    3 samples\n"
        "  device 1  AAAAAAAAaaaaaaaa  100.0%    1 sample\n"
        "micro-batch 2\n"
        "  device 0  Aa......   25.0%    1 sample\n"
        "  device 1  ........    0.0%    0 samples"
    )


def test_a_character_says_what_stands_at_the_middle_of_its_tokens() -> None:
    # 300 tokens do not fit beside the figures: 5 tokens a character. The prompt ends after 150, at the 30th.
    _, _, line = format_rows([long_row(300)]).splitlines()
    assert line.split() == ["device", "0", "A" * 30 + "a" * 15 + "." * 15, "75.0%", "1", "sample"]


@pytest.mark.parametrize("num_tokens", [1, 63, 128, 1000, 4097, 16384, 2**24])
def test_no_line_is_wider_than_a_terminal(num_tokens: int) -> None:
    rows = [long_row(num_tokens), PlottedRow(123, 1023, num_tokens // 2 + 1, (TokenSpan(0, True, 1),) * 0)]
    lines = format_rows(rows).splitlines()
    assert max(map(len, lines)) <= TERMINAL_COLUMNS
    assert num_tokens < 128 or max(map(len, lines)) > TERMINAL_COLUMNS * 0.6


def test_segments_beyond_the_alphabet_start_it_again() -> None:
    pieces = tuple(TokenSpan(number, False, 1) for number in range(28))
    assert "abcdefghijklmnopqrstuvwxyzab" in format_rows([PlottedRow(1, 0, 28, pieces)])


def test_a_long_picture_says_how_much_is_missing() -> None:
    rows = [PlottedRow(1 + i // 4, i % 4, 8, ()) for i in range(MAX_TEXT_ROWS + 6)]
    lines = format_rows(rows).splitlines()
    assert len(lines) == 1 + MAX_TEXT_ROWS + MAX_TEXT_ROWS // 4 + 1
    assert lines[-1] == "6 more rows, up to micro-batch 12, are not shown"


def test_the_file_has_a_bar_for_every_piece_and_the_same_bytes_each_time() -> None:
    svg = render_rows(ROWS, title="fill 58.3%", kind="svg")
    assert svg == render_rows(ROWS, title="fill 58.3%", kind="svg")
    paths = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}path")
    styles = [path.get("style", "") for path in paths]
    # One more of each stands in the legend.
    assert sum("#1f7fc4" in style for style in styles) == 4 + 1
    assert sum("#e69f00" in style for style in styles) == 5 + 1
    assert sum("#dcdcdc" in style for style in styles) == 4 + 1


def test_a_picture_of_very_many_rows_stays_small() -> None:
    png = render_rows([long_row(4096)] * (2 * MAX_FIGURE_ROWS), title="many", kind="png")
    assert png.startswith(b"\x89PNG\r\n\x1a\n") and len(png) < 400_000
