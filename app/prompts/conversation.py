"""Prompts with their completions, as token ids of a model that reads whole conversations: a reward model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32
from transformers import PreTrainedTokenizerFast

from app.model.io.model_files import ModelFiles
from app.prompts.encode import to_messages
from app.prompts.tokenizer import chat_ids, load_fast_tokenizer
from app.records.sample import Messages, Prompt
from settings.errors import InputError


class ConversationEncoder:
    """What a sequence classification model reads of a prompt and its completion.

    With a chat template that is the chat, the completion as the assistant's turn; without one, both texts joined, and
    the special tokens that the tokenizer adds. Either way it ends where transformers takes the score: at the last
    token that is not the configuration's `pad_token_id`.

    Raises: InputError where the tokenizer has ids that the model has not.
    """

    def __init__(self, hf_tokenizer: PreTrainedTokenizerFast, files: ModelFiles, *, system_prompt: str | None) -> None:
        hf_tokenizer.model_max_length = (
            2**31
        )  # The context is checked by whoever knows it; transformers would only warn.
        self._hf_tokenizer = hf_tokenizer
        self._pad_id = files.config.get("pad_token_id")
        self._system_prompt = system_prompt
        largest, num_rows = max(hf_tokenizer.get_vocab().values()), files.config.get("vocab_size")
        if isinstance(num_rows, int) and largest >= num_rows:
            raise InputError(
                f"{files.path}: the tokenizer has ids up to {largest}, but the model's vocab_size is {num_rows}"
            )

    @property
    def vocab(self) -> dict[str, int]:
        return self._hf_tokenizer.get_vocab()

    def encode(self, prompt: Prompt, completion: str) -> Int32[np.ndarray, "T"]:
        """At least one.

        Raises: InputError where the template refuses the chat, or there is none for a prompt that is one.
        """
        ids = np.asarray(self._encode_untrimmed(prompt.source, completion), np.int32)
        if not len(ids):
            raise InputError(f"{prompt.uid}: the tokenizer makes no tokens of this prompt and its completion")
        read = np.flatnonzero(ids != self._pad_id) if isinstance(self._pad_id, int) else np.asarray([len(ids) - 1])
        return ids[: read[-1] + 1] if len(read) else ids[:1]

    def _encode_untrimmed(self, source: str | Messages, completion: str) -> Sequence[int]:
        if self._hf_tokenizer.chat_template:
            messages = [*to_messages(source, self._system_prompt), {"role": "assistant", "content": completion}]
            return chat_ids(self._hf_tokenizer, messages, add_generation_prompt=False)
        if not isinstance(source, str) or self._system_prompt is not None:
            raise InputError(
                "its tokenizer has no chat template, so it can only read prompts that are plain text; add "
                "chat_template.jinja, or choose another model"
            )
        return self._hf_tokenizer.encode(source + completion, split_special_tokens=True)


def load_conversation_encoder(files: ModelFiles, *, system_prompt: str | None) -> ConversationEncoder:
    """Of an opened model.

    Raises: InputError where it has no tokenizer, or none that fits it.
    """
    return ConversationEncoder(load_fast_tokenizer(files), files, system_prompt=system_prompt)
