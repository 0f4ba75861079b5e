r"""Exact parsing of numbers in text written by people or models.

`1,234`  `-5`  `+3.50`  `.5`  `3/4`  `\frac{3}{4}`  `$18.00`  `25%`

Currency and percent signs are ignored: `25%` is 25. Only ASCII digits count, and commas only between groups of three.
Quantifiers are bounded or possessive, so that matching takes linear time for any text. Nothing is evaluated.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_NUMBER_CHARACTERS = 200
"""Maximum length of a number; longer ones are not answers and would make exact arithmetic slow."""

MAX_SEARCHED_CHARACTERS = 100_000
"""Number of characters at the end of a completion that are searched for an answer (about 25,000 tokens)."""

_UNSIGNED = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3}){1,40}+|[0-9]++)(?:\.[0-9]++)?|\.[0-9]++)"

NUMBER_PATTERN = (
    r"(?P<sign>[-+\u2212]?)(?:\\?[$€£¥₹][ ]?)?(?P<inner_sign>[-+\u2212]?)"
    rf"(?:\\[dt]?frac\{{(?P<frac_over>-?{_UNSIGNED})\}}\{{(?P<frac_under>{_UNSIGNED})\}}"
    rf"|(?P<over>{_UNSIGNED})(?:[ ]?/[ ]?(?P<under>{_UNSIGNED}))?)"
    r"(?!,?\d)"
)
"""Pattern of a number; it can be used only once in a larger pattern, because its groups are named."""

_WHOLE_TEXT = re.compile(rf"{NUMBER_PATTERN}[ ]?(?:\\?%)?\.?")
# A sign right after a letter, a digit or a bracket is a minus between two terms. Digits inside a word (`x2`), or after
# the decimal point of the preceding number (`1.2.3`), are not a number.
_IN_TEXT = re.compile(rf"(?<![\w)])(?<![0-9]\.){NUMBER_PATTERN}")


def parse_number(text: str) -> Fraction | None:
    """Returns the exact value of a text that is one number; None for other text and for division by zero."""
    text = text.strip()
    if len(text) > MAX_NUMBER_CHARACTERS:
        return None
    match = _WHOLE_TEXT.fullmatch(text)
    if match is None or (match["sign"] and match["inner_sign"]):
        return None
    numerator = _to_fraction(match["over"] or match["frac_over"])
    denominator = _to_fraction(match["under"] or match["frac_under"] or "1")
    if denominator == 0:
        return None
    value = numerator / denominator
    return value if (match["sign"] or match["inner_sign"]) in ("", "+") else -value


def last_number(text: str) -> str | None:
    """Returns the text of the last number in the last `MAX_SEARCHED_CHARACTERS` characters, or None."""
    last = None
    for match in _IN_TEXT.finditer(text[-MAX_SEARCHED_CHARACTERS:]):
        last = match
    return last.group() if last else None


def _to_fraction(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))
