"""Encodes rows as prompts: applies the system prompt and chat template, and handles overlong prompts."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from app.prompts.chat import check_text, check_unicode, message_texts, plain_text, to_messages
from app.prompts.dataset import DatasetRow
from app.records.sample import Messages, Prompt
from app.records.text_format import format_count
from app.records.typed_values import to_text
from settings.errors import InputError
from settings.schema.data import DataSettings

if TYPE_CHECKING:
    from app.prompts.chat_template import ChatTemplate
    from app.prompts.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class EncodeReport(NamedTuple):
    num_dropped: int
    """Number of prompts that are left out."""
    text: str
    """One line with the numbers of prompts kept, dropped and truncated, and the longest original length."""


def encode_prompt(prompt: str | Messages, tokenizer: Tokenizer, data: DataSettings, *, where: str) -> list[int]:
    """Returns the token ids of a prompt: as a chat, or with `data.chat_template: none` as plain text.

    A text prompt becomes one user message. `data.system_prompt` is the first message and replaces a system message of
    the row.

    Raises:
        InputError: the template rejects the chat, or there is no template; the error starts with `where`.
    """
    if data.chat_template == "none":
        if (text := plain_text(prompt)) is None:
            raise InputError(
                f"{where}: the prompt is a chat, but data.chat_template: none has no template to render it; "
                "render it to text, or remove that setting"
            )
        return tokenizer.text_ids(text)
    messages = to_messages(prompt, data.system_prompt)
    try:
        return tokenizer.chat_ids(messages)
    except InputError as error:
        hint = "; correct the chat, or remove the row"
        if any(message["role"] == "system" for message in messages):
            own = "put the text of the row's system message at the start of the user's"
            way_out = own if data.system_prompt is None else "set data.system_prompt: null"
            hint = f"; if it takes no system message, {way_out}, else correct the chat, or remove the row"
        raise InputError(f"{where}: {error}{hint}") from error


OPEN_END = re.compile(r"(?i)(\bassistant:|<think>)\s*\Z")
"""Matches the end of a base model's prompt that the answer continues, such as `Assistant:`."""


def misread_prompts(rows: Sequence[DatasetRow], template: ChatTemplate, data: DataSettings) -> tuple[str, str] | None:
    """Returns why prompts or template variables may not suit the template, and what to set; None if all do."""
    if data.chat_template == "none":
        return None
    if template.unread_kwargs:
        return (
            f"the chat template has no variable {template.unread_kwargs[0]}, so data.chat_template_kwargs does not "
            "change it",
            "correct the name, or remove it where other models do not need it",
        )
    for row in rows:
        if match := next(filter(None, map(template.control_tokens.search, message_texts(row.prompt))), None):
            return (
                f"prompts contain control tokens of the chat template ({row.where or row.uid}: {match[0]!r}), which "
                "become plain text in a message of the template",
                "if the prompts are rendered already, set data.chat_template: none",
            )
    for row in rows:
        if OPEN_END.search(text := plain_text(row.prompt) or ""):
            return (
                f"prompts end as if the answer continued them ({row.where or row.uid}: {text[-40:]!r}), but the chat "
                "template makes them a user's message",
                "if they are meant for a base model, set data.chat_template: none",
            )
    return None


def encode_prompts(
    rows: Sequence[DatasetRow], tokenizer: Tokenizer, data: DataSettings
) -> tuple[list[Prompt], EncodeReport]:
    """Returns the rows as prompts of at most `data.max_prompt_length` tokens, in order, and a report.

    `data.overlong_prompts: truncate_left` keeps the last tokens of a prompt, which contain the end of the question and
    the start of the assistant's turn.

    Raises:
        InputError: see `encode_prompt`; or a prompt is too long and `data.overlong_prompts` is `error`, a prompt has
            more than a million characters or no tokens, it or its answer is not Unicode text, or no prompt is left.
    """
    log.info("encoding %s prompts", f"{len(rows):,}")
    for row in rows:
        where = row.where or row.uid
        check_text(row.prompt, f"{where}: the prompt")
        check_unicode(to_text(row.answer), f"{where}: the answer")
    encoded = [encode_prompt(row.prompt, tokenizer, data, where=row.where or row.uid) for row in rows]
    if empty := next((row.uid for row, ids in zip(rows, encoded, strict=True) if not ids), None):
        raise InputError(f"{empty}: the tokenizer returns no tokens for this prompt; remove the row")
    max_prompt_length, lengths = data.max_prompt_length, [len(ids) for ids in encoded]
    num_overlong = sum(length > max_prompt_length for length in lengths)
    if num_overlong and data.overlong_prompts == "error":
        first = next(i for i, length in enumerate(lengths) if length > max_prompt_length)
        raise InputError(
            f"data.max_prompt_length = {max_prompt_length} is too short for {num_overlong:,} of {len(rows):,} prompts: "
            f"the first is {rows[first].uid} with {lengths[first]} tokens, the longest has {max(lengths)}. Raise it, "
            "or set data.overlong_prompts to drop or truncate_left"
        )
    keeps_overlong = data.overlong_prompts == "truncate_left"
    prompts = [
        Prompt(row.uid, np.array(ids[-max_prompt_length:], np.int32), row.prompt, row.answer, row.extra)
        for row, ids in zip(rows, encoded, strict=True)
        if keeps_overlong or len(ids) <= max_prompt_length
    ]
    if not prompts:
        raise InputError(
            f"data.max_prompt_length = {max_prompt_length} is too short for every prompt: the shortest has "
            f"{min(lengths, default=0)} tokens, template included. Raise it, or set data.overlong_prompts to "
            "truncate_left"
        )
    num_dropped, num_truncated = len(rows) - len(prompts), num_overlong if keeps_overlong else 0
    text = (
        f"prompts: {len(prompts):,} kept, {num_dropped:,} dropped, {num_truncated:,} truncated"
        f" (data.max_prompt_length {max_prompt_length}); longest "
        f"{format_count(max(lengths), 'token')}"
    )
    return prompts, EncodeReport(num_dropped, text)
