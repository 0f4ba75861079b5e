"""Finds the tool calls in the text of a policy turn.

A malformed call is not dropped; its error tells the policy what to write instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from app.environments.interface import ToolCall
from app.prompts.tokenizer import Tokenizer
from settings.errors import InputError

ToolCallFormat = Literal["json_tags", "json", "none"]

EXAMPLES = {
    "json_tags": '<tool_call>{"name": "...", "arguments": {...}}</tool_call>',
    "json": '{"name": "...", "parameters": {...}}',
}
TAGGED_CALL = re.compile(r"(?s)<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)")
LEADING_THINKING = re.compile(r"(?s)\A(\s*<think>.*?(</think>|\Z))+")
PYTHON_TAG = "<|python_tag|>"
"""The token that Llama 3 may write before a call."""
PROBE = ToolCall("probe_tool", {"x": 1})


def _read_object(value: Any) -> Any:
    """Parses an object that a model has written as a string."""
    return from_json(value, allow_inf_nan=False) if isinstance(value, str) else value


class CallRecord(BaseModel):
    model_config = ConfigDict(strict=True)

    name: Annotated[str, Field(min_length=1)]
    arguments: Annotated[
        dict[str, Any],
        Field(validation_alias=AliasChoices("arguments", "parameters")),
        BeforeValidator(_read_object),
    ] = {}


def resolve_format(
    setting: ToolCallFormat | Literal["auto"], tokenizer: Tokenizer, *, has_tools: bool
) -> ToolCallFormat:
    """Returns the format of the policy's tool calls: `setting`, or the chat template's format if that is `auto`.

    Raises:
        InputError: there are tools, but the template writes calls in none of the known formats.
    """
    if setting != "auto":
        return setting
    text = _templates_call(tokenizer)
    for name in ("json_tags", "json"):
        if parse_tool_calls(text, name) == [PROBE]:
            return name
    if not has_tools:
        return "none"
    raise InputError(
        f"env.parser: the model's chat template does not show how to write a tool call (it writes {text!r:.200}); "
        "set it to json_tags or json, whichever the prompts ask for, or to none"
    )


def _templates_call(tokenizer: Tokenizer) -> str:
    """Returns the chat template's rendering of a call; empty if it rejects calls."""
    question = {"role": "user", "content": "Q"}
    call = {"id": "call00000", "type": "function", "function": {"name": PROBE.name, "arguments": PROBE.arguments}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        start = tokenizer.template.text([question], add_generation_prompt=True)
        text = tokenizer.template.text([question, turn], add_generation_prompt=False)
    except InputError:
        return ""
    turn = text[len(os.path.commonprefix([start, text])) :]  # noqa: RUF071 -- no paths
    return tokenizer.eos_names.split(turn)[0]


def turn_calls(tokenizer: Tokenizer, ids: Sequence[int], style: ToolCallFormat) -> list[ToolCall]:
    """Returns the tool calls in a turn, given its token ids; an EOS token at its end is ignored.

    The decoded text includes control tokens, since tags like `<tool_call>` are control tokens in some models.
    """
    written = ids[:-1] if ids and ids[-1] in tokenizer.eos_ids else ids
    text = tokenizer.decode_with_special_tokens(written)
    return parse_tool_calls(f"<think>{text}" if tokenizer.template.opens_thinking else text, style)


def parse_tool_calls(text: str, style: ToolCallFormat) -> list[ToolCall]:
    """Returns the calls in the text of a turn, in order; thinking at the start of a turn is ignored.

    - json_tags: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number anywhere in the text.
    - json: the text, or what follows `<|python_tag|>`, is `{"name": ..., "parameters": {...}}`.
    - none: no calls.
    """
    text = LEADING_THINKING.sub("", text)
    if style == "json_tags":
        return [_read_call(body, style, is_closed=bool(end)) for body, end in TAGGED_CALL.findall(text)]
    _, tag, body = text.rpartition(PYTHON_TAG)
    # An answer may also be JSON, or begin with a brace.
    is_call = style == "json" and (tag or (body.lstrip().startswith("{") and '"name"' in body))
    return [_read_call(body, style)] if is_call else []


def _read_call(text: str, style: str, *, is_closed: bool = True) -> ToolCall:
    try:
        call = CallRecord.model_validate(from_json(text, allow_inf_nan=False))
        if is_closed:
            return ToolCall(call.name, call.arguments)
        reason = "</tool_call> is missing"
    except ValidationError as error:
        [problem, *_] = error.errors()
        reason = f"{'.'.join(map(str, problem['loc'])) or 'the call'}: {problem['msg']}"
    except ValueError as error:
        reason = f"the call is not valid JSON: {error}"
    return ToolCall("", {}, f"{reason}; write {EXAMPLES[style]}")
