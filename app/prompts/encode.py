"""Encodes rows as prompts: applies the system prompt and chat template, and handles overlong prompts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from app.prompts.chat import check_text, check_unicode, to_messages
from app.prompts.dataset import DatasetRow
from app.records.sample import Messages, Prompt
from settings.errors import InputError

log = logging.getLogger(__name__)


class ChatTokenizer(Protocol):
    """The tokenizer interface that this package needs."""

    def chat_ids(self, messages: Messages) -> list[int]:
        """Returns the token ids of a chat, up to the start of the assistant's answer."""
        ...


@dataclass(frozen=True, slots=True)
class EncodeReport:
    """Counts of kept, dropped and truncated prompts. Lengths are in tokens, before dropping and truncation."""

    kept: int
    """Number of prompts kept, including truncated ones."""
    dropped: int
    truncated: int
    longest: int
    max_prompt_length: int

    def to_text(self) -> str:
        """Returns the report as one line of text."""
        return (
            f"prompts: {self.kept:,} kept, {self.dropped:,} dropped, {self.truncated:,} truncated"
            f" (data.max_prompt_length {self.max_prompt_length}); longest {self.longest} tokens"
        )


def encode_prompts(
    rows: Sequence[DatasetRow],
    tokenizer: ChatTokenizer,
    *,
    system_prompt: str | None,
    max_prompt_length: int,
    overlong: Literal["drop", "error", "truncate_left"],
) -> tuple[list[Prompt], EncodeReport]:
    """Returns the rows as prompts of at most `max_prompt_length` tokens, in order, and a report.

    A text prompt becomes one user message. `system_prompt` is the first message and replaces a system message of the
    row. `truncate_left` keeps the last tokens of a prompt, which contain the end of the question and the start of the
    assistant's turn.

    Raises:
        InputError: a prompt is too long and `overlong` is `error`, a prompt has more than a million characters, it or
            its answer is no Unicode text, or no prompt is left.
    """
    log.info("encoding %s prompts", f"{len(rows):,}")
    for row in rows:
        where = row.where or row.uid
        check_text(row.prompt, f"{where}: the prompt")
        check_unicode(row.answer or "", f"{where}: the answer")
    encoded = [tokenizer.chat_ids(to_messages(row.prompt, system_prompt)) for row in rows]
    lengths = [len(ids) for ids in encoded]
    num_overlong = sum(length > max_prompt_length for length in lengths)
    if num_overlong and overlong == "error":
        first = next(i for i, length in enumerate(lengths) if length > max_prompt_length)
        raise InputError(
            f"{num_overlong:,} of {len(rows):,} prompts are longer than data.max_prompt_length ="
            f" {max_prompt_length} tokens; the first is {rows[first].uid} with {lengths[first]}, the longest"
            f" has {max(lengths)}. Raise the limit, or set data.overlong_prompts to drop or truncate_left"
        )
    keeps_overlong = overlong == "truncate_left"
    prompts = [
        _to_prompt(row, ids[-max_prompt_length:])
        for row, ids in zip(rows, encoded, strict=True)
        if keeps_overlong or len(ids) <= max_prompt_length
    ]
    if not prompts:
        raise InputError(
            f"no prompt is left: {num_overlong:,} of {len(rows):,} are longer than data.max_prompt_length ="
            f" {max_prompt_length} tokens (the shortest has {min(lengths, default=0)}, template included)."
            " Raise the limit, or set data.overlong_prompts to truncate_left"
        )
    report = EncodeReport(
        kept=len(prompts),
        dropped=len(rows) - len(prompts),
        truncated=num_overlong if keeps_overlong else 0,
        longest=max(lengths),
        max_prompt_length=max_prompt_length,
    )
    return prompts, report


def _to_prompt(row: DatasetRow, ids: list[int]) -> Prompt:
    if not ids:
        raise InputError(f"{row.uid}: the tokenizer returns no tokens for this prompt")
    return Prompt(uid=row.uid, token_ids=np.array(ids, np.int32), source=row.prompt, answer=row.answer, extra=row.extra)
