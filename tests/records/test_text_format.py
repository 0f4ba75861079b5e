import sys

import pytest

from app.records import text_format


def test_terminal_control_characters_are_escaped() -> None:
    assert text_format.to_printable("plain 汉字 é\nb") == "plain 汉字 é↵ b"
    for text in ("\x1b[2J\r\x07", "over\u202egnp\u2028\x85", "\ud800\ue000"):
        assert text_format.to_printable(text) == text.encode("unicode_escape").decode()
    shown = text_format.to_printable("".join(map(chr, range(sys.maxunicode + 1))))
    assert shown.isprintable()
    shown.encode("utf-8")


def test_counts_bytes_and_intervals_are_formatted_with_units() -> None:
    assert [text_format.format_count(count, "step") for count in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]
    assert (text_format.format_bytes(2**30 - 2**20), text_format.format_bytes(2**30)) == ("1,023.0 MiB", "1.00 GiB")
    assert (text_format.format_bytes(2**20 // 10 + 1), text_format.format_bytes(512)) == ("0.1 MiB", "0.5 KiB")
    assert text_format.format_interval((0.22, 0.295), text_format.format_percent) == "[22.0 %, 29.5 %]"
    assert text_format.format_interval(None, text_format.format_percent) == ""


def test_a_table_is_plain_aligned_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    text = text_format.format_table([("[bold]a[/]", "1"), ("b", "10")], header=("", "number"))
    assert text.splitlines() == ["            number", "[bold]a[/]       1", "b               10"]
