"""Tests chats of several turns: what the template writes between turns, and the tool calls in them."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from app.environments.interface import ToolCall
from app.prompts.chat_template import TEMPLATE_DATE
from app.prompts.observation_encoder import ObservationEncoder
from app.prompts.tokenizer import Tokenizer
from app.prompts.tool_calls import parse_tool_calls, resolve_format, turn_calls
from app.prompts.turn_end import overlooked_end_notices, unended_turn, written_ids
from app.records.sample import Episode, Turn
from settings.errors import InputError
from tests.prompts.chat_families import BYTES, CALCULATOR, CHATML, FAMILIES, MERGES, family_tokenizer
from tests.tiny import make_sample

QUESTION = {"role": "user", "content": "How much is it?"}
OBSERVATIONS = ["he said: 数 🙂 é\n", "\n\n  two blanks first", 'a "quoted" {"x": [1]} \\n\t']
TOOL_FAMILIES = ["qwen2_5", "qwen3", "llama3_1"]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"text": "1+1"}}\n</tool_call>'


def rendered(folder: Path, messages: list[Any], tools: Any = (), **options: Any) -> list[int]:
    """Returns transformers' own ids of a whole conversation up to the assistant's next turn."""
    given = {"tools": list(tools) or None, "date_string": TEMPLATE_DATE, "return_dict": False} | options
    return PreTrainedTokenizerFast.from_pretrained(folder).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, **given
    )


def conversation(
    encoder: ObservationEncoder, tokenizer: Tokenizer, tools: Any, turns: list[str], answers: list[Any]
) -> list[int]:
    tokenizer.tools = tools
    ids = tokenizer.chat_ids([QUESTION])
    for turn, messages in zip(turns, answers, strict=True):
        ids += [*tokenizer.encode_rendered(turn), tokenizer.eos_ids[0], *encoder.encode(messages)]
    return ids


def whole(turns: list[str], answers: list[Any]) -> list[Any]:
    pairs = zip(turns, answers, strict=True)
    return [QUESTION, *(m for turn, given in pairs for m in ({"role": "assistant", "content": turn}, *given))]


@pytest.mark.parametrize(
    ("name", "role"),
    [*((name, "user") for name in FAMILIES), *((name, "tool") for name in [*TOOL_FAMILIES, "smollm2"])],
)
def test_tokens_of_turns_and_observations_equal_the_rendered_conversation(name, role, tmp_path):
    tokenizer = family_tokenizer(tmp_path, name)
    tools = [CALCULATOR] if role == "tool" and name in TOOL_FAMILIES else []
    encoder = ObservationEncoder(tokenizer, tools)
    turns = ["he asks", "数 again", "third", "fourth"]
    answers = [[{"role": role, "content": text}] for text in (*OBSERVATIONS, "")]
    for start in range(4):
        given = answers[start:] + answers[:start]
        ids = conversation(encoder, tokenizer, tools, turns, given)
        assert ids == rendered(tmp_path, whole(turns, given), tools)
    # Without an observation, the next turn directly follows the last one.
    chat, between = tokenizer.chat_ids([QUESTION, {"role": "assistant", "content": "he"}]), encoder.encode([])
    assert chat[-len(between) :] == between and chat[-len(between) - 1] in tokenizer.eos_ids


@pytest.mark.parametrize("name", TOOL_FAMILIES)
def test_several_messages_after_a_turn_are_encoded_as_one_observation(name, tmp_path):
    tokenizer = family_tokenizer(tmp_path, name)
    answers = [
        [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}],
        [{"role": "tool", "content": "3"}, QUESTION],
        [QUESTION, QUESTION],
    ]
    turns = ["two", "one", "none"]
    ids = conversation(ObservationEncoder(tokenizer, [CALCULATOR]), tokenizer, [CALCULATOR], turns, answers)
    assert ids == rendered(tmp_path, whole(turns, answers), [CALCULATOR])


@pytest.mark.parametrize("enable_thinking", [True, False])
def test_qwen3_thinking_is_kept_in_turns_that_tools_answer(enable_thinking, tmp_path):
    tokenizer = family_tokenizer(tmp_path, "qwen3", enable_thinking=enable_thinking)
    encoder = ObservationEncoder(tokenizer, [CALCULATOR])
    turns = [f"<think>\nthought {number}\n</think>\n\n{CALL}" for number in range(3)]
    answers = [[{"role": "tool", "content": str(number)}] for number in range(3)]
    expected = rendered(tmp_path, whole(turns, answers), [CALCULATOR], enable_thinking=enable_thinking)
    if enable_thinking:
        assert conversation(encoder, tokenizer, [CALCULATOR], turns, answers) == expected
    else:  # The next turn starts after its empty thinking.
        ids = encoder.encode(answers[-1])
        assert tokenizer.decode(ids).endswith("assistant\n<think>\n\n</think>\n\n") and expected[-len(ids) :] == ids


def test_qwen3_thinking_stays_in_the_tokens_although_the_template_removes_it(tmp_path):
    tokenizer = family_tokenizer(tmp_path, "qwen3")
    encoder = ObservationEncoder(tokenizer)
    ids, messages = tokenizer.chat_ids([QUESTION]), [QUESTION]
    for number in range(3):
        answer = f"answer {number}"
        turn, given = f"<think>\nthought\n</think>\n\n{answer}", [{"role": "user", "content": OBSERVATIONS[number]}]
        messages += [{"role": "assistant", "content": turn}, *given]
        tail = [*tokenizer.encode_rendered(answer), tokenizer.eos_ids[0], *encoder.encode(given)]
        assert rendered(tmp_path, messages)[-len(tail) :] == tail
        ids += [*tokenizer.encode_rendered(turn), tokenizer.eos_ids[0], *encoder.encode(given)]
    assert tokenizer.decode(ids).count("thought") == 3
    assert tokenizer.decode(rendered(tmp_path, messages)).count("thought") == 0


@pytest.mark.parametrize(
    ("name", "role"), [("qwen2_5", "tool"), ("qwen3", "user"), ("llama3_1", "tool"), ("gemma2", "user")]
)
def test_control_tokens_spelled_in_an_observation_are_text(name, role, tmp_path):
    tokenizer, family = family_tokenizer(tmp_path, name), FAMILIES[name]
    encoder = ObservationEncoder(tokenizer)

    def num_special(ids: list[int]) -> int:
        return sum(i in tokenizer.special_ids for i in ids)

    spelled = "a" + "b".join(family.special) + "c"
    given, plain = ([{"role": role, "content": text}] for text in (spelled, "abc"))
    ids = encoder.encode(given)
    assert num_special(ids) == num_special(encoder.encode(plain))
    assert spelled in tokenizer.decode(ids)
    # Letters stand in for the control tokens, and are then replaced by the ids of the tokens' names as text.
    names = dict(zip("KLMNOPQRS", family.special, strict=False))
    hidden = {"role": role, "content": "a" + "b".join(names) + "c"}
    num_ids = len(encoder.encode([hidden]))
    expected = rendered(tmp_path, [QUESTION, {"role": "assistant", "content": "he"}, hidden])[-num_ids:]
    vocabulary = {token: i for i, token in enumerate([*BYTES, *map("".join, MERGES)])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=MERGES))
    of_letter = {vocabulary[letter]: backend.encode(name).ids for letter, name in names.items()}
    assert ids == [i for token in expected for i in of_letter.get(token, [token])]


@pytest.mark.parametrize("name", ["gemma3", "smollm2"])
def test_templates_without_tools_or_a_tool_role_are_refused(name, tmp_path):
    tokenizer = family_tokenizer(tmp_path, name)
    with pytest.raises(InputError, match=r"env\.tools: .*does not list tools in a prompt; use a model"):
        ObservationEncoder(tokenizer, [CALCULATOR])
    if name == "gemma3":
        for messages in ([{"role": "tool", "content": "2"}], [QUESTION, QUESTION]):
            with pytest.raises(InputError, match=r"cannot render a chat of .*alternate"):
                ObservationEncoder(tokenizer).encode(messages)


CHATML_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + CONTENT + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

UNFIT = {
    "(m.content if loop.last else m.content[:5])": "changes earlier turns .*'turnends<.* becomes '<|im_end|>",
    "(m.content if m.role == 'user' else '')": "leaves out the assistant's text",
    "(m.content if loop.index < 3 else '')": "leaves out messages with role user",
    "m.content | tojson(ensure_ascii=True)": "turns the text of user messages into control tokens",
}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        *((CHATML_TEMPLATE.replace("CONTENT", content), message) for content, message in UNFIT.items()),
        (CHATML_TEMPLATE.replace("CONTENT", "m.content").replace("<|im_end|>", "<e>"), "after a turn.*eos_tokens"),
        ("{% for m in messages %}{{ '<|im_end|>' + m.role + m.content }}{% endfor %}", "would occur twice"),
        ("{% for m in messages %}{{ 'x' + m.content }}{% endfor %}", "merges the end of a turn and the text after it"),
    ],
)
def test_a_template_without_support_for_turns_is_refused_with_the_reason(template, message, tmp_path):
    with pytest.raises(InputError, match=message):
        ObservationEncoder(family_tokenizer(tmp_path, CHATML, template))


def test_a_template_that_ends_turns_without_an_eos_token_is_reported_with_the_setting(tmp_path):
    for family in FAMILIES:
        assert unended_turn(family_tokenizer(tmp_path, family), ()) is None
    chatml = CHATML_TEMPLATE.replace("CONTENT", "m.content")
    base = CHATML._replace(special=["<|endoftext|>", "<|im_end|>", "<|im_start|>"], num_ends=1)
    ends = {"<|im_end|>": "model.eos_tokens: ['<|im_end|>']", "### End": "rollout.stop: ['### End']"}
    for end, way_out in ends.items():
        tokenizer = family_tokenizer(tmp_path, base, chatml.replace("<|im_end|>", end))
        assert unended_turn(tokenizer, ["END"]) == (ANY, f"set {way_out}")
        assert unended_turn(tokenizer, ["END", end]) is None
    assert unended_turn(family_tokenizer(tmp_path, base, chatml.replace("<|im_end|>", "")), ()) is None
    refusing = "{%- if messages[-1].role != 'user' -%}{{- raise_exception('no') -}}{%- endif -%}" + chatml
    assert unended_turn(family_tokenizer(tmp_path, base, refusing), ()) is None


def test_samples_that_continue_after_a_control_token_are_reported_by_a_warning(tmp_path):
    base = CHATML._replace(special=["<|endoftext|>", "<|im_end|>", "<|im_start|>"], num_ends=1)
    tokenizer = family_tokenizer(tmp_path, base, CHATML_TEMPLATE.replace("CONTENT", "m.content"))
    end, (last,) = tokenizer.encode_rendered("<|im_end|>")[0], tokenizer.eos_ids
    going_on, plain = [5, end, 6, last], [5, 6, last]
    (notice,) = overlooked_end_notices([going_on, *[plain] * 9], tokenizer)
    assert notice.startswith("the control token '<|im_end|>', which is not an EOS token, is followed by more")
    assert " in 1 of 10 samples; " in notice
    assert notice.endswith("set model.eos_tokens: ['<|im_end|>']")
    assert overlooked_end_notices([going_on, *[plain] * 10], tokenizer) == []
    # An observation begins with control tokens.
    turns = (Turn(0, 2, [{"role": "user", "content": "a"}], text="a"), Turn(4, 6, text="a"))
    sample = make_sample([5, last, end, 7, 6, last], episode=Episode(turns, "turns"))
    assert written_ids(sample) == [5, last, 6, last]


def test_long_observations_are_cut_at_the_end_with_a_note(tmp_path):
    tokenizer = family_tokenizer(tmp_path, "qwen2_5")
    encoder = ObservationEncoder(tokenizer)
    messages = [{"role": "tool", "content": text} for text in ("short", "x" * 90, "y")]
    assert [message["content"] for message in encoder.fitted(messages, 65)] == [
        "short",
        "x" * 60 + "\n[cut: 30 more characters]",
        "\n[cut: 1 more characters]",
    ]
    assert encoder.fitted(messages, 96) == encoder.fitted(messages, None) == messages
    [cut] = encoder.fitted([{"role": "user", "content": "a" * 10**7}], 1)
    assert cut["content"] == "a\n[cut: 9999999 more characters]"


STYLES = ("json_tags", "json")
WEATHER = ToolCall("weather", {"city": "Köln", "days": 2})
NOW = ToolCall("now", {})
SAY = ToolCall("say", {"x": "<think> </think>"})


def tagged(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


@pytest.mark.parametrize(
    ("style", "text", "calls"),
    [
        ("json_tags", tagged('\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n'), [WEATHER]),
        ("json_tags", tagged('{"name": "now"}') + " B " + tagged('{"name": "now", "arguments": {}}'), [NOW, NOW]),
        ("json_tags", tagged('{"name": "weather", "arguments": "{\\"city\\": \\"Köln\\", \\"days\\": 2}"}'), [WEATHER]),
        ("json_tags", "<think>" + tagged('{"name": "now"}') + "</think>\n\nIt is noon.", []),
        ("json_tags", "<think>a</think> <think>" + tagged("{}") + "</think>" + tagged('{"name": "now"}'), [NOW]),
        ("json_tags", tagged('{"name": "say", "arguments": {"x": "<think> </think>"}}'), [SAY]),
        ("json", '{"name": "say", "parameters": {"x": "<think> </think>"}}', [SAY]),
        ("json_tags", "<think> still thinking " + tagged('{"name": "now"}'), []),
        ("json_tags", "It is 4.", []),
        ("json", '{"name": "weather", "parameters": {"city": "Köln", "days": 2}}', [WEATHER]),
        ("json", 'Let me see.<|python_tag|>{"name": "now", "parameters": {}}', [NOW]),
        ("json", '{"answer": 4}', []),
        ("json", "{1, 2} is a set", []),
        ("none", tagged('{"name": "now"}'), []),
    ],
)  # fmt: skip
def test_tool_calls_are_parsed_in_order_with_their_arguments(style, text, calls):
    assert parse_tool_calls(text, style) == calls


@pytest.mark.parametrize(
    ("style", "text", "reason"),
    [
        ("json_tags", tagged('{"name": "now", "arguments": {}'), "not valid JSON: EOF while parsing"),
        ("json_tags", '<tool_call>{"name": "now"}', "</tool_call> is missing"),
        ("json_tags", tagged('{"name": "now"} and more'), "not valid JSON: trailing characters"),
        ("json_tags", tagged('{"name": "now", "arguments": [1]}'), "arguments: Input should be a valid dictionary"),
        ("json_tags", tagged('{"name": "now", "arguments": "{x"}'), "arguments: Value error, key must be a string"),
        ("json_tags", tagged('{"arguments": {}}'), "name: Field required"),
        ("json_tags", tagged('{"name": "f", "arguments": {"x": NaN}}'), "not valid JSON: expected value"),
        ("json_tags", tagged('{"name": "f", "arguments": {"x": ' + "9" * 6000 + "}}"), "number out of range"),
        ("json_tags", tagged('{"name": "f", "arguments": {"x": ' + "[" * 100_000), "recursion limit exceeded"),
        ("json", '{"name": "now", "parameters": {}', "not valid JSON"),
        ("json", '{"name": "now", "parameters": {}} Then I wait.', "not valid JSON: trailing characters"),
    ],
)  # fmt: skip
def test_error_of_a_malformed_tool_call_says_what_is_wrong_and_what_to_write(style, text, reason):
    [call] = parse_tool_calls(text, style)
    if style == "json_tags" and "</" in text:
        [before, *_, after] = parse_tool_calls(tagged('{"name": "now"}') + text + tagged('{"name": "now"}'), style)
        assert (before, after) == (NOW, NOW)
    assert (call.name, call.arguments) == ("", {})
    assert call.error is not None
    assert reason in call.error
    assert "; write " in call.error


@given(text=st.text() | st.text(alphabet='<tool_call>/{}[]"name:1,();`=\n '), style=st.sampled_from(STYLES))
def test_parsing_tool_calls_in_random_text_never_raises(text, style):
    for given_text in (text, tagged(text), f"<|python_tag|>{text}"):
        for call in parse_tool_calls(given_text, style):
            assert call.error or json.dumps(call.arguments)


@pytest.mark.parametrize(
    ("name", "style"), [("qwen2_5", "json_tags"), ("qwen3", "json_tags"), ("llama3_1", "json"), ("gemma3", None)]
)
def test_auto_tool_call_format_follows_the_chat_template(name, style, tmp_path):
    tokenizer = family_tokenizer(tmp_path, name)
    assert resolve_format("auto", tokenizer, has_tools=False) == (style or "none")
    assert resolve_format("json", tokenizer, has_tools=True) == "json"
    if style is None:
        with pytest.raises(InputError, match=r"env\.parser: .*how to write a tool call.*set it to json_tags"):
            resolve_format("auto", tokenizer, has_tools=True)
    else:
        assert resolve_format("auto", tokenizer, has_tools=True) == style


@pytest.mark.parametrize("special", [True, False])
def test_tool_call_tags_that_are_control_tokens_are_found_in_the_ids(special, tmp_path):
    tags = ["<tool_call>", "</tool_call>"]
    family = CHATML._replace(special=[*CHATML.special, *tags]) if special else CHATML._replace(plain=tags)
    template = CHATML_TEMPLATE.replace("CONTENT", "m.content")
    tokenizer = family_tokenizer(tmp_path, family, template)
    ids = tokenizer.encode_rendered(tagged('{"name": "now"}') + "<|im_end|>")
    assert turn_calls(tokenizer, ids, "json_tags") == turn_calls(tokenizer, ids[:-1], "json_tags") == [NOW]
    assert ("<tool_call>" in tokenizer.decode(ids)) is not special


@pytest.mark.parametrize("opened", ["", "<think>\n"])
def test_tool_calls_are_only_parsed_after_thinking(opened, tmp_path):
    template = CHATML_TEMPLATE.replace("CONTENT", "m.content").replace("assistant\n", f"assistant\n{opened}")
    tokenizer = family_tokenizer(tmp_path, CHATML, template)
    turn = "Call " + tagged('{"name": "now"}') + ", so\n</think>\n\n" + tagged('{"name": "say"}')
    calls = turn_calls(tokenizer, tokenizer.encode_rendered(turn), "json_tags")
    assert [call.name for call in calls] == (["say"] if opened else ["now", "say"])
