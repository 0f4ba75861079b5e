"""Encodes given completions: the tokens that a policy would write, and the chat template's tokens between turns."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from app.prompts.chat import plain_text, split_completion, to_messages
from app.prompts.observation_encoder import ObservationEncoder
from app.prompts.tokenizer import Tokenizer
from app.prompts.turn_end import unended_turn
from app.records.sample import Messages, Prompt, Sample, message_text
from app.records.text_format import format_count
from settings.errors import InputError
from settings.schema.data import DataSettings

log = logging.getLogger(__name__)


class CompletionEncoder:
    """Encodes given completions as the tokens that follow an encoded prompt.

    A turn consists of the tokens that the chat template writes after the start of the assistant's turn, up to its end
    token. Turns are joined by the same tokens as in a sampled conversation (`ObservationEncoder`).

    Args:
        stop: the strings of `rollout.stop`.

    Raises:
        InputError: the chat template ends turns in a way that the sampler would not recognize.
    """

    def __init__(self, tokenizer: Tokenizer, data: DataSettings, *, stop: Sequence[str] = ()) -> None:
        self.data, self._tokenizer = data, tokenizer
        if data.chat_template != "none" and (fault := unended_turn(tokenizer, stop)) is not None:
            raise InputError("; ".join(fault))

    def encode(self, prompt: Prompt, completion: Messages) -> tuple[list[int], list[bool]]:
        """Returns the token ids of a completion, and a mask that is True on those written by the assistant.

        Raises:
            InputError: the chat template rejects the chat, or the assistant's tokens cannot be told apart.
        """
        if self.data.chat_template == "none":
            ids = self._text_ids(prompt, completion)
            return ids, [True] * len(ids)
        ids, mask, between = list[int](), list[bool](), Messages()
        history = to_messages(prompt.source, self.data.system_prompt)
        for message in completion:
            if message["role"] == "assistant":
                bridge = self._observations.encode(between) if ids else []
                turn = self._turn_ids(history, message)
                ids += bridge + turn
                mask += [False] * len(bridge) + [True] * len(turn)
                between = []
            else:
                between.append(message)
            history.append(message)
        return ids, mask

    @cached_property
    def _observations(self) -> ObservationEncoder:
        return ObservationEncoder(self._tokenizer, self._tokenizer.tools)

    def _turn_ids(self, history: Messages, message: dict[str, Any]) -> list[int]:
        tokenizer = self._tokenizer
        start, whole = tokenizer.chat_ids(history), tokenizer.conversation_ids([*history, message])
        if whole[: len(start)] != start:
            same = next(i for i, token_id in enumerate(start) if whole[i : i + 1] != [token_id])
            opened, written = (tokenizer.decode_with_special_tokens(ids[same : same + 20]) for ids in (start, whole))
            raise InputError(
                "the assistant's tokens cannot be identified, because the chat template opens a turn with "
                f"{opened!r}, but writes {written!r} when the turn is complete; edit the model's chat_template.jinja, "
                "or give plain text and set data.chat_template: none"
            )
        turn = whole[len(start) :]
        end = next((place for place, token_id in enumerate(turn) if token_id in tokenizer.eos_ids), None)
        return [*turn, tokenizer.eos_ids[0]] if end is None else turn[: end + 1]

    def _text_ids(self, prompt: Prompt, messages: Messages) -> list[int]:
        tokenizer = self._tokenizer
        match plain_text(prompt.source), messages:
            case str(text), [{"role": "assistant", "content": str(completion)}]:
                start, whole = tokenizer.text_ids(text), tokenizer.text_ids(text + completion)
            case _:
                raise InputError(
                    "the completion is a chat, but data.chat_template: none has no template to render it; render it "
                    "to text, or remove that setting"
                )
        # A sampled completion never shares a token with the end of the prompt.
        ids = whole[len(start) :] if whole[: len(start)] == start else tokenizer.encode_rendered(completion)
        return ids if ids and ids[-1] in tokenizer.eos_ids else [*ids, tokenizer.eos_ids[0]]


def encode_completions(
    prompts: Sequence[Prompt], encoder: CompletionEncoder, *, max_tokens: int, places: Mapping[str, str]
) -> tuple[list[Sample], str]:
    """Returns a sample of each prompt, with the prompt's answer as its completion, and a report.

    Args:
        max_tokens: maximum number of tokens of a completion; longer ones are left out.
        places: maps the uid of a prompt to the file and line of its row, for errors.

    Raises:
        InputError: see `CompletionEncoder.encode`; or all completions are too long, or with `data.overlong_prompts:
            error` one of them is.
    """
    log.info("encoding %s completions", f"{len(prompts):,}")
    samples, lengths = list[Sample](), list[int]()
    for prompt in prompts:
        _, completion = split_completion(prompt.answer, prompt.uid)
        try:
            ids, mask = encoder.encode(prompt, completion)
        except InputError as error:
            raise InputError(f"{places.get(prompt.uid, prompt.uid)}: {error}") from error
        lengths.append(len(ids))
        last = next(message for message in reversed(completion) if message["role"] == "assistant")
        sample = Sample(
            prompt=prompt,
            sample_index=0,
            group_id=0,
            completion_ids=np.asarray(ids, np.int32),
            completion=message_text(last),
            # The packer needs logprobs and advantages; the cross-entropy reads neither.
            behavior_logprobs=np.broadcast_to(np.float32(np.nan), len(ids)),
            advantages=np.broadcast_to(np.float32(1), len(ids)),
            finish_reason="stop",
            policy_version=0,
            loss_mask=None if all(mask) else np.asarray(mask, bool),
        )
        samples += [sample] if len(ids) <= max_tokens else []
    num_dropped, drops = len(prompts) - len(samples), encoder.data.overlong_prompts != "error"
    if num_dropped and not (drops and samples):
        raise InputError(
            f"rollout.max_new_tokens = {max_tokens} is too short for {num_dropped:,} of {len(prompts):,} completions: "
            f"the shortest has {format_count(min(lengths), 'token')}, the longest {max(lengths):,}; raise it"
            + ("" if drops else ", or set data.overlong_prompts: drop")
        )
    num_learned = sum(int(sample.mask.sum()) for sample in samples)
    return samples, (
        f"completions: {len(samples):,} kept, {num_dropped:,} dropped (rollout.max_new_tokens {max_tokens}); longest "
        f"{format_count(max(lengths), 'token')}; {format_count(num_learned, 'token')} to learn"
    )
