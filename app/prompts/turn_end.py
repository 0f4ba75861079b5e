"""Finds out whether a completion that ends as the chat template ends a turn is over for the sampler, too."""

from __future__ import annotations

from collections.abc import Sequence

from app.prompts.tokenizer import Tokenizer
from app.records.sample import Messages

MARK = "dummyturnends"
DUMMY: Messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": MARK}]
"""A chat whose last turn is easily found in a rendering."""


def unended_turn(tokenizer: Tokenizer, stop: Sequence[str]) -> tuple[str, str] | None:
    """Returns how the chat template ends a turn if the sampler would not end there, and what to set; otherwise None.

    A template that writes nothing behind a turn is no fault: the policy may end it with any end token.

    Args:
        stop: the texts of `rollout.stop`.

    Raises:
        InputError: the template rejects a chat that ends with the assistant's turn.
    """
    text = tokenizer.template.text(DUMMY, tokenizer.tools, add_generation_prompt=False)
    _, is_there, end = text.rpartition(MARK)
    if not is_there or not end.strip() or tokenizer.eos_names.search(end) or any(one in end for one in stop):
        return None
    ids = tokenizer.encode_rendered(end.strip())
    control = next((token_id for token_id in ids if token_id in tokenizer.special_ids or len(ids) == 1), None)
    way_out = f"rollout.stop: [{end.strip()!r}]" if control is None else set_eos_token(tokenizer, control)
    known = ", ".join(tokenizer.decode_with_special_tokens([token_id]) for token_id in tokenizer.eos_ids)
    return (
        f"the chat template ends a turn with {end!r}, but only {known} ends a completion, so one that ends like a turn "
        "would go on up to rollout.max_new_tokens",
        f"set {way_out}",
    )


def set_eos_token(tokenizer: Tokenizer, token_id: int) -> str:
    """Returns the setting that makes this token end a completion."""
    return f"model.eos_tokens: [{tokenizer.decode_with_special_tokens([token_id])!r}]"
