"""Text of others, made safe for a terminal."""

from __future__ import annotations

MAX_TEXT_CHARACTERS = 300


def replace_control_characters(line: str) -> str:
    """Returns the line with its control characters replaced, because a terminal would interpret them."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)


def one_line(text: str) -> str:
    """Returns the text as one short line without control characters, safe for a terminal."""
    shown = replace_control_characters(" ".join(text[:2000].split()))
    return shown if len(shown) <= MAX_TEXT_CHARACTERS else f"{shown[: MAX_TEXT_CHARACTERS - 3]}..."
