"""The tokens between two turns of the policy: what the chat template writes around an observation.

The turns themselves are never decoded and encoded again. What follows a turn is taken out of the rendering of a dummy
chat, behind the end of its last turn, so it does not depend on what the policy wrote.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from app.prompts.chat import MAX_CHARACTERS
from app.prompts.tokenizer import Tokenizer
from app.records.sample import Messages
from settings.errors import InputError

MARK = "dummyturnends"
"""End of the dummy's turn, before its end-of-turn token."""
PROBE, THOUGHT = "dummyobservation", "dummythought"
EMPTY_THINKING = re.compile(r"<think>\s*</think>\s*")
"""What Qwen3's template adds to the last turn only."""
MAX_TOKEN_CHARACTERS = 128
"""Characters for each token of a limit, above which a text is cut before it is encoded."""


class DummyTurn(NamedTuple):
    """A chat of a question and a turn of the assistant."""

    messages: list[dict[str, Any]]
    text: str
    """What the template writes for it, up to and with the token that ends the turn."""


class TurnBridge:
    """Joins the turns of a conversation by the chat template's own tokens.

    Args:
        tools: schemas of functions, as OpenAI defines them, that the prompts list; their results are `tool` messages.

    Raises:
        InputError: the chat template cannot be used for several turns, takes no tools or has no role for their results.
    """

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._tokenizer, self._tools = tokenizer, tools
        self._needs_calls = False
        self._dummy = lru_cache(self._make_dummy)
        self._encode_start = lru_cache(tokenizer.encode_rendered)
        self._no_tool_role = self._reason_against_tool_role()
        if tools:
            self._check_tools()
        else:
            self._check_role("user")
        self.notes: tuple[str, ...] = self._thinking_notes()
        """What users should know about the template; one sentence each."""

    def ids(self, messages: Messages) -> list[int]:
        """Returns the ids between a turn's last token, which the policy drew, and the first one of its next turn.

        They are those of the chat template for the whole conversation, with separators, the messages and the start of
        the assistant's turn. Names of control tokens in the messages are encoded as text.

        Args:
            messages: of the roles `tool` and `user`; a `tool` message may have the `name` of the tool.

        Raises:
            InputError: the template rejects the messages, or writes turns before them anew.
        """
        if self._no_tool_role and any(message["role"] == "tool" for message in messages):
            raise InputError(self._no_tool_role)
        return self._render(messages)[1]

    def fitted(self, messages: Messages, max_tokens: int | None) -> Messages:
        """Returns the messages, the longest ones cut at their ends to `max_tokens` tokens of text together.

        A note for the policy stands where a text is cut; neither it nor the template's tokens count. None = no limit
        but a million characters in each message. Halves of surrogate pairs, which cannot be encoded, become "?".
        """
        limit = MAX_CHARACTERS if max_tokens is None else min(MAX_CHARACTERS, MAX_TOKEN_CHARACTERS * max_tokens)
        whole = [message["content"].encode(errors="replace").decode() for message in messages]
        texts = [text[:limit] for text in whole]
        if max_tokens is not None:
            lengths = [len(self._tokenizer.encode(text)) for text in texts]
            left = max_tokens
            # Short texts stay whole, long ones share what is left.
            for number, index in enumerate(sorted(range(len(texts)), key=lengths.__getitem__)):
                texts[index] = self._cut(texts[index], lengths[index], share := left // (len(texts) - number))
                left -= min(lengths[index], share)
        return [
            message | {"content": text if text == full else f"{text}\n[cut: {len(full) - len(text)} more characters]"}
            for message, text, full in zip(messages, texts, whole, strict=True)
        ]

    def _cut(self, text: str, length: int, max_tokens: int) -> str:
        while length > max_tokens:
            text = text[: len(text) * max_tokens // length]
            length = len(self._tokenizer.encode(text))
        return text

    def _render(self, messages: Messages) -> tuple[str, list[int]]:
        """Returns text (with control tokens, spelled ones included) and ids of the bridge."""
        names = [message.get("name", "tool") for message in messages if message["role"] == "tool"]
        if self._needs_calls:
            call_ids = map(_call_id, range(len(names)))
            messages = [{"tool_call_id": next(call_ids), **m} if m["role"] == "tool" else m for m in messages]
        dummy = self._dummy(tuple(names) if self._needs_calls else ())
        text, ids = self._tokenizer.render([*dummy.messages, *messages], self._tools, add_generation_prompt=True)
        start_text = self._start_text(dummy, text)
        start = self._encode_start(start_text)
        if ids[: len(start)] != start:
            raise InputError("the chat template joins the end of a turn and what follows in one token; use another one")
        if ids[len(start) : len(start) + 1] in ([token_id] for token_id in self._tokenizer.eos_ids):
            raise InputError(
                "the chat template starts an observation with a token that also ends a turn, so it would be there "
                "twice; use another one"
            )
        return text[len(start_text) :], ids[len(start) :]

    def _start_text(self, dummy: DummyTurn, text: str) -> str:
        """Returns the part of a rendered chat that belongs to the dummy."""
        if text.startswith(dummy.text):
            return dummy.text
        end = text.find(MARK) + len(dummy.text) - dummy.text.rindex(MARK)
        if EMPTY_THINKING.sub("", text[:end]) == EMPTY_THINKING.sub("", dummy.text):
            return text[:end]
        where = len(os.path.commonprefix([dummy.text, text]))  # noqa: RUF071 -- no paths
        raise InputError(
            "the chat template writes earlier turns anew when messages follow, so that the policy would not see what "
            f"it wrote: {dummy.text[where : where + 60]!r} becomes {text[where : where + 60]!r}; use another template, "
            "or an environment of one turn"
        )

    def _make_dummy(self, tool_names: tuple[str, ...]) -> DummyTurn:
        """Returns the dummy chat, whose turn consists of calls of these tools, or of text if there are none."""
        turn: dict[str, Any] = {"role": "assistant", "content": MARK}
        if tool_names:
            arguments = [{}] * (len(tool_names) - 1) + [{"x": MARK}]
            turn = {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"id": _call_id(i), "type": "function", "function": {"name": name, "arguments": arguments[i]}}
                    for i, name in enumerate(tool_names)
                ],
            }
        messages = [{"role": "user", "content": "Q"}, turn]
        text = self._tokenizer.render(messages, self._tools, add_generation_prompt=False).text
        if MARK not in text:
            raise InputError("the chat template leaves out what the assistant writes; use another one")
        end = text.rindex(MARK) + len(MARK)
        if match := self._tokenizer.eos_names.search(text, end):
            end = match.end()
        elif text[end:]:
            raise InputError(
                f"the chat template writes {text[end:]!r} behind a turn, but no end-of-sequence token of the model; "
                "add the token that ends a turn to eos_token_id of generation_config.json"
            )
        return DummyTurn(messages, text[:end])

    def _check_tools(self) -> None:
        """Raises InputError unless the template lists the tools and has a role for their results."""
        question = [{"role": "user", "content": "Q"}]
        with_tools, without = (
            self._tokenizer.render(question, tools, add_generation_prompt=True).text for tools in (self._tools, ())
        )
        if with_tools == without:
            raise InputError(
                "env.tools: the model's chat template does not list tools in a prompt; use a model whose template "
                "does, or an environment (env.source) whose opening tells how to call them"
            )
        if self._no_tool_role:
            raise InputError(self._no_tool_role)

    def _reason_against_tool_role(self) -> str | None:
        """Returns why messages of the role `tool` cannot be used, or None; finds out whether they need calls."""
        reasons = []
        for self._needs_calls in (False, True):
            try:
                self._check_role("tool")
            except InputError as error:
                reasons.append(error)
            else:
                return None
        self._needs_calls = False
        return (
            f"the model's chat template has no role for results of tools ({reasons[0]}); use a model whose template "
            "has one, or an environment (env.source) that answers with user messages"
        )

    def _check_role(self, role: str) -> None:
        """Raises InputError unless an observation of this role appears, and spelled control tokens in it as text."""
        text, plain = self._render([{"role": role, "content": PROBE}])
        if PROBE not in text:
            raise InputError(f"the chat template leaves out messages of the role {role}; use another one")
        special = self._tokenizer.special_ids
        spelled = "".join(self._tokenizer.decode_with_special_tokens([token_id]) for token_id in sorted(special))
        _, ids = self._render([{"role": role, "content": PROBE + spelled}])
        if len(special.intersection(ids)) != len(special.intersection(plain)):
            raise InputError(
                f"the chat template turns the text of {role} messages into control tokens; use another one"
            )

    def _thinking_notes(self) -> tuple[str, ...]:
        turn = {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\n{MARK}"}
        roles = ["user"] if self._no_tool_role or self._needs_calls else ["user", "tool"]
        chats = ([{"role": "user", "content": "Q"}, turn, {"role": role, "content": PROBE}] for role in roles)
        texts = (self._tokenizer.render(chat, self._tools, add_generation_prompt=True).text for chat in chats)
        removing = [role for role, text in zip(roles, texts, strict=True) if THOUGHT not in text]
        note = (
            f"the chat template removes the thinking of earlier turns when a message of the role "
            f"{' or '.join(removing)} follows; samples keep it, as the policy wrote it, so in other programs that use "
            "the template the model does not see what it learned to see"
        )
        return (note,) if removing else ()


def _call_id(number: int) -> str:
    """Returns an id of nine letters and digits, as Mistral's templates demand."""
    return f"call{number:05}"
