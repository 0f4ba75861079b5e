"""Checks texts and chats before they are tokenized."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from app.records.sample import Messages, message_text
from app.records.typed_values import is_text_or_number, to_text
from settings.errors import InputError

MAX_CHARACTERS = 1_000_000
"""Maximum length of a text or chat: tokenizers need hundreds of bytes of memory per character."""


def read_messages(values: list[Any], where: str) -> Messages:
    """Returns the messages of a prompt, which the assistant continues; see `read_chat`.

    Raises:
        InputError: there is no message, or the assistant wrote the last one.
    """
    messages = read_chat(values, where)
    if not messages:
        raise InputError(f"{where}: the prompt is empty; remove the row")
    if messages[-1]["role"] == "assistant":
        raise InputError(f"{where}: the chat ends with the assistant's turn; remove that turn from the prompt")
    return messages


def read_chat(values: list[Any], where: str) -> Messages:
    """Returns the values as chat messages, with all their fields, since the chat template may use any of them.

    Content is text, a list of text parts, or null if a message has something else, such as `tool_calls`.

    Raises:
        InputError: a message has no content, or JSON cannot represent it; the error starts with `where`.
    """
    messages = []
    for value in values:
        if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
            raise InputError(
                f"{where}: a chat message needs `role` and `content`, got {value!r:.80}; correct or remove the row"
            )
        content = value.get("content")
        other = [part for part in content if not is_text_part(part)] if isinstance(content, list) else []
        if other:
            raise InputError(
                f"{where}: the model reads only text, but `content` of a message has {other[0]!r:.80}; remove the row"
            )
        # Tools may return nothing, and a call needs no text.
        if not isinstance(content, str | list) and (content is not None or value["role"] not in ("assistant", "tool")):
            raise InputError(
                f"{where}: `content` of a chat message must be text or a list of parts, got {value!r:.80}; correct or "
                "remove the row"
            )
        # Missing fields in Arrow, which transformers also leaves out.
        messages.append({name: kept for name, kept in value.items() if kept is not None or name == "content"})
    try:
        json.dumps(messages, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: JSON cannot represent a chat message: {error}; remove the row") from error
    return messages


def split_completion(completion: Any, where: str) -> tuple[Messages, Messages]:
    """Splits a completion at the start of the assistant's first turn; checks it with `check_text`.

    Raises:
        InputError: it is neither text nor a chat with an assistant turn; the error starts with `where`.
    """
    if is_text_or_number(completion) and (text := to_text(completion)).strip():
        check_text(text, where)
        return [], [{"role": "assistant", "content": text}]
    if not isinstance(completion, list):
        raise InputError(f"{where}: expected a completion as text or chat, got {completion!r:.80}; remove the row")
    messages = read_chat(completion, where)
    check_text(messages, where)
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), None)
    if first is None:
        raise InputError(f"{where}: no message has the role assistant, so there is nothing to learn; remove the row")
    return messages[:first], messages[first:]


def is_text_part(part: Any) -> bool:
    """Returns whether a part of a message's content is text."""
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def to_messages(prompt: str | Messages, system_prompt: str | None) -> Messages:
    """Returns the prompt as a chat that starts with `system_prompt`, unless that is None."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system_prompt is None:
        return messages
    if messages[0]["role"] == "system":
        messages = messages[1:]
    return [{"role": "system", "content": system_prompt}, *messages]


def plain_text(prompt: str | Messages) -> str | None:
    """Returns the text of a prompt if it is text or a single user message, as in verl's files; otherwise None."""
    match prompt:
        case str(text) | [{"role": "user", "content": str(text)}]:
            return text
    return None


def message_texts(prompt: str | Messages) -> list[str]:
    """Returns the text of a prompt, or the texts of its messages."""
    return [prompt] if isinstance(prompt, str) else [message_text(message) for message in prompt]


def check_text(text: str | Messages, name: str) -> None:
    """Raises InputError, with `name` first in the message, if the text is too long to encode or not Unicode."""
    # A chat also contains texts in tool calls.
    whole = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
    if len(whole) > MAX_CHARACTERS:
        raise InputError(f"{name} has {len(whole):,} characters, more than {MAX_CHARACTERS:,}; remove the row")
    check_unicode(whole, name)


def check_unicode(text: str, name: str) -> None:
    """Raises InputError, with `name` first in the message, if the text has an unpaired surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{name} is not Unicode text: {error.reason}; remove the row") from error
