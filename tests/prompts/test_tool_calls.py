"""Tests that calls of tools are read out of texts, and that malformed ones say what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.environments.interface import ToolCall
from app.prompts.tool_calls import parse_tool_calls, resolve_format, turn_calls
from settings.errors import InputError
from tests.prompts.chat_families import CHATML, FAMILIES, family_tokenizer, template_of

STYLES = ("json_tags", "json")
WEATHER = ToolCall("weather", {"city": "Köln", "days": 2})
NOW = ToolCall("now", {})


def tagged(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


@pytest.mark.parametrize(
    ("style", "text", "calls"),
    [
        ("json_tags", tagged('\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n'), [WEATHER]),
        ("json_tags", tagged('{"name": "now"}') + " B " + tagged('{"name": "now", "arguments": {}}'), [NOW, NOW]),
        ("json_tags", tagged('{"name": "weather", "arguments": "{\\"city\\": \\"Köln\\", \\"days\\": 2}"}'), [WEATHER]),
        ("json_tags", "<think>" + tagged('{"name": "now"}') + "</think>\n\nIt is noon.", []),
        ("json_tags", "Call " + tagged('{"name": "now"}') + ", so\n</think>\n\n" + tagged('{"name": "now"}'), [NOW]),
        ("json_tags", "<think> still thinking " + tagged('{"name": "now"}'), []),
        ("json_tags", "It is 4.", []),
        ("json_tags", "", []),
        ("json", '{"name": "weather", "parameters": {"city": "Köln", "days": 2}}', [WEATHER]),
        ("json", 'Let me see.<|python_tag|>{"name": "now", "parameters": {}}', [NOW]),
        ("json", '{"answer": 4}', []),
        ("json", "{1, 2} is a set", []),
        ("json", "It is 4.", []),
        ("none", tagged('{"name": "now"}'), []),
    ],
)  # fmt: skip
def test_calls_are_read_in_order_with_their_arguments(style, text, calls):
    assert parse_tool_calls(text, style) == calls


@pytest.mark.parametrize(
    ("style", "text", "reason"),
    [
        ("json_tags", tagged('{"name": "now", "arguments": {}'), "not valid JSON: EOF while parsing"),
        ("json_tags", tagged("now()"), "not valid JSON"),
        ("json_tags", tagged(""), "not valid JSON"),
        ("json_tags", '<tool_call>{"name": "now"}', "</tool_call> is missing"),
        ("json_tags", tagged('{"name": "now"} and more'), "not valid JSON: trailing characters"),
        ("json_tags", tagged('{"name": "now", "arguments": [1]}'), "arguments: Input should be a valid dictionary"),
        ("json_tags", tagged('{"name": "now", "arguments": null}'), "arguments: Input should be a valid dictionary"),
        ("json_tags", tagged('{"name": "now", "arguments": "{x"}'), "arguments: Value error, key must be a string"),
        ("json_tags", tagged('{"arguments": {}}'), "name: Field required"),
        ("json_tags", tagged('{"name": 7}'), "name: Input should be a valid string"),
        ("json_tags", tagged('["now"]'), "the call: Input should be a valid dictionary"),
        ("json_tags", tagged('{"name": "f", "arguments": {"x": NaN}}'), "not valid JSON: expected value"),
        ("json_tags", tagged('{"name": "f", "arguments": {"x": ' + "9" * 6000 + "}}"), "number out of range"),
        ("json_tags", tagged('{"name": "f", "arguments": {"x": ' + "[" * 100_000), "recursion limit exceeded"),
        ("json", '{"name": "now", "parameters": {}', "not valid JSON"),
        ("json", '{"name": "now", "parameters": {}} Then I wait.', "not valid JSON: trailing characters"),
        ("json", '<|python_tag|>search.call(query="x")', "not valid JSON"),
    ],
)  # fmt: skip
def test_a_malformed_call_says_what_is_wrong_and_what_to_write(style, text, reason):
    [call] = parse_tool_calls(text, style)
    assert (call.name, call.arguments) == ("", {})
    assert call.error is not None
    assert reason in call.error
    assert "; write " in call.error


def test_calls_around_a_malformed_one_are_read():
    calls = parse_tool_calls(tagged('{"name": "now"}') + tagged("{") + tagged('{"name": "now"}'), "json_tags")
    assert [call.error is None for call in calls] == [True, False, True]


@given(text=st.text() | st.text(alphabet='<tool_call>/{}[]"name:1,();`=\n '), style=st.sampled_from(STYLES))
def test_no_text_raises(text, style):
    for given_text in (text, tagged(text), f"<|python_tag|>{text}"):
        for call in parse_tool_calls(given_text, style):
            assert call.error or json.dumps(call.arguments)


@pytest.mark.parametrize(
    ("name", "style"), [("qwen2_5", "json_tags"), ("qwen3", "json_tags"), ("llama3_1", "json"), ("gemma3", None)]
)
def test_the_chat_template_says_how_calls_are_written(name, style, tmp_path: Path):
    tokenizer = family_tokenizer(tmp_path, FAMILIES[name], template_of(name))
    assert resolve_format("auto", tokenizer, has_tools=False) == (style or "none")
    assert resolve_format("json", tokenizer, has_tools=True) == "json"
    if style is None:
        with pytest.raises(InputError, match=r"env\.parser: .*does not show how to write a call.*set it to json_tags"):
            resolve_format("auto", tokenizer, has_tools=True)
    else:
        assert resolve_format("auto", tokenizer, has_tools=True) == style


def test_calls_in_another_notation_between_the_same_tags_are_no_json(tmp_path: Path):
    template = template_of("qwen3").replace('{"name": "', "<function=").replace('", "arguments": ', ">")
    tokenizer = family_tokenizer(tmp_path, FAMILIES["qwen3"], template)
    with pytest.raises(InputError, match=r"it writes .*<tool_call>.*<function=probe_tool>"):
        resolve_format("auto", tokenizer, has_tools=True)


@pytest.mark.parametrize("special", [True, False])
def test_tags_that_are_control_tokens_are_seen_in_the_ids_of_a_turn(special, tmp_path: Path):
    tags = ["<tool_call>", "</tool_call>"]
    family = CHATML._replace(special=[*CHATML.special, *tags]) if special else CHATML._replace(plain=tags)
    tokenizer = family_tokenizer(tmp_path, family, template_of("smollm2"))
    ids = tokenizer.encode_rendered(tagged('{"name": "now"}') + "<|im_end|>")
    assert turn_calls(tokenizer, ids, "json_tags") == turn_calls(tokenizer, ids[:-1], "json_tags") == [NOW]
    assert ("<tool_call>" in tokenizer.decode(ids)) is not special
