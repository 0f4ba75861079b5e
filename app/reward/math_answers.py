r"""Mathematics in LaTeX: compares the answer in a completion with the reference answer, using math-verify.

It runs like a plug-in, in a killable process, because SymPy may never finish for input such as `9^{9^{9^9}}`.
"""

from __future__ import annotations

import logging
import re
from decimal import Decimal

from app.reward.builtin_tasks import math_reference

try:
    from math_verify import parse, verify
except ModuleNotFoundError:  # RewardFunctions reports that the extra [math] is not installed.
    parse = verify = None

# Hides the warning that its own time-outs, which need signals, are off; the worker has a time-out.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_ESCAPED_DOLLAR = re.compile(r"(?<!\\)\\\$")
"""Matches an escaped dollar sign, which math-verify takes for the end of a formula, or ignores outside of formulas."""
_DELIMITED = re.compile(r"\\boxed\s*\{|\$[^$]+\$|\\\(.+?\\\)|\\\[.+?\\\]", re.DOTALL)
"""Matches mathematics that math-verify finds in a text."""


def math_verify(completion: str, answer: str | float | Decimal) -> float:
    """Returns 1.0 if the last answer in the completion equals the reference answer, else 0.0.

    The reference can be a GSM8K solution (`... #### 72`), LaTeX with or without dollar signs, a number or plain text.
    """
    assert parse is not None and verify is not None
    reference, completion = (_ESCAPED_DOLLAR.sub("", text) for text in (math_reference(str(answer)), completion))
    delimited = reference if _DELIMITED.search(reference) else f"${' '.join(reference.split())}$"
    # Answers that math-verify cannot parse are compared as text.
    expected = parse(delimited, parsing_timeout=0) or [reference]
    given = parse(completion, parsing_timeout=0)
    return float(verify(expected, given, timeout_seconds=0))
