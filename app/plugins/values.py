"""Checks what a plug-in returns, and describes how it fails."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import re
import threading
from collections.abc import Awaitable, Mapping
from typing import Any, NamedTuple

from app.plugins.loading import describe_error

MAX_EXTRAS = 32
"""Maximum number of additional metrics per sample."""
EXTRA_NAME_PATTERN = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
MAX_TEXT_CHARACTERS = 300


class Failure(NamedTuple):
    """The reason why a plug-in has no value for a sample."""

    kind: str
    """For all plug-ins: `raised`, `value` (unusable return value), `timeout`, `memory` or `exit` (its process ended).
    For rewards also: `length` (a list of wrong length) or `no reward` (every function abstained). For a reward model:
    `too long` or `template` (the chat template fails). For environments also: `opening` (differs between samples of a
    prompt) or `replay` (a different answer to the same turn)."""
    text: str
    """One line of text for the user."""


class PlugInValueError(Exception):
    """A plug-in returned a value that cannot be used."""

    kind = "value"


def failure_of(error: BaseException) -> dict[str, Any]:
    """Returns the reply of a worker whose plug-in raised this exception."""
    if isinstance(error, PlugInValueError):
        return {"failure": Failure(error.kind, str(error))}
    kind = "memory" if isinstance(error, MemoryError) else "exit" if isinstance(error, SystemExit) else "raised"
    return {"failure": Failure(kind, describe_error(error))}


def to_number(value: Any) -> float:
    """Converts a finite real number, such as an int, a bool or a NumPy or PyTorch scalar, to a float.

    Raises:
        PlugInValueError: the value is not a finite number.
    """
    try:
        if not hasattr(type(value), "__float__") and not hasattr(type(value), "__index__"):
            raise TypeError
        result = float(value)
    except (TypeError, ValueError):  # also for an array of several numbers
        raise PlugInValueError(f"returned {describe_value(value)}, expected a number") from None
    if not math.isfinite(result):
        raise PlugInValueError(f"returned {result}, expected a finite number")
    return result


def collect_extras(values: Mapping[Any, Any]) -> dict[str, float]:
    """Returns the first `MAX_EXTRAS` entries whose name is a valid metric name and whose value is a finite number."""
    extras: dict[str, float] = {}
    for name, value in values.items():
        if not isinstance(name, str) or not EXTRA_NAME_PATTERN.fullmatch(name) or len(extras) == MAX_EXTRAS:
            continue
        with contextlib.suppress(PlugInValueError, OverflowError):
            extras[name] = to_number(value)
    return extras


def describe_value(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:60]}" if value is not None else "None"


def replace_control_characters(line: str) -> str:
    """Returns the line with its control characters replaced, because a terminal would interpret them."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)


def one_line(text: str) -> str:
    """Returns the text as one line, shortened and without control characters, so that it is safe for a terminal."""
    shown = replace_control_characters(" ".join(text[:2000].split()))
    return shown if len(shown) <= MAX_TEXT_CHARACTERS else f"{shown[: MAX_TEXT_CHARACTERS - 3]}..."


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Returns the one event loop of all threads, so that they can share connections, which are bound to a loop.

    It runs in its own thread, because a notebook's thread already runs a loop.
    """
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:
            with contextlib.suppress(BaseException):  # `sys.exit` in a coroutine also ends its loop
                loop.run_forever()

    threading.Thread(target=run, daemon=True).start()
    return loop


def await_value(value: Any) -> Any:
    """Returns the result of an awaitable, or any other value unchanged."""
    if not inspect.isawaitable(value):
        return value
    return asyncio.run_coroutine_threadsafe(awaited(value), event_loop()).result()


async def awaited(result: Awaitable[Any]) -> Any:
    return await result
