r"""Exact parsing of numbers in text written by people or models.

`1,234`  `1 234`  `-5`  `+3.50`  `.5`  `1.5e3`  `3/4`  `2 3/4`  `\frac{3}{4}`  `2\frac34`  `$18.00`  `USD18`  `25%`

Currency and percent signs are ignored: `25%` is 25. Only ASCII and full-width digits count, and commas and spaces only
between groups of three.
Quantifiers are bounded or possessive, so that matching takes linear time for any text. Nothing is evaluated.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_NUMBER_CHARACTERS = 200
"""Maximum length of a number; longer ones are not answers and would make exact arithmetic slow."""

MAX_SEARCHED_CHARACTERS = 100_000
"""Number of characters at the end of a completion that are searched for an answer (about 25,000 tokens)."""

_NO_BREAK_SPACE = r"[\u00a0\u2009\u202f]"
_CURRENCY = r"(?:\\?[$€£¥₹]|US\$|USD|EUR|GBP|INR|CNY|JPY)"
_WORD = r"[^\W\u0e00-\uffff]"
"""A character of a word in scripts that separate words and numbers by spaces, unlike Chinese."""
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}


def _pattern(*separators: str) -> str:
    """Returns the pattern of a number whose separators divide groups of three digits. It contains named groups."""
    groups = "".join(rf"[0-9]{{1,3}}(?:{separator}[0-9]{{3}}){{1,40}}+|" for separator in separators)
    unsigned = rf"(?:(?:{groups}[0-9]++)(?:\.[0-9]++)?|\.[0-9]++)(?:[eE][-+]?[0-9]{{1,2}}(?!{_WORD}))?"
    return (
        rf"(?P<sign>[-+\u2212]?)(?:{_CURRENCY}[ ]?)?(?P<inner_sign>[-+\u2212]?)"
        r"(?:(?:(?P<frac_whole>[0-9]{1,9})[ ]?)?\\[dt]?frac[ ]?"
        rf"(?:\{{(?P<frac_over>-?{unsigned})\}}|(?P<digit_over>[0-9]))[ ]?"
        rf"(?:\{{(?P<frac_under>{unsigned})\}}|(?P<digit_under>[0-9]))"
        r"|(?P<mixed_whole>[0-9]{1,9})[ ](?P<mixed_over>[0-9]{1,3})/(?P<mixed_under>[0-9]{1,3})"
        rf"|(?P<over>{unsigned})(?:[ ]?/[ ]?(?P<under>{unsigned}))?)"
        r"(?!,?\d)"
    )


NUMBER_PATTERN = _pattern(",", r"\x20", _NO_BREAK_SPACE)
"""Pattern of a number that is marked as the answer."""

_WHOLE_TEXT = re.compile(rf"{NUMBER_PATTERN}[ ]?(?:\\?%)?\.?")
# A sign right after a letter, a digit or a bracket is a minus between two terms. Digits inside a word (`x2`), or after
# the decimal point of the preceding number (`1.2.3`), are not a number. In a text, `5 100` may be two numbers,
# but `5 000` is one.
_IN_TEXT = re.compile(rf"(?<!{_WORD})(?<!\))(?<![0-9]\.)" + _pattern(",", r"\x20(?=0)", _NO_BREAK_SPACE))


def to_ascii(text: str) -> str:
    """Returns a text of the same length with full-width characters, such as digits in Chinese text, as ASCII."""
    return text.translate(_FULL_WIDTH)


def parse_number(text: str) -> Fraction | None:
    """Returns the exact value of a text that is one number; None for other text and for division by zero."""
    text = to_ascii(text.strip())
    if len(text) > MAX_NUMBER_CHARACTERS:
        return None
    match = _WHOLE_TEXT.fullmatch(text)
    if match is None or (match["sign"] and match["inner_sign"]):
        return None
    whole = _to_fraction(match["frac_whole"] or match["mixed_whole"] or "0")
    over = _to_fraction(match["over"] or match["frac_over"] or match["digit_over"] or match["mixed_over"])
    under = _to_fraction(match["under"] or match["frac_under"] or match["digit_under"] or match["mixed_under"] or "1")
    if under == 0 or (over < 0 and whole > 0):
        return None
    value = whole + over / under
    return value if (match["sign"] or match["inner_sign"]) in ("", "+") else -value


def last_number(text: str) -> str | None:
    """Returns the text of the last number in the last `MAX_SEARCHED_CHARACTERS` characters, or None."""
    last = None
    for match in _IN_TEXT.finditer(to_ascii(text[-MAX_SEARCHED_CHARACTERS:])):
        last = match
    return last.group() if last else None


def _to_fraction(digits: str) -> Fraction:
    return Fraction(re.sub(r"[,\s]", "", digits))
