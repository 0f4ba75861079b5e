"""Text from elsewhere, made safe for a terminal."""

from __future__ import annotations


def to_printable(text: str) -> str:
    """Returns the text on one line, with control characters as Python escapes.

    These are escapes, carriage returns and text directions; also characters without UTF-8.
    """
    return "".join(_escape_character(character) for character in text)


def _escape_character(character: str) -> str:
    if character == "\n":
        return "↵ "
    # isprintable is False for control, format, surrogate and private-use characters, and for spaces other than " ".
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
