"""Chats as the chat template of a model writes them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import encode_marked_chat, mark_control_tokens

from app.prompts.chat import is_text_part
from app.records.sample import Messages
from settings.errors import InputError

TEMPLATE_DATE = "26 Jul 2024"
"""Date for templates that print one (Llama 3's default), so that prompts do not change from day to day."""

NO_KWARGS: Mapping[str, Any] = MappingProxyType({})

PLAIN_CHAT: Messages = [{"role": role, "content": "text"} for role in ("user", "assistant", "user")]
CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
WITH_SYSTEM: Messages = [{"role": "system", "content": "text"}, *PLAIN_CHAT]
WITH_CALL: Messages = [
    *PLAIN_CHAT,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "text"},
]
TAG = re.compile(r"</?\w+>")
"""Tags such as `<think>` and `<tool_response>`, which messages may contain as they are unless they are special."""


class ChatTemplate:
    """The chat template of a tokenizer: text and ids of chats are those of transformers' `apply_chat_template`.

    Only the template inserts control tokens: the name of one in a message or a tool, such as `<|im_end|>`, is text.
    Control tokens are special tokens, those that the template writes around messages (DeepSeek's token of a user's turn
    is not special), and `chat_control_tokens` of the tokenizer's configuration. Other added tokens, such as
    `<think>` and `<tool_call>`, are those tokens wherever they occur.

    Args:
        kwargs: variables for every rendering.
    """

    def __init__(self, hf_tokenizer: PreTrainedTokenizerFast, kwargs: Mapping[str, Any] = NO_KWARGS) -> None:
        self.exists = bool(hf_tokenizer.chat_template)
        self.kwargs = dict(kwargs)
        source = str(hf_tokenizer.chat_template or "")
        self.unread_kwargs = [name for name in kwargs if not re.search(rf"\b{re.escape(name)}\b", source)]
        """Names in `kwargs` that the template does not mention, and Jinja therefore ignores."""
        self._hf_tokenizer = hf_tokenizer
        added = [t for t in hf_tokenizer.added_tokens_decoder.values() if not t.content.isspace()]
        plain = self._text_or_nothing(PLAIN_CHAT) + self._text_or_nothing(WITH_SYSTEM)
        with_call = self._text_or_nothing(WITH_CALL)
        around = [
            t
            for t in added
            if (t.content in plain and t.content not in ("<think>", "</think>"))
            or (t.content in with_call and (t.special or not TAG.fullmatch(t.content)))
        ]
        self.control_tokens = pattern_of(token.content for token in around)
        """Finds the names of the control tokens that the template writes around messages."""
        configured = hf_tokenizer.chat_control_tokens
        self._reserved = pattern_of(
            token.content
            for token in added
            if token.special or (token in around if configured is None else token.content in configured)
        )

    def text(self, messages: Messages, tools: Sequence[Mapping[str, Any]] = (), *, add_generation_prompt: bool) -> str:
        """Returns the text of a chat, in which names of control tokens in messages look like the template's own.

        With `add_generation_prompt`, it goes up to the start of the assistant's next turn.

        Args:
            tools: schemas of functions, as OpenAI defines them.

        Raises:
            InputError: the template rejects the messages.
        """
        return self._render(self._inputs(messages, tools), add_generation_prompt=add_generation_prompt)

    def ids(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] = (), *, add_generation_prompt: bool
    ) -> list[int]:
        """Returns the token ids of a chat; see `text`."""
        inputs = self._inputs(messages, tools)
        marked = self._marked(inputs)
        rendered = self._render(marked, add_generation_prompt=add_generation_prompt)
        if marked == inputs:
            # Most chats have no marks. Looking for them would take longer than encoding a short prompt.
            return self._hf_tokenizer.encode(rendered, add_special_tokens=False)
        try:
            return encode_marked_chat(self._hf_tokenizer, rendered)
        except ValueError as error:
            raise InputError(f"the model's tokenizer cannot encode a chat: {error}") from error

    @cached_property
    def opens_thinking(self) -> bool:
        """Whether the template begins the assistant's turn with `<think>`, so that the model does not write it."""
        return self.text(PLAIN_CHAT, add_generation_prompt=True).rstrip().endswith("<think>")

    def _inputs(self, messages: Messages, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        listed = {"tools": list(tools)} if tools else {}
        return {"conversation": list(messages), "date_string": TEMPLATE_DATE, **self.kwargs, **listed}

    def _marked(self, value: Any) -> Any:
        """Returns inputs of the template with marks around names of control tokens, also in keys of objects."""
        match value:
            case str():
                return mark_control_tokens(value, self._reserved)
            case Mapping():
                return {self._marked(key): self._marked(item) for key, item in value.items()}
            case list():
                return [self._marked(item) for item in self._joined(value)]
        return value

    def _joined(self, parts: list[Any]) -> list[Any]:
        """Returns parts of text as one, as templates write them, if the name of a control token is spread over them."""
        if not all(map(is_text_part, parts)):
            return parts
        texts = [part["text"] for part in parts]
        is_spread = len(self._reserved.findall("".join(texts))) != sum(len(self._reserved.findall(t)) for t in texts)
        return [{"type": "text", "text": "".join(texts)}] if is_spread else parts

    def _render(self, inputs: Mapping[str, Any], *, add_generation_prompt: bool) -> str:
        try:
            options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
            return str(self._hf_tokenizer.apply_chat_template(**inputs, **options))
        except (
            *(jinja2.TemplateError, AttributeError, LookupError, TypeError, ValueError, ArithmeticError),
            *(MemoryError, RecursionError),
        ) as error:
            roles = [message.get("role") for message in inputs["conversation"]]
            has_parts = any(isinstance(message.get("content"), list) for message in inputs["conversation"])
            hint = "; it may want text for `content`, not a list of parts" if has_parts else ""
            raise InputError(f"the model's chat template cannot render a chat of {roles}: {error}{hint}") from error

    def _text_or_nothing(self, messages: Messages) -> str:
        """Returns what the template writes for messages; nothing if it rejects them."""
        try:
            return self.text(messages, add_generation_prompt=True) if self.exists else ""
        except InputError:
            return ""


def pattern_of(names: Iterable[str]) -> re.Pattern[str]:
    """Returns what finds any of the names, the longest first; nothing if there is none."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")
