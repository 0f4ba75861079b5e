"""Defines InputError, which reports invalid input, never bugs, and joins words for its messages."""

from collections.abc import Iterable


class InputError(ValueError):
    """A setting, file, model or data set cannot be used; raised before any device work.

    The message names the setting or file, the value and its source, the reason, and the way out. The command line
    prints it without a traceback and exits with code 2.
    """


def join_words(words: Iterable[object], *, last: str = "or") -> str:
    """Joins words for a message, as in `a, b or c`; `last` is the conjunction."""
    *most, final = map(str, words)
    return f"{', '.join(most)} {last} {final}" if most else final
