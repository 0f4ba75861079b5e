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

    A text of valid UTF-8 that contains a stop string still does with more tokens. Only while a character of up to four
    byte tokens is incomplete, some tokenizers (SentencePiece's) do not decode the byte tokens before it either.
    """

    def is_stopped(count: int) -> bool:
        text = decode_text(token_ids[:count])
        shorter = (decode_text(token_ids[: max(count - num, 0)]) for num in (1, 2, 3) if text.endswith("\ufffd"))
        return any(string in one for one in (text, *shorter) for string in stop)

    if not stop or not is_stopped(len(token_ids)):
        return None
    return bisect_left(range(len(token_ids)), True, key=is_stopped)
