"""The tokens between two policy turns: the observation as rendered by the chat template.

Turns themselves are never decoded and re-encoded. The text after a turn is taken from the rendering of a dummy chat,
after the end of its last turn, so it does not depend on the policy's text. Thinking that the template would remove from
earlier turns is kept as the policy wrote it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from app.prompts.tokenizer import Tokenizer
from app.prompts.turn_end import DUMMY, MARK, render_turn
from app.records.sample import Messages
from settings.errors import InputError

PROBE = "dummyobservation"
EMPTY_THINKING = re.compile(r"<think>\s*</think>\s*")
"""Empty thinking block, which Qwen3's template adds only to the last turn."""
MAX_TOKEN_CHARACTERS = 128
"""Assumed maximum number of characters in a token: texts are cut to this times the token limit before encoding."""


class ObservationEncoder:
    """Encodes observations, with the chat template's tokens that join the turns of a conversation.

    Args:
        tools: OpenAI schemas of the functions listed in the prompts; their results are `tool` messages.

    Raises:
        InputError: the chat template does not support several turns, tools, or a role for their results.
    """

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._tokenizer, self._template, self._tools = tokenizer, tokenizer.template, tools
        self._encode_start = lru_cache(tokenizer.encode_rendered)
        self._check_role = lru_cache(self._check_observations)
        written, end = render_turn(tokenizer, tools)
        match = tokenizer.eos_names.search(end)
        if end and not match:
            raise InputError(
                f"the chat template writes {end!r} after a turn, which contains no EOS token of the model; set "
                "model.eos_tokens to the token that ends a turn"
            )
        self._start = written + end[: match.end() if match else 0]
        """The template's text for the dummy, up to and including the token that ends its turn."""
        if tools:
            self._check_tools()
        else:
            self._check_role("user")

    def encode(self, messages: Messages) -> list[int]:
        """Returns the ids between a turn's last sampled token and the first token of the next turn.

        They equal the chat template's ids for the whole conversation: separators, the messages and the start of the
        assistant's turn. Names of control tokens in the messages are encoded as text.

        Args:
            messages: messages with the roles `tool` and `user`.

        Raises:
            InputError: the template rejects the messages, or changes the turns before them.
        """
        for message in messages:
            self._check_role(message["role"])
        return self._render(messages)[1]

    def fitted(self, messages: Messages, max_tokens: int | None) -> Messages:
        """Returns the messages, cut to `max_tokens` tokens of text in total; None = no limit.

        A note for the policy replaces the cut text; neither the note nor the template's tokens count.
        """
        if max_tokens is None:
            return messages
        fitted, left = [], max_tokens
        for message in messages:
            text = message["content"]
            part = text[: MAX_TOKEN_CHARACTERS * left]
            while (length := len(self._tokenizer.encode(part))) > left:
                part = part[: len(part) * left // length]
            left -= length
            note = "" if part == text else f"\n[cut: {len(text) - len(part)} more characters]"
            fitted.append(message | {"content": part + note})
        return fitted

    def _render(self, messages: Messages) -> tuple[str, list[int]]:
        """Returns the text between two turns, including control tokens, and its ids."""
        chat = [*DUMMY, *messages]
        text = self._template.text(chat, self._tools, add_generation_prompt=True)
        ids = self._template.ids(chat, self._tools, add_generation_prompt=True)
        end = text.find(MARK) + len(self._start) - self._start.rindex(MARK)
        if EMPTY_THINKING.sub("", text[:end]) != EMPTY_THINKING.sub("", self._start):
            where = len(os.path.commonprefix([self._start, text]))  # noqa: RUF071 -- no paths
            raise InputError(
                "the chat template changes earlier turns when messages follow, so the policy would not see "
                f"what it wrote: {self._start[where : where + 60]!r} becomes {text[where : where + 60]!r}; use a "
                "model with another template, or an environment of one turn"
            )
        start = self._encode_start(text[:end])
        if ids[: len(start)] != start:
            raise InputError(
                "the tokenizer merges the end of a turn and the text after it into one token; use a model with another "
                "template"
            )
        if ids[len(start) : len(start) + 1] in ([token_id] for token_id in self._tokenizer.eos_ids):
            raise InputError(
                "the chat template starts an observation with a token that also ends a turn, so that token would "
                "occur twice; use a model with another template"
            )
        return text[end:], ids[len(start) :]

    def _check_tools(self) -> None:
        """Raises InputError unless the template lists the tools and has a role for their results."""
        if self._start == self._template.text(DUMMY, add_generation_prompt=False)[: len(self._start)]:
            raise InputError(
                "env.tools: the model's chat template does not list tools in a prompt; use a model whose template "
                "does, or an environment (env.source) whose opening explains how to call them"
            )
        try:
            self._check_role("tool")
        except InputError as error:
            reason = str(error).partition("; ")[0]
            raise InputError(
                f"env.tools: the model's chat template has no role for tool results ({reason}); use a model whose "
                "template has one, or an environment (env.source) that answers with user messages"
            ) from error

    def _check_observations(self, role: str) -> None:
        """Checks that the template renders messages with this role, and that their text never becomes control tokens.

        Raises:
            InputError: the template leaves such messages out, or encodes a control token's name as the token.
        """
        text, plain = self._render([{"role": role, "content": PROBE}])
        if PROBE not in text:
            raise InputError(
                f"the model's chat template leaves out messages with role {role}; use a model whose template shows "
                "them, or an environment (env.source) without them"
            )
        special = self._tokenizer.special_ids
        spelled = "".join(self._tokenizer.decode_with_special_tokens([token_id]) for token_id in sorted(special))
        _, ids = self._render([{"role": role, "content": PROBE + spelled}])
        if len(special.intersection(ids)) != len(special.intersection(plain)):
            raise InputError(
                f"the model's chat template turns the text of {role} messages into control tokens; use a model with "
                "another template"
            )
