"""Renders and encodes chats with a model's chat template."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerFast

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
"""Tags such as `<think>` and `<tool_response>`, which messages may contain unless they are special tokens."""
MARKS = ("\U000f0000", "\U000f0001")
"""Private-use characters placed around the name of a control token in the template's input."""


class ChatTemplate:
    """A tokenizer's chat template, which renders the same text and ids as transformers' `apply_chat_template`.

    Only the template inserts control tokens: their names in a message or a tool, such as `<|im_end|>`, become text.
    Control tokens are special tokens, tokens that the template writes around messages (DeepSeek's user token is not
    special), and `chat_control_tokens` of the tokenizer's configuration. Other added tokens, such as `<think>` and
    `<tool_call>`, are recognized everywhere.

    Args:
        kwargs: variables for every rendering.
    """

    def __init__(self, hf_tokenizer: PreTrainedTokenizerFast, kwargs: Mapping[str, Any] = NO_KWARGS) -> None:
        self.exists = bool(hf_tokenizer.chat_template)
        self.kwargs = dict(kwargs)
        source = str(hf_tokenizer.chat_template or "")
        self.unread_kwargs = [name for name in kwargs if not re.search(rf"\b{re.escape(name)}\b", source)]
        """Names in `kwargs` that the template does not mention and Jinja therefore ignores."""
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
        """Matches the names of the control tokens that the template writes around messages."""
        configured = hf_tokenizer.init_kwargs.get("chat_control_tokens")
        self._reserved = pattern_of(
            token.content
            for token in added
            if token.special or (token in around if configured is None else token.content in configured)
        )
        names = pattern_of(hf_tokenizer.added_tokens_encoder)
        self._marked_name = re.compile(f"{MARKS[0]}({names.pattern}){MARKS[1]}|[{''.join(MARKS)}]")

    def text(self, messages: Messages, tools: Sequence[Mapping[str, Any]] = (), *, add_generation_prompt: bool) -> str:
        """Returns the text of a chat, in which control tokens cannot be distinguished from their names in messages.

        With `add_generation_prompt`, it ends with the start of the assistant's next turn.

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
            return self._encode_rendered(rendered)
        # Text and names alternate; a name is None where the template separated a mark from it.
        first, *others = self._marked_name.split(rendered)
        ids = self._encode_rendered(first)
        newline = self._encode_rendered("\n")
        for index, piece in enumerate(others):
            if not piece:
                continue
            is_name = index % 2 == 0
            encode = self._encode_as_text if is_name else self._encode_rendered
            # SentencePiece adds a space at the start of a text, but not after a newline.
            behind = encode(f"\n{piece}")
            piece_ids = behind[len(newline) :] if behind[: len(newline)] == newline else encode(piece)
            if is_name and self._hf_tokenizer.convert_tokens_to_ids(piece) in piece_ids:
                raise InputError(
                    f"a message contains {piece!r}, which the model's tokenizer can encode only as a control token, "
                    "not as text; remove it from the data, or use another model"
                )
            ids += piece_ids
        return ids

    def _encode_rendered(self, text: str) -> list[int]:
        return self._hf_tokenizer.encode(text, add_special_tokens=False)

    def _encode_as_text(self, text: str) -> list[int]:
        """Returns the ids of text, with names of added tokens, special or not, encoded as plain text."""
        backend = self._hf_tokenizer.backend_tokenizer
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        words = [text]
        if backend.pre_tokenizer is not None:
            words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in backend.model.tokenize(word)]

    @cached_property
    def opens_thinking(self) -> bool:
        """Whether the template begins the assistant's turn with `<think>`, so that the model does not write it."""
        return self.text(PLAIN_CHAT, add_generation_prompt=True).rstrip().endswith("<think>")

    def _inputs(self, messages: Messages, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        listed = {"tools": list(tools)} if tools else {}
        return {"conversation": list(messages), "date_string": TEMPLATE_DATE, **self.kwargs, **listed}

    def _marked(self, value: Any) -> Any:
        """Returns inputs of the template with marks around names of control tokens, even in the keys of objects."""
        match value:
            case str():
                # Marks in the input would be mistaken for ours.
                return self._reserved.sub("\\g<0>".join(MARKS), value.translate(dict.fromkeys(map(ord, MARKS))))
            case Mapping():
                return {self._marked(key): self._marked(item) for key, item in value.items()}
            case list():
                return [self._marked(item) for item in self._joined(value)]
        return value

    def _joined(self, parts: list[Any]) -> list[Any]:
        """Joins text parts, as templates do, if the name of a control token spans several of them."""
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
        """Returns the template's text for messages; empty if it rejects them."""
        try:
            return self.text(messages, add_generation_prompt=True) if self.exists else ""
        except InputError:
            return ""


def pattern_of(names: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern that matches any of the names, longest first; without names, it matches nothing."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")
