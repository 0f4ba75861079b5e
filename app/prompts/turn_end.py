"""Checks whether the sampler also stops where the chat template ends a turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from app.prompts.tokenizer import Tokenizer
from app.records.sample import Messages, Sample
from settings.errors import InputError

OVERLOOKED_SHARE = 0.1
"""Fraction of samples above which a warning is shown; an untrained model may write any token now and then."""
MARK = "dummyturnends"
DUMMY: Messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": MARK}]
"""A chat whose last turn is easy to find in a rendering."""


def render_turn(tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Renders `DUMMY` with the chat template, and splits the text after the assistant's content.

    Raises:
        InputError: the template leaves out this content, or rejects the chat.
    """
    start, mark, end = tokenizer.template.text(DUMMY, tools, add_generation_prompt=False).rpartition(MARK)
    if not mark:
        raise InputError("the model's chat template leaves out the assistant's text; use another model")
    return start + mark, end


def unended_turn(tokenizer: Tokenizer, stop: Sequence[str]) -> tuple[str, str] | None:
    """Returns the problem and what to set if the sampler would not stop where the chat template ends a turn; else None.

    There is no problem if the template writes nothing after a turn, since any EOS token can end it, or if the template
    rejects a chat that ends with the assistant's turn.

    Args:
        stop: the strings of `rollout.stop`.
    """
    try:
        _, end = render_turn(tokenizer, tokenizer.tools)
    except InputError:
        return None
    if not end.strip() or tokenizer.eos_names.search(end) or any(one in end for one in stop):
        return None
    ids = tokenizer.encode_rendered(end.strip())
    control = next((token_id for token_id in ids if token_id in tokenizer.special_ids or len(ids) == 1), None)
    way_out = f"rollout.stop: [{end.strip()!r}]" if control is None else set_eos_token(tokenizer, control)
    known = ", ".join(tokenizer.decode_with_special_tokens([token_id]) for token_id in tokenizer.eos_ids)
    return (
        f"the chat template ends a turn with {end!r}, but only {known} ends a completion, so one that ends like a turn "
        "would continue up to rollout.max_new_tokens",
        f"set {way_out}",
    )


def overlooked_end(completion_ids: Sequence[int], tokenizer: Tokenizer) -> int | None:
    """Returns the position of a completion's first control token other than EOS tokens; None if there is none."""
    ends = tokenizer.special_ids.difference(tokenizer.eos_ids)
    return next((place for place, token_id in enumerate(completion_ids) if int(token_id) in ends), None)


def written_ids(sample: Sample) -> list[int]:
    """Returns the tokens of a completion that the policy wrote, without observations."""
    ids = sample.completion_ids
    return (ids if sample.episode is None else ids[sample.episode.written_mask(len(ids))]).tolist()


def overlooked_end_notices(completions: Sequence[Sequence[int]], tokenizer: Tokenizer) -> list[str]:
    """Returns advice if at least a tenth of the completions continue after one and the same control token.

    Args:
        completions: the tokens that the policy wrote.
    """
    tokens = (ids[place] for ids in completions if (place := overlooked_end(ids, tokenizer)) is not None)
    for token_id, count in Counter(tokens).most_common(1):
        if count >= OVERLOOKED_SHARE * len(completions):
            name = tokenizer.decode_with_special_tokens([token_id])
            return [
                f"the control token {name!r}, which is not an EOS token, is followed by more text in {count} of "
                f"{len(completions)} samples; if it ends a turn, set {set_eos_token(tokenizer, token_id)}"
            ]
    return []


def set_eos_token(tokenizer: Tokenizer, token_id: int) -> str:
    """Returns the setting, as text, that makes this token end a completion."""
    return f"model.eos_tokens: [{tokenizer.decode_with_special_tokens([token_id])!r}]"
