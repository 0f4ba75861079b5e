"""Values of data files that JSON does not support, written as tagged objects in records and messages.

    {"python_type": "decimal.Decimal", "value": "1.50"}

Rows of data sets contain only such JSON, so that the arguments of a reward function do not depend on whether the sample
went through a file. The tagged objects become Python objects again in the process of the user's function.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

TYPE, VALUE = "python_type", "value"
DECIMAL = "decimal.Decimal"
MICROSECOND = timedelta(microseconds=1)

CODECS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    # A datetime is also a date, so it comes first. Its time zone is kept as an offset.
    "datetime.datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "datetime.date": (date, date.isoformat, date.fromisoformat),
    "datetime.time": (time, time.isoformat, time.fromisoformat),
    "datetime.timedelta": (timedelta, lambda x: str(x // MICROSECOND), lambda text: int(text) * MICROSECOND),
    DECIMAL: (Decimal, str, Decimal),
    "uuid.UUID": (UUID, str, UUID),
    "bytes": (bytes, lambda x: base64.b64encode(x).decode(), lambda text: base64.b64decode(text, validate=True)),
    "float": (float, str, float),
}
"""Maps the name of a type to the type, a function that writes it as text, and one that reads it. Only infinite floats
are tagged."""


def to_json(value: Any) -> Any:
    """Converts a value of a data file to JSON: null for NaN, a list for a tuple, tagged objects for types in `CODECS`.

    Objects of other types are left as they are.
    """
    if isinstance(value, Mapping):
        return {name: to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, float) and math.isnan(value):
        return None
    for name, (python_type, write, _) in CODECS.items():
        if isinstance(value, python_type):
            return {TYPE: name, VALUE: write(value)}
    return value


def from_json(value: Any) -> Any:
    """Restores the objects that `to_json` has tagged; other objects are unchanged."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {TYPE, VALUE} and isinstance(value[VALUE], str) and (codec := CODECS.get(str(value[TYPE]))):
        try:
            return codec[2](value[VALUE])
        except (ValueError, ArithmeticError):
            return value
    return {name: from_json(item) for name, item in value.items()}


def is_text_or_number(value: Any) -> bool:
    """Returns whether a JSON value is text or a number; a tagged decimal is a number, a boolean is not."""
    is_decimal = isinstance(value, dict) and value.get(TYPE) == DECIMAL
    return is_decimal or (isinstance(value, str | int | float) and not isinstance(value, bool))


def to_text(value: Any) -> str:
    """Returns a JSON value as readable text: a string as it is, a tagged object as its value, null as empty text."""
    if value is None or isinstance(value, str):
        return value or ""
    tagged = from_json(value)
    if isinstance(value, dict) and not isinstance(tagged, dict):
        return str(value[VALUE])
    return json.dumps(value, ensure_ascii=False)
