"""Defines InputError, which reports invalid input, never bugs, and joins and replaces words in its messages."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """A setting, file, model or data set cannot be used; raised before any device work.

    The message names the setting or file, the value and its source, the reason, and the way out. The command line
    prints it without a traceback and exits with code 2.
    """


def join_words(words: Iterable[object], *, last: str = "or") -> str:
    """Joins words for a message, as in `a, b or c`; `last` is the conjunction."""
    *most, final = map(str, words)
    return f"{', '.join(most)} {last} {final}" if most else final


@contextmanager
def renamed_in_errors(name: str, *, to: str) -> Iterator[None]:
    """Returns a context manager in which each InputError says `to` instead of `name`, except within paths and words."""
    whole_word = re.compile(rf"(?<![\w./\\:-]){re.escape(name)}(?![\w/\\-]|\.\w)")
    try:
        yield
    except InputError as error:
        raise InputError(whole_word.sub(lambda _: to, str(error))) from error
