"""Encodes rows as prompts: applies the system prompt and chat template, and handles overlong prompts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from app.prompts.chat import check_text, check_unicode, to_messages
from app.prompts.dataset import DatasetRow
from app.records.sample import Messages, Prompt
from settings.errors import InputError
from settings.schema.data import DataSettings

log = logging.getLogger(__name__)


class EncodeReport(NamedTuple):
    num_dropped: int
    """Number of prompts that are left out."""
    text: str
    """One line with the numbers of prompts kept, dropped and truncated, and the longest before that."""


def encode_prompts(
    rows: Sequence[DatasetRow], chat_ids: Callable[[Messages], list[int]], data: DataSettings
) -> tuple[list[Prompt], EncodeReport]:
    """Returns the rows as prompts of at most `data.max_prompt_length` tokens, in order, and a report.

    A text prompt becomes one user message. `data.system_prompt` is the first message and replaces a system message of
    the row. `data.overlong_prompts: truncate_left` keeps the last tokens of a prompt, which contain the end of the
    question and the start of the assistant's turn.

    Args:
        chat_ids: returns the token ids of a chat, up to the start of the assistant's answer.

    Raises:
        InputError: a prompt is too long and `data.overlong_prompts` is `error`, a prompt has more than a million
            characters, it or its answer is no Unicode text, or no prompt is left.
    """
    log.info("encoding %s prompts", f"{len(rows):,}")
    for row in rows:
        where = row.where or row.uid
        check_text(row.prompt, f"{where}: the prompt")
        check_unicode(row.answer or "", f"{where}: the answer")
    encoded = [chat_ids(to_messages(row.prompt, data.system_prompt)) for row in rows]
    if empty := next((row.uid for row, ids in zip(rows, encoded, strict=True) if not ids), None):
        raise InputError(f"{empty}: the tokenizer returns no tokens for this prompt")
    max_prompt_length, lengths = data.max_prompt_length, [len(ids) for ids in encoded]
    num_overlong = sum(length > max_prompt_length for length in lengths)
    if num_overlong and data.overlong_prompts == "error":
        first = next(i for i, length in enumerate(lengths) if length > max_prompt_length)
        raise InputError(
            f"{num_overlong:,} of {len(rows):,} prompts are longer than data.max_prompt_length ="
            f" {max_prompt_length} tokens; the first is {rows[first].uid} with {lengths[first]}, the longest"
            f" has {max(lengths)}. Raise the limit, or set data.overlong_prompts to drop or truncate_left"
        )
    keeps_overlong = data.overlong_prompts == "truncate_left"
    prompts = [
        Prompt(row.uid, np.array(ids[-max_prompt_length:], np.int32), row.prompt, row.answer, row.extra)
        for row, ids in zip(rows, encoded, strict=True)
        if keeps_overlong or len(ids) <= max_prompt_length
    ]
    if not prompts:
        raise InputError(
            f"no prompt is left: {num_overlong:,} of {len(rows):,} are longer than data.max_prompt_length ="
            f" {max_prompt_length} tokens (the shortest has {min(lengths, default=0)}, template included)."
            " Raise the limit, or set data.overlong_prompts to truncate_left"
        )
    num_dropped, num_truncated = len(rows) - len(prompts), num_overlong if keeps_overlong else 0
    text = (
        f"prompts: {len(prompts):,} kept, {num_dropped:,} dropped, {num_truncated:,} truncated"
        f" (data.max_prompt_length {max_prompt_length}); longest {max(lengths)} tokens"
    )
    return prompts, EncodeReport(num_dropped, text)
