"""Texts and chats, checked before a tokenizer reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.records.sample import Messages
from settings.errors import InputError

MAX_CHARACTERS = 1_000_000
"""Of one text or chat: tokenizers take hundreds of bytes for each character."""


def read_messages(values: list[Any], where: str) -> Messages:
    """Returns a chat that the assistant continues, with only `role` and `content` of each message.

    Raises:
        InputError: a message has no text, or the last one is the assistant's; the error starts with `where`.
    """
    messages = []
    for value in values:
        role, content = (value.get("role"), value.get("content")) if isinstance(value, Mapping) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise InputError(f"{where}: a chat message needs `role` and `content`, both text; got {value!r:.80}")
        messages.append({"role": role, "content": content})
    if not messages:
        raise InputError(f"{where}: the prompt is empty")
    if messages[-1]["role"] == "assistant":
        raise InputError(f"{where}: the chat ends with the assistant's turn; leave that turn out of the prompt")
    return messages


def to_messages(prompt: str | Messages, system_prompt: str | None) -> Messages:
    """Returns the prompt as a chat that starts with `system_prompt`, unless that is None."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system_prompt is None:
        return messages
    if messages[0]["role"] == "system":
        messages = messages[1:]
    return [{"role": "system", "content": system_prompt}, *messages]


def check_text(text: str | Messages, name: str) -> None:
    """Raises InputError, which starts with the name of the text, if it is too long to encode or not Unicode."""
    texts = [text] if isinstance(text, str) else [message["content"] for message in text]
    if (count := sum(map(len, texts))) > MAX_CHARACTERS:
        raise InputError(f"{name} has {count:,} characters, more than {MAX_CHARACTERS:,}; remove the row")
    check_unicode("".join(texts), name)


def check_unicode(text: str, name: str) -> None:
    """Raises InputError, which starts with the name of the text, if it has half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{name} is not Unicode text: {error.reason}; remove the row") from error
