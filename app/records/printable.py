"""What others wrote, made safe for a terminal."""

from __future__ import annotations


def to_printable(text: str) -> str:
    """The text on one line; what a terminal would obey rather than show is spelled out as Python would spell it.

    That is escapes, carriage returns, text direction; also what has no UTF-8.
    """
    return "".join(_escape_character(character) for character in text)


def _escape_character(character: str) -> str:
    if character == "\n":
        return "↵ "
    # isprintable: no control, format, surrogate or private-use character, and no space but the usual one.
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
