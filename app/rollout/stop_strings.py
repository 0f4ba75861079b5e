"""Stop strings: texts at which a completion ends, as in vLLM and TRL.

Devices draw tokens without knowing their text, so the host cuts a finished sample right after the first token with
which its text contains a stop string. What is cut off changes nothing before it: not a token, a logprob or another
sample. Between segments, slots free the rows that contain one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

DecodeText = Callable[[Sequence[int]], str]
"""Converts token ids to text."""


def stop_length(token_ids: Sequence[int], stop: Sequence[str], decode_text: DecodeText) -> int | None:
    """Returns the number of tokens up to the first with which the text contains a stop string; None if there is none.

    More tokens may only complete the last character of a text, so once it contains a stop string, it always will.
    """

    def is_stopped(count: int) -> bool:
        text = decode_text(token_ids[:count])
        return any(string in text for string in stop)

    if not stop or not is_stopped(len(token_ids)):
        return None
    return bisect_left(range(len(token_ids)), True, key=is_stopped)
