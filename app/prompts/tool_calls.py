"""Calls of tools in the text of a turn.

A call is never dropped because it is malformed: its error tells the policy what to write instead. Texts come from the
policy, so they are read, never run, and what could exhaust memory or the stack is an error, too.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from app.environments.interface import ToolCall
from app.prompts.tokenizer import Tokenizer
from settings.errors import InputError

ToolCallFormat = Literal["json_tags", "json", "python", "none"]

MAX_PYTHON_CHARACTERS = 10_000
"""Of a list or block of calls: Python's parser needs far more memory and stack for each character than that of JSON."""
MAX_DEPTH = 32
"""Of lists and objects in each other."""

TAGS_EXAMPLE = '<tool_call>{"name": "...", "arguments": {...}}</tool_call>'
JSON_EXAMPLE = '{"name": "...", "parameters": {...}}'
PYTHON_EXAMPLE = 'name(argument="...")'
LEADING_TAGS = re.compile(r"(?s).*(?:<\|python_tag\|>|<\|python_start\|>|\[TOOL_CALLS\])")
"""What models write before calls without other tags: Llama 3, Llama 4, Mistral."""
CALL_LIST = re.compile(r"\[\s*[^\W\d][\w.]*\s*\(")
TOOL_CODE = re.compile(r"(?s)```tool_code\s*\n(.*?)(```|\Z)")
TAG = "<tool_call>"
PROBE = ToolCall("probe_tool", {"x": 1})


def resolve_format(
    setting: ToolCallFormat | Literal["auto"], tokenizer: Tokenizer, *, has_tools: bool
) -> ToolCallFormat:
    """Returns how the policy writes calls; with `auto`, as the chat template writes one.

    Raises:
        InputError: there are tools, but the template writes no call that one of the formats reads.
    """
    if setting != "auto":
        return setting
    text = _templates_call(tokenizer)
    for name in ("json_tags", "json", "python"):
        if parse_tool_calls(text, name) == [PROBE]:
            return name
    if not has_tools:
        return "none"
    raise InputError(
        f"env.parser: the model's chat template does not show how to write a call of a tool (it writes {text!r:.200}); "
        "set it to json_tags, json or python, as the prompts tell the policy, or to none"
    )


def _templates_call(tokenizer: Tokenizer) -> str:
    """Returns the turn that the chat template writes for a call; empty if it rejects calls."""
    question = {"role": "user", "content": "Q"}
    call = {"id": "call00000", "type": "function", "function": {"name": PROBE.name, "arguments": PROBE.arguments}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        start = tokenizer.render([question], add_generation_prompt=True).text
        text = tokenizer.render([question, turn], add_generation_prompt=False).text
    except InputError:
        return ""
    turn = text[len(os.path.commonprefix([start, text])) :]  # noqa: RUF071 -- no paths
    return tokenizer.eos_names.split(turn)[0]


def turn_calls(tokenizer: Tokenizer, ids: Sequence[int], style: ToolCallFormat) -> list[ToolCall]:
    """Returns the calls in a turn of these ids, with or without the token that ends it.

    The text is that with control tokens: to some models tags like `<tool_call>` and `<|python_tag|>` are such tokens.
    """
    written = ids[:-1] if ids and ids[-1] in tokenizer.eos_ids else ids
    return parse_tool_calls(tokenizer.decode_with_special_tokens(written), style)


def parse_tool_calls(text: str, style: ToolCallFormat) -> list[ToolCall]:
    """Returns the calls in the text of a turn, in order; thinking (up to `</think>`) has none.

    - json_tags: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number anywhere in the text.
    - json: the text is `{"name": ..., "parameters": {...}}`, several separated by `;` or in a list.
    - python: the text is `[name(argument=literal), ...]`, or has blocks of calls between "```tool_code" and "```".
    - none: no calls.
    """
    if "</think>" in text:
        text = text.partition("</think>")[2]
    text = text.partition("<think>")[0]
    match style:
        case "json_tags":
            return list(_read_tagged(text))
        case "json":
            return list(_read_bare(text))
        case "python":
            return list(_read_python(text))
        case "none":
            return []


def _read_tagged(text: str) -> Iterator[ToolCall]:
    end = 0
    while (start := text.find(TAG, end)) >= 0:
        end = start + len(TAG)
        try:
            value, end = _read_json(text, end)
        except ValueError as error:
            yield ToolCall("", {}, f"the call is not valid JSON: {error}; write {TAGS_EXAMPLE}")
            continue
        call = _to_call(value, TAGS_EXAMPLE)
        if call.error is None and not re.compile(r"\s*</tool_call>").match(text, end):
            call = call._replace(error=f"</tool_call> is missing behind the JSON of the call; write {TAGS_EXAMPLE}")
        yield call


def _read_bare(text: str) -> Iterator[ToolCall]:
    rest, is_tagged = _untagged(text)
    # An answer may be JSON, too, or begin with a brace.
    while rest and (is_tagged or (rest[0] in "[{" and '"name"' in rest)):
        try:
            value, end = _read_json(rest)
        except ValueError as error:
            yield ToolCall("", {}, f"the call is not valid JSON, or text follows it: {error}; write {JSON_EXAMPLE}")
            return
        for one in value if isinstance(value, list) else [value]:
            yield _to_call(one, JSON_EXAMPLE)
        rest, is_tagged = rest[end:].lstrip("; \n"), True


def _untagged(text: str) -> tuple[str, bool]:
    """Returns the text behind the tag that precedes calls, and whether there is one."""
    rest, num_tags = LEADING_TAGS.subn("", text)
    return rest.replace("<|python_end|>", "").strip(), num_tags > 0


def _read_python(text: str) -> Iterator[ToolCall]:
    blocks = TOOL_CODE.findall(text)
    rest, is_tagged = _untagged(text)
    if not blocks and (is_tagged or CALL_LIST.match(rest)):
        blocks = [(rest, "closed")]
    for code, closed in blocks:
        if closed:
            yield from _python_calls(code.strip())
        else:
            yield ToolCall("", {}, f"``` is missing behind the calls; write {PYTHON_EXAMPLE}")


def _python_calls(code: str) -> Iterator[ToolCall]:
    try:
        if len(code) > MAX_PYTHON_CHARACTERS:
            raise ValueError(f"more than {MAX_PYTHON_CHARACTERS:,} characters")
        with warnings.catch_warnings(action="ignore"):
            statements = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error) or "too deeply nested"
        yield ToolCall("", {}, f"the calls are not valid Python: {reason}; write {PYTHON_EXAMPLE}")
        return
    for statement in statements:
        node = statement.value if isinstance(statement, ast.Expr) else None
        for call in node.elts if isinstance(node, ast.List) else [node]:
            yield _python_call(call)


