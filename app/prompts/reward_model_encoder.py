"""Encodes prompts with their completions as the input of a reward model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from app.model.io.model_files import ModelFiles
from app.prompts.chat import plain_text, to_messages
from app.prompts.chat_template import ChatTemplate
from app.prompts.tokenizer import encoding_fingerprint, load_fast_tokenizer, whole_text_ids
from app.records.sample import Messages, Prompt
from settings.errors import InputError
from settings.schema.data import DataSettings


class ConversationEncoder:
    """Encodes a prompt and its completion for a sequence classification model.

    With a chat template, the completion becomes the assistant's turn of the chat. Without one, or with
    `data.chat_template: none`, both texts are concatenated, with the tokenizer's special tokens. The ids end at the
    last token that is not the model's `pad_token_id`, since transformers reads the score there.

    Raises:
        InputError: the model has no tokenizer, or the tokenizer's ids exceed its vocabulary.
    """

    def __init__(self, files: ModelFiles, data: DataSettings) -> None:
        hf_tokenizer = load_fast_tokenizer(files)
        # Callers check the context length; transformers would only warn.
        hf_tokenizer.model_max_length = 2**31
        self._hf_tokenizer, self._template = hf_tokenizer, ChatTemplate(hf_tokenizer)
        self._pad_id = files.config.get("pad_token_id")
        self._data = data

    @property
    def encoding_fingerprint(self) -> str:
        """Hexadecimal SHA-256 of the tokenizer's vocabulary, merges and splitting rules."""
        return encoding_fingerprint(self._hf_tokenizer)

    def encode(self, prompt: Prompt, completion: str) -> Int32[np.ndarray, "T"]:
        """Returns the token ids of a prompt and its completion, without trailing padding; never empty.

        Raises:
            InputError: the template rejects the chat, the prompt is a chat and there is no template, or there are no
                tokens.
        """
        ids = np.asarray(self._encode_untrimmed(prompt.source, completion), np.int32)
        if not len(ids):
            raise InputError(
                f"{prompt.uid}: the tokenizer of reward.model returns no tokens for this sample; remove the row"
            )
        read = np.flatnonzero(ids != self._pad_id) if isinstance(self._pad_id, int) else np.asarray([len(ids) - 1])
        return ids[: read[-1] + 1] if len(read) else ids[:1]

    def _encode_untrimmed(self, source: str | Messages, completion: str) -> Sequence[int]:
        if self._data.chat_template == "none" and (text := plain_text(source)) is not None:
            special = [t.content for t in self._hf_tokenizer.added_tokens_decoder.values() if t.special]
            if not any(name in completion for name in special):
                return whole_text_ids(self._hf_tokenizer, text + completion)
            # The policy's text contains no control tokens, only their names.
            written = self._hf_tokenizer.encode(completion, add_special_tokens=False, split_special_tokens=True)
            return [*whole_text_ids(self._hf_tokenizer, text), *written]
        if self._template.exists:
            messages = [*to_messages(source, self._data.system_prompt), {"role": "assistant", "content": completion}]
            return self._template.ids(messages, add_generation_prompt=False)
        if not isinstance(source, str) or self._data.system_prompt is not None:
            raise InputError(
                "the tokenizer of reward.model has no chat template, so prompts must be plain text, and "
                "data.system_prompt null; add chat_template.jinja to the model, or choose another one"
            )
        return self._hf_tokenizer.encode(source + completion, split_special_tokens=True)
