r"""Mathematics in LaTeX: compares the answer in a completion with the reference answer, using math-verify.

It runs like a plug-in, in a killable process, because SymPy may never finish for input such as `9^{9^{9^9}}`.
"""

from __future__ import annotations

import logging

try:
    from math_verify import parse, verify
except ModuleNotFoundError:  # RewardFunctions reports that the extra [math] is not installed.
    parse = verify = None

# Hides its warning that its own time-outs, which need signals, are off; the worker has a time-out.
logging.getLogger("math_verify").setLevel(logging.ERROR)

MATH_DELIMITERS = ("$", "\\boxed", "\\(", "\\[")


def math_verify(completion: str, answer: str) -> float:
    """Returns 1.0 if the last answer in the completion equals the reference answer, else 0.0.

    The reference can be a GSM8K solution (`... #### 72`), LaTeX with or without dollar signs, or plain text.

    Raises:
        ValueError: the reference answer cannot be parsed as a mathematical expression.
    """
    assert parse is not None and verify is not None
    reference = answer.rpartition("####")[2].strip()
    if not any(mark in reference for mark in MATH_DELIMITERS):
        reference = f"${reference}$"
    expected = parse(reference, parsing_timeout=0)
    if not expected:
        raise ValueError(f"the reference answer {answer[-80:]!r} is no mathematical expression")
    given = parse(completion, parsing_timeout=0)
    return float(verify(expected, given, timeout_seconds=0))
