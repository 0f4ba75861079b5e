"""Texts of samples that any program wrote, and their token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from app.prompts.dataset import read_messages
from app.prompts.encode import check_text, to_messages
from app.prompts.tokenizer import Tokenizer
from app.records.sample import Sample
from settings.errors import InputError

SYNONYMS = {"prompt": "input", "completion": "output", "answer": "gts"}
"""Our names of texts, and those in verl's rollout dumps."""


def read_texts(record: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Returns the record with its texts under our names: `completion` a string, `prompt` also chat messages.

    Raises:
        InputError: a prompt or completion is neither text nor chat messages; the error starts with `where`.
    """
    fields = dict(record)
    for name, theirs in SYNONYMS.items():
        given = name if record.get(name) is not None else theirs
        # verl's `gts` may be anything, and only some rewards read an answer.
        if (value := record.get(given)) is None or (given == "gts" and not isinstance(value, str)):
            continue
        fields[name] = value
        if name == "prompt" and isinstance(value, list):
            fields[name] = read_messages(value, f"{where}: {given}")
        elif name == "completion" and isinstance(value, list):
            match value:
                case [{"role": "assistant", "content": str(text)}]:
                    fields[name] = text
                case _:
                    raise InputError(
                        f"{where}: {given}: expected a string or a list with one message of the assistant, got "
                        f"{value!r:.80}; score each of its turns as a sample of its own"
                    )
        elif name != "answer" and not isinstance(value, str):
            raise InputError(f"{where}: {given}: expected text or chat messages, got {value!r:.40}")
    return fields


class SampleEncoder:
    """Gives samples without token ids those of their texts.

    Texts are encoded as they are; names of control tokens are those tokens, since a prompt may be a rendered chat.
    Messages are encoded as a rollout would encode them, and an assistant's message as its content alone. No
    end-of-sequence token is added to a completion.

    Args:
        load_tokenizer: called when the first text is read.
        system_prompt: `data.system_prompt`, the first message of chats.
    """

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], *, system_prompt: str | None) -> None:
        self._load_tokenizer = load_tokenizer
        self._system_prompt = system_prompt

    def with_token_ids(self, record: Mapping[str, Any], *, where: str) -> dict[str, Any]:
        """Returns the record, with the token ids of its texts where it has none.

        Raises:
            InputError: it has neither ids nor text, or the text cannot be encoded; the error starts with `where`.
        """
        fields = read_texts(record, where=where)
        ids = {}
        for name in ("prompt", "completion"):
            if record.get(f"{name}_token_ids") is not None:
                continue
            if fields.get(name) is None:
                raise InputError(
                    f"{where}: missing {name}_token_ids or {name}; a sample needs token ids, or text that the "
                    "tokenizer of model.path encodes"
                )
            ids[f"{name}_token_ids"] = self._encode(fields[name], where=f"{where}: {name}")
        return {**record, **ids}

    def _encode(self, text: Any, *, where: str) -> list[int]:
        check_text(text, None, where=where)
        if isinstance(self._tokenizer, InputError):
            raise InputError(
                f"{where} is text, but model.path has no tokenizer for it; add the token ids ({self._tokenizer})"
            )
        if isinstance(text, str):
            return self._tokenizer.encode_rendered(text)
        if not self._tokenizer.has_chat_template:
            raise InputError(
                f"{where} is a chat, but the tokenizer of model.path has no chat template; render it to a string, or "
                "add chat_template.jinja"
            )
        try:
            return self._tokenizer.chat_ids(to_messages(text, self._system_prompt))
        except InputError as error:
            raise InputError(f"{where}: {error}") from error

    @cached_property
    def _tokenizer(self) -> Tokenizer | InputError:
        try:
            return self._load_tokenizer()
        except InputError as error:
            return error

    def check_text_of_ids(self, sample: Sample, record: Mapping[str, Any], *, where: str) -> None:
        """Checks that a completion given as ids and as text is the same, if there is a tokenizer to tell.

        Raises:
            InputError: the text is not the decoding of the ids, with or without control tokens.
        """
        text = read_texts(record, where=where).get("completion")
        if text is None or record.get("completion_token_ids") is None or isinstance(self._tokenizer, InputError):
            return
        ids = sample.completion_ids.tolist()
        decoded = self._tokenizer.decode(ids)
        if text in (decoded, self._tokenizer.decode_with_special_tokens(ids)):
            return
        check_text(text, None, where=f"{where}: completion")
        # Some tokenizers normalize a text, so that it is not the decoding of its own ids.
        if self._tokenizer.encode_rendered(text) != ids:
            pairs = enumerate(zip(text, decoded, strict=False))
            start = next((i for i, (a, b) in pairs if a != b), min(len(text), len(decoded)))
            raise InputError(
                f"{where}: completion: {text[start:]!r:.60} from character {start} is not what completion_token_ids "
                f"decode to, {decoded[start:]!r:.60}; remove the field that is wrong, or choose the model.path whose "
                "tokenizer made the ids"
            )
