"""Reads the texts of samples written by grpo or other programs, and encodes them as token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from app.prompts.chat import check_text, read_messages
from app.prompts.encode import encode_prompt
from app.prompts.tokenizer import Tokenizer
from app.records.sample import Messages
from settings.errors import InputError
from settings.schema.data import DataSettings

TextName = Literal["prompt", "completion"]

VERL_NAMES: Mapping[TextName, str] = {"prompt": "input", "completion": "output"}
"""Maps the field of a text to the field in verl's rollout dumps, which is read if the first is missing."""


def read_text(record: Mapping[str, Any], name: TextName, *, where: str) -> tuple[str, str | Messages | None]:
    """Returns the location of a prompt or completion, for error messages, and its text; None if it is missing.

    A prompt may also be chat messages.

    Raises:
        InputError: the field is neither text nor chat messages; the error starts with `where`.
    """
    field = next((field for field in (name, VERL_NAMES[name]) if record.get(field) is not None), name)
    where = f"{where}: {field}"
    match record.get(field):
        case None | str() as text:
            return where, text
        case list() as messages if name == "prompt":
            return where, read_messages(messages, where)
        case [{"role": "assistant", "content": str(text)}]:
            return where, text
        case value:
            chat = "chat messages" if name == "prompt" else "a list with one message of the assistant"
            raise InputError(f"{where}: expected a string or {chat}, got {value!r:.80}")


class SampleEncoder:
    """Adds token ids to samples that have only text.

    A string is encoded as it is; names of control tokens become these tokens, because a prompt may be a rendered chat.
    Chat prompts are encoded as in a rollout. Of a completion that is an assistant's message, only the content is
    encoded. No EOS token is added to a completion.

    Args:
        load_tokenizer: called when the first text is encoded or checked.
        data: settings for encoding chat prompts.
    """

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], data: DataSettings) -> None:
        self._load_tokenizer = load_tokenizer
        self._data = data
        self.tokenizer: Tokenizer | InputError | None = None
        """The tokenizer, or the error if it cannot be loaded; None until it is needed."""

    def with_token_ids(self, record: Mapping[str, Any], *, where: str) -> dict[str, Any]:
        """Returns the record, with missing token ids of prompt and completion encoded from their texts.

        Raises:
            InputError: ids and text are missing, or the text cannot be encoded; the error starts with `where`.
        """
        ids = {}
        for name in VERL_NAMES:
            if record.get(f"{name}_token_ids") is not None:
                continue
            place, text = read_text(record, name, where=where)
            if text is None:
                raise InputError(
                    f"{where}: missing {name}_token_ids or {name}; a sample needs token ids, or text for the "
                    "tokenizer of model.path"
                )
            ids[f"{name}_token_ids"] = self._encode(text, where=place)
        return {**record, **ids}

    def _encode(self, text: str | Messages, *, where: str) -> list[int]:
        check_text(text, where)
        tokenizer = self._use_tokenizer()
        if isinstance(tokenizer, InputError):
            raise InputError(
                f"{where} is text, but the tokenizer of model.path cannot encode it: {tokenizer}, or add the token ids"
            )
        if isinstance(text, str):
            return tokenizer.encode_rendered(text)
        if not tokenizer.template.exists and self._data.chat_template != "none":
            raise InputError(
                f"{where} is a chat, but the tokenizer of model.path has no chat template; render it to a string, or "
                "add chat_template.jinja"
            )
        return encode_prompt(text, tokenizer, self._data, where=where)

    def _use_tokenizer(self) -> Tokenizer | InputError:
        if self.tokenizer is None:
            try:
                self.tokenizer = self._load_tokenizer()
            except InputError as error:
                self.tokenizer = error
        return self.tokenizer

    def check_text_of_ids(self, record: Mapping[str, Any], *, where: str) -> None:
        """Checks that a completion's ids and text match; checks nothing if one is missing or there is no tokenizer.

        Raises:
            InputError: the text neither equals the decoded ids nor is encoded as the ids.
        """
        match record:
            # With several turns, the text is the last one's.
            case {
                "completion_token_ids": list(ids),
                "completion": str(text),
                "episode": {"turns": [*_, {"start": int(start), "end": int(end)}]},
            }:
                ids, tokenizer = ids[start:end], self._use_tokenizer()
            case {
                "completion_token_ids": list(ids),
                "completion": str(text) | [{"role": "assistant", "content": str(text)}],
            }:
                tokenizer = self._use_tokenizer()
            case _:
                return
        if isinstance(tokenizer, InputError):
            return
        decoded = tokenizer.decode(ids)
        check_text(text, f"{where}: completion")
        # Some tokenizers normalize a text, so that it differs from the decoding of its own ids.
        if text not in (decoded, tokenizer.decode_with_special_tokens(ids)) and tokenizer.encode_rendered(text) != ids:
            raise InputError(
                f"{where}: completion: {text!r:.60} differs from the decoded completion_token_ids, {decoded!r:.60}; "
                "remove the wrong field, or set model.path to the model whose tokenizer produced the ids"
            )
