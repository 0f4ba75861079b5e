from __future__ import annotations

import sys

import pytest

from app.records.text_format import (
    format_bytes,
    format_count,
    format_interval,
    format_percent,
    format_table,
    to_printable,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain 汉字 é", "plain 汉字 é"),
        ("a\nb", "a↵ b"),
        ("\x1b[2J\r\x07", r"\x1b[2J\r\x07"),
        ("over\u202egnp\u2028\x85", r"over\u202egnp\u2028\x85"),
        ("\ud800\ue000", r"\ud800\ue000"),
    ],
)
def test_what_a_terminal_would_obey_is_spelled_out(text: str, shown: str) -> None:
    assert to_printable(text) == shown


def test_no_character_gets_through_that_is_not_printable() -> None:
    shown = to_printable("".join(map(chr, range(sys.maxunicode + 1))))
    assert shown.isprintable()
    shown.encode("utf-8")


def test_one_thing_is_singular() -> None:
    assert [format_count(count, "step") for count in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]


def test_sizes_have_the_unit_that_suits_them() -> None:
    assert (format_bytes(2**30 - 2**20), format_bytes(2**30)) == ("1,023.0 MiB", "1.00 GiB")
    assert (format_bytes(2**20 // 10 + 1), format_bytes(512)) == ("0.1 MiB", "0.5 KiB")


def test_an_interval_has_brackets_and_none_is_empty() -> None:
    assert format_interval((0.22, 0.295), format_percent) == "[22.0 %, 29.5 %]"
    assert format_interval(None, format_percent) == ""


def test_a_table_is_plain_aligned_text_whatever_the_cells_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    text = format_table([("[bold]a[/]", "1"), ("b", "10")], header=("", "number"))
    assert text.splitlines() == ["            number", "[bold]a[/]       1", "b               10"]
