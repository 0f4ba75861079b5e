"""Tests that calls of tools are read out of texts, and that malformed ones say what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.environments.interface import ToolCall
from app.prompts.tool_calls import MAX_DEPTH, parse_tool_calls, resolve_format, turn_calls
from settings.errors import InputError
from tests.prompts.chat_families import CHATML, FAMILIES, family_tokenizer, template_of

STYLES = ("json_tags", "json", "python")
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
        ("json_tags", tagged('{"name": "f", "arguments": {"x": "</tool_call><tool_call>"}}'), [
            ToolCall("f", {"x": "</tool_call><tool_call>"})
        ]),
        ("json_tags", "<think>" + tagged('{"name": "now"}') + "</think>\n\nIt is noon.", []),
        ("json_tags", "Call " + tagged('{"name": "now"}') + ", so\n</think>\n\n" + tagged('{"name": "now"}'), [NOW]),
        ("json_tags", "<think> still thinking " + tagged('{"name": "now"}'), []),
        ("json_tags", "It is 4.", []),
        ("json_tags", "", []),
        ("json", '{"name": "weather", "parameters": {"city": "Köln", "days": 2}}', [WEATHER]),
        ("json", 'Let me see.<|python_tag|>{"name": "now", "parameters": {}}; {"name": "now"}', [NOW, NOW]),
        ("json", '<|python_start|>{"name": "now"}<|python_end|>', [NOW]),
        ("json", '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "call00000"}]', [NOW]),
        ("json", '{"answer": 4}', []),
        ("json", "{1, 2} is a set", []),
        ("json", "[1, 2]", []),
        ("json", "It is 4.", []),
        ("python", '[weather(city="Köln", days=2), now()]', [WEATHER, NOW]),
        ("python", 'See:\n```tool_code\nprint(weather(city="Köln", days=2))\nnow()\n```\nThen.', [WEATHER, NOW]),
        ("python", "[math.add(xs=[1, -2.5], flag=True, none=None, map={'a': (1,)})]", [
            ToolCall("math.add", {"xs": [1, -2.5], "flag": True, "none": None, "map": {"a": [1]}})
        ]),
        ("python", "[1, 2]", []),
        ("python", "It is f(x).", []),
        ("none", tagged('{"name": "now"}'), []),
    ],
)  # fmt: skip
def test_calls_are_read_in_order_with_their_arguments(style, text, calls):
    assert parse_tool_calls(text, style) == calls


@pytest.mark.parametrize(
    ("style", "text", "name", "reason"),
    [
        ("json_tags", tagged('{"name": "now", "arguments": {}'), "", "not valid JSON: Expecting ',' delimiter"),
        ("json_tags", tagged("now()"), "", "not valid JSON"),
        ("json_tags", tagged(""), "", "not valid JSON"),
        ("json_tags", '<tool_call>{"name": "now"}', "now", "</tool_call> is missing"),
        ("json_tags", tagged('{"name": "now"} and more'), "now", "</tool_call> is missing"),
        ("json_tags", tagged('{"name": "now", "arguments": [1]}'), "now", "arguments are not an object"),
        ("json_tags", tagged('{"name": "now", "arguments": null}'), "now", "arguments are not an object"),
        ("json_tags", tagged('{"name": "now", "arguments": "{x"}'), "now", "a string that is not valid JSON"),
        ("json_tags", tagged('{"arguments": {}}'), "", "no name of a tool"),
        ("json_tags", tagged('{"name": 7}'), "", "no name of a tool"),
        ("json_tags", tagged('["now"]'), "", "no name of a tool"),
        ("json_tags", tagged('{"name": "f", "arguments": {"x": NaN}}'), "", "NaN is not a finite number"),
        ("json_tags", tagged('{"name": "f", "arguments": {"x": 1e999}}'), "", "1e999 is not a finite number"),
        ("json_tags", tagged('{"name": "f", "arguments": {"x": ' + "9" * 6000 + "}}"), "", "99 is not a finite number"),
        ("json_tags", tagged('{"name": "f", "arguments": {"x": ' + "[" * 100_000), "", "nested more than 32 deep"),
        ("json_tags", tagged('{"name": "f", "arguments": {"x": ' + "[" * 32 + "]" * 32 + "}}"), "", "more than 32"),
        ("json", '{"name": "now", "parameters": {}', "", "not valid JSON"),
        ("json", '<|python_tag|>search.call(query="x")', "", "not valid JSON"),
        ("json", '[{"name": "now", "parameters": 1}]', "now", "not an object"),
        ("python", "[now(", "", "not valid Python: '(' was never closed"),
        ("python", "```tool_code\nnow()", "", "``` is missing"),
        ("python", "```tool_code\nx = now()\n```", "", "not a call by name"),
        ("python", "```tool_code\nimport os\n```", "", "not a call by name"),
        ("python", "[f(x)]", "f", "arguments of f have no names"),
        ("python", "[f(**{'x': 1})]", "f", "arguments of f have no names"),
        ("python", "[f(x=open('a'))]", "f", "the argument x of f is not a text"),
        ("python", "[f(x=9**9**9)]", "f", "the argument x of f is not a text"),
        ("python", "[f(x={1, 2})]", "f", "the argument x of f is not a text"),
        ("python", "[f(x=1e999)]", "f", "the argument x of f is not a text"),
        ("python", "[f(x=" + "9" * 5000 + ")]", "", "not valid Python: Exceeds the limit"),
        ("python", "[f(x=" + "-" * 9000 + "1)]", "", "not valid Python: too deeply nested"),
        ("python", "[f(x=" + "[" * 300, "", "too many nested parentheses"),
        ("python", "[f(x=1" + "+1" * 4000 + ")]", "", "maximum recursion depth"),
        ("python", "[f(x='" + "a" * 20_000 + "')]", "", "more than 10,000 characters"),
    ],
)  # fmt: skip
def test_a_malformed_call_says_what_is_wrong_and_what_to_write(style, text, name, reason):
    [call] = parse_tool_calls(text, style)
    assert (call.name, call.arguments) == (name, {}) or "</tool_call> is missing" in reason
    assert call.error is not None
    assert reason in call.error
    assert "; write " in call.error


def test_calls_around_a_malformed_one_are_read():
    calls = parse_tool_calls(tagged('{"name": "now"}') + tagged("{") + tagged('{"name": "now"}'), "json_tags")
    assert [call.error is None for call in calls] == [True, False, True]


def test_text_behind_a_bare_call_is_malformed():
    first, second = parse_tool_calls('{"name": "now", "parameters": {}} Then I wait.', "json")
    assert first == NOW
    assert second.error is not None
    assert "or text follows it" in second.error


def test_arguments_may_be_as_deep_as_the_limit():
    text = tagged('{"name": "f", "arguments": {"x": ' + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1) + "}}")
    assert parse_tool_calls(text, "json_tags")[0].error is None


@given(text=st.text() | st.text(alphabet='<tool_call>/{}[]"name:1,();`=\n '), style=st.sampled_from(STYLES))
def test_no_text_raises(text, style):
    for given_text in (text, tagged(text), f"<|python_tag|>{text}", f"```tool_code\n{text}\n```"):
        for call in parse_tool_calls(given_text, style):
            assert call.error or json.dumps(call.arguments)


@pytest.mark.parametrize(
    ("name", "style"), [("qwen2_5", "json_tags"), ("qwen3", "json_tags"), ("llama3_1", "json"), ("gemma3", None)]
)
def test_the_chat_template_says_how_calls_are_written(name, style, tmp_path: Path):
    tokenizer = family_tokenizer(tmp_path, FAMILIES[name], template_of(name))
    assert resolve_format("auto", tokenizer, has_tools=False) == (style or "none")
    assert resolve_format("python", tokenizer, has_tools=True) == "python"
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