def _python_call(node: ast.expr | None) -> ToolCall:
    match node:
        case ast.Call(func=ast.Name(id="print"), args=[ast.Call() as printed], keywords=[]):
            return _python_call(printed)
        case ast.Call(func=ast.Name(id=name)):
            pass
        case ast.Call(func=ast.Attribute(value=ast.Name(id=place), attr=attribute)):
            name = f"{place}.{attribute}"
        case _:
            return ToolCall("", {}, f"what stands among the calls is not a call by name; write {PYTHON_EXAMPLE}")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return ToolCall(name, {}, f"arguments of {name} have no names; write {PYTHON_EXAMPLE}")
    arguments = {}
    for keyword in node.keywords:
        try:
            # As JSON, like the arguments of the other formats.
            arguments[keyword.arg], _ = _read_json(json.dumps(ast.literal_eval(keyword.value)))
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            reason = f"the argument {keyword.arg} of {name} is not a text, number, truth value, list or dict of these"
            return ToolCall(name, {}, f"{reason}; write {PYTHON_EXAMPLE}")
    return ToolCall(name, arguments)


def _to_call(value: Any, example: str) -> ToolCall:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return ToolCall("", {}, f"the call has no name of a tool; write {example}")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # Some models write the object as a string.
        try:
            arguments, _ = _read_json(arguments)
        except ValueError as error:
            return ToolCall(name, {}, f"the arguments are a string that is not valid JSON: {error}; write {example}")
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, f"the arguments are not an object with a value for each name; write {example}")
    return ToolCall(name, arguments)


def _read_json(text: str, start: int = 0) -> tuple[Any, int]:
    """Returns the value in the text from `start` on, behind blanks, and where it ends; raises ValueError."""
    while text[start : start + 1].isspace():
        start += 1
    try:
        value, end = DECODER.raw_decode(text, start)
        if _depth(value) <= MAX_DEPTH:
            return value, end
    except RecursionError:
        pass
    raise ValueError(f"values are nested more than {MAX_DEPTH} deep")


def _depth(value: Any) -> int:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max((1 + _depth(item) for item in items), default=0)


def _read_number(text: str) -> int | float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.20} is not a finite number")
    return int(text) if text.lstrip("-").isdigit() else number


DECODER = json.JSONDecoder(parse_int=_read_number, parse_float=_read_number, parse_constant=_read_number)
