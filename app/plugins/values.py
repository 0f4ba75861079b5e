"""Checks of what a plug-in returns."""

from __future__ import annotations

import math
from collections.abc import Awaitable
from typing import Any


class PlugInValueError(Exception):
    """A plug-in returned a value that cannot be used."""

    kind = "value"


def to_number(value: Any) -> float:
    """Converts a finite real number, such as an int, a bool or a NumPy or PyTorch scalar, to a float.

    Raises:
        PlugInValueError: the value is not a finite number.
    """
    if not hasattr(type(value), "__float__") and not hasattr(type(value), "__index__"):
        raise PlugInValueError(f"returned {describe_value(value)}, expected a number")
    result = float(value)
    if not math.isfinite(result):
        raise PlugInValueError(f"returned {result}, expected a finite number")
    return result


def describe_value(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:60]}" if value is not None else "None"


async def awaited(result: Awaitable[Any]) -> Any:
    return await result
