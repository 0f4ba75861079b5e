"""Bare arithmetic (`47 + 38 = ?`): is the last number of the completion right, and does it stand alone?

Correctness reads the completion's last number, so that both `85` and `47 + 38 = 85` are right.
Format asks for one integer and nothing else but white space around it.
"""

from __future__ import annotations

import re
from fractions import Fraction

from app.reward.numbers import MAX_NUMBER_CHARACTERS, last_number, parse_number

_INTEGER = re.compile(rf"\s*+[-\u2212]?[0-9]{{1,{MAX_NUMBER_CHARACTERS}}}+\s*+")


def extract(completion: str) -> str | None:
    """The last number of a completion, as it is written; or None."""
    return last_number(completion)


def parse_reference(answer: str) -> Fraction | None:
    """The exact value of a reference answer that is just a number."""
    return parse_number(answer)


def is_formatted(completion: str) -> bool:
    """Whether the completion is exactly one integer."""
    return _INTEGER.fullmatch(completion) is not None
