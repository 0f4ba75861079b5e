r"""Mathematics in LaTeX: is the answer of a completion equal to the reference, as math-verify sees it?

sympy may think for ever over `9^{9^{9^9}}`, so this runs where plug-ins run: in a process that can be killed.
"""

from __future__ import annotations

import logging

try:
    from math_verify import parse, verify
except ModuleNotFoundError:  # without the extra [math]; whoever asks for this reward is told so
    parse = verify = None

# It warns that its own clocks, which need signals, are off; the worker's stand in for them.
logging.getLogger("math_verify").setLevel(logging.ERROR)

MATH_DELIMITERS = ("$", "\\boxed", "\\(", "\\[")


def math_verify(completion: str, answer: str) -> float:
    """1.0 when the last answer in the completion equals the reference answer, 0.0 otherwise.

    The reference may be GSM8K's (`... #### 72`), LaTeX with or without dollar signs, or plain text.

    Raises:
        ValueError: the reference answer holds no mathematics.
    """
    assert parse is not None and verify is not None
    reference = answer.rpartition("####")[2].strip()
    if not any(mark in reference for mark in MATH_DELIMITERS):
        reference = f"${reference}$"
    expected = parse(reference, parsing_timeout=0)
    if not expected:
        raise ValueError(f"the reference answer {answer[-80:]!r} holds no mathematics")
    given = parse(completion, parsing_timeout=0)
    return float(verify(expected, given, timeout_seconds=0))
