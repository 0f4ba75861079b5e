"""What others wrote, made safe for a terminal."""

from __future__ import annotations

import sys

import pytest

from app.records.printable import to_printable


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
