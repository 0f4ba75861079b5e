"""Tests that turns and the tokens between them are what transformers renders for the whole conversation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from app.model.io.model_files import open_model
from app.prompts.observation_encoder import ObservationEncoder
from app.prompts.tokenizer import TEMPLATE_DATE, Tokenizer, load_tokenizer
from settings.errors import InputError
from tests.prompts.chat_families import CALCULATOR, CHATML, FAMILIES, Family, family_tokenizer, template_of

Make = Callable[..., Tokenizer]
QUESTION = {"role": "user", "content": "How much is it?"}
OBSERVATIONS = ["he said: 数 🙂 é\n", "\n\n  two blanks first", "", 'a "quoted" {"x": [1]} \\n\t']
TOOL_FAMILIES = ["qwen2_5", "qwen3", "llama3_1"]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"text": "1+1"}}\n</tool_call>'


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Returns a function that makes the tokenizer of a family, or of another family with this template."""

    def tokenizer(family: str | Family, template: str | None = None, **template_kwargs: Any) -> Tokenizer:
        if isinstance(family, str):
            return family_tokenizer(tmp_path, FAMILIES[family], template_of(family), **template_kwargs)
        assert template is not None
        return family_tokenizer(tmp_path, family, template, **template_kwargs)

    return tokenizer


def rendered(folder: Path, messages: list[Any], tools: Any = (), **options: Any) -> list[int]:
    """Returns transformers' own ids of a whole conversation up to the assistant's next turn."""
    given = {"tools": list(tools) or None, "date_string": TEMPLATE_DATE, "return_dict": False} | options
    return PreTrainedTokenizerFast.from_pretrained(folder).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, **given
    )


def conversation(
    encoder: ObservationEncoder, tokenizer: Tokenizer, tools: Any, turns: list[str], answers: list[Any]
) -> list[int]:
    """Returns prompt, turn, observation, turn, ..., observation."""
    tokenizer.tools = tools
    ids = tokenizer.chat_ids([QUESTION])
    for turn, messages in zip(turns, answers, strict=True):
        ids += [*tokenizer.encode_rendered(turn), tokenizer.eos_ids[0], *encoder.encode(messages)]
    return ids


def whole(turns: list[str], answers: list[Any]) -> list[Any]:
    pairs = zip(turns, answers, strict=True)
    return [QUESTION, *(m for turn, given in pairs for m in ({"role": "assistant", "content": turn}, *given))]


@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize(
    ("name", "role"),
    [*((name, "user") for name in FAMILIES), *((name, "tool") for name in [*TOOL_FAMILIES, "smollm2"])],
)
def test_three_turns_are_the_conversation_that_transformers_renders(name, role, observation, make, tmp_path):
    tokenizer = make(name)
    tools = [CALCULATOR] if role == "tool" and name in TOOL_FAMILIES else []
    turns = ["he asks", "数 again", "third"]
    answers = [[{"role": role, "content": text}] for text in (observation, "2", f"he{observation}")]
    ids = conversation(ObservationEncoder(tokenizer, tools), tokenizer, tools, turns, answers)
    assert ids == rendered(tmp_path, whole(turns, answers), tools)


@pytest.mark.parametrize("name", TOOL_FAMILIES)
def test_several_results_and_a_users_message_are_one_observation(name, make, tmp_path):
    tokenizer = make(name)
    answers = [
        [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}],
        [{"role": "tool", "content": "3"}, QUESTION],
        [QUESTION, QUESTION],
    ]
    turns = ["two", "one", "none"]
    ids = conversation(ObservationEncoder(tokenizer, [CALCULATOR]), tokenizer, [CALCULATOR], turns, answers)
    assert ids == rendered(tmp_path, whole(turns, answers), [CALCULATOR])


@pytest.mark.parametrize("name", FAMILIES)
def test_without_an_observation_the_next_turn_starts_behind_the_last(name, make):
    tokenizer = make(name)
    chat = tokenizer.chat_ids([QUESTION, {"role": "assistant", "content": "he"}])
    ids = ObservationEncoder(tokenizer).encode([])
    assert chat[-len(ids) :] == ids
    assert chat[-len(ids) - 1] in tokenizer.eos_ids


def test_qwen3s_thinking_stays_where_tools_answer(make, tmp_path):
    tokenizer = make("qwen3")
    turns = [f"<think>\nthought {number}\n</think>\n\n{CALL}" for number in range(3)]
    answers = [[{"role": "tool", "content": str(number)}] for number in range(3)]
    encoder = ObservationEncoder(tokenizer, [CALCULATOR])
    ids = conversation(encoder, tokenizer, [CALCULATOR], turns, answers)
    assert ids == rendered(tmp_path, whole(turns, answers), [CALCULATOR])


def test_qwen3s_thinking_that_the_template_removes_stays_in_the_tokens(make, tmp_path):
    tokenizer = make("qwen3")
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


def test_without_thinking_the_next_turn_starts_behind_its_empty_thinking(make, tmp_path):
    tokenizer = make("qwen3", enable_thinking=False)
    given = [{"role": "tool", "content": "2"}]
    ids = ObservationEncoder(tokenizer, [CALCULATOR]).encode(given)
    assert tokenizer.decode(ids).endswith("assistant\n<think>\n\n</think>\n\n")
    messages = whole(["one"], [given])
    assert rendered(tmp_path, messages, [CALCULATOR], enable_thinking=False)[-len(ids) :] == ids


def test_the_builtin_model_repeats_no_end_token_and_needs_none():
    tokenizer = load_tokenizer(open_model("builtin:tiny"))
    encoder = ObservationEncoder(tokenizer)
    user, assistant, end = (tokenizer.encode_rendered(name)[0] for name in ("<|user|>", "<|assistant|>", "<|end|>"))
    one, two = tokenizer.encode("12")
    assert encoder.encode([{"role": "user", "content": "1 2"}]) == [user, one, two, assistant]
    assert tokenizer.eos_ids == (end,)


@pytest.mark.parametrize(
    ("name", "role"), [("qwen2_5", "tool"), ("qwen3", "user"), ("llama3_1", "tool"), ("gemma2", "user")]
)
def test_control_tokens_spelled_in_an_observation_are_text(name, role, make, tmp_path):
    tokenizer, family = make(name), FAMILIES[name]
    encoder = ObservationEncoder(tokenizer)
    spelled = "a" + "b".join([*family.special, *family.plain]) + "c"
    given, plain = ([{"role": role, "content": text}] for text in (spelled, "abc"))
    ids = encoder.encode(given)
    of_plain = encoder.encode(plain)
    assert sum(i in tokenizer.special_ids for i in ids) == sum(i in tokenizer.special_ids for i in of_plain)
    assert spelled in tokenizer.decode(ids)
    chat = [QUESTION, {"role": "assistant", "content": "he"}, *given]
    assert rendered(tmp_path, chat, sanitize_control_tokens=True)[-len(ids) :] == ids


@pytest.mark.parametrize("name", TOOL_FAMILIES)
def test_control_tokens_spelled_in_a_tools_schema_are_text(name, make):
    tokenizer = make(name)
    spelled = FAMILIES[name].special[0]
    schema = {"type": "function", "function": CALCULATOR["function"] | {"description": f"Ends {spelled}."}}
    ids, plain = (tokenizer.render([QUESTION], [tool], add_generation_prompt=True).ids for tool in (schema, CALCULATOR))
    assert sum(i in tokenizer.special_ids for i in ids) == sum(i in tokenizer.special_ids for i in plain)
    assert f"Ends {spelled}." in tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_a_template_without_a_tool_role_takes_user_messages_and_names_the_way_out(name, make):
    encoder = ObservationEncoder(make(name))
    with pytest.raises(InputError, match=r"cannot render a chat of .*'tool'.*alternate"):
        encoder.encode([{"role": "tool", "content": "2"}])
    with pytest.raises(InputError, match="alternate"):
        encoder.encode([QUESTION, QUESTION])


@pytest.mark.parametrize("name", ["gemma3", "smollm2"])
def test_a_template_that_lists_no_tools_is_refused_with_tools(name, make):
    with pytest.raises(InputError, match=r"env\.tools: .*does not list tools in a prompt; use a model"):
        ObservationEncoder(make(name), [CALCULATOR])


CHATML_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + CONTENT + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("(m.content if loop.last else m.content[:5])", "writes earlier turns anew .*'turnends<.* becomes '<|im_end|>"),
        ("(m.content if m.role == 'user' else '')", "leaves out what the assistant writes"),
        ("(m.content if loop.index < 3 else '')", "leaves out messages of the role user"),
        ("m.content | tojson(ensure_ascii=True)", "turns the text of user messages into control tokens"),
    ],
)
def test_a_template_that_cannot_have_several_turns_is_refused_with_the_reason(content, message, make):
    with pytest.raises(InputError, match=message):
        ObservationEncoder(make(CHATML, CHATML_TEMPLATE.replace("CONTENT", content)))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            CHATML_TEMPLATE.replace("CONTENT", "m.content").replace("<|im_end|>", "<e>"),
            r"'<e>\\n' behind a turn.*eos_token_id",
        ),
        ("{% for m in messages %}{{ '<|im_end|>' + m.role + m.content }}{% endfor %}", "would be there twice"),
        ("{% for m in messages %}{{ 'x' + m.content }}{% endfor %}", "joins the end of a turn and what follows in one"),
    ],
)
def test_a_template_whose_turns_have_no_end_of_their_own_is_refused(template, message, make):
    with pytest.raises(InputError, match=message):
        ObservationEncoder(make(CHATML, template))


def test_long_observations_are_cut_with_a_note_and_the_first_ones_stay(make):
    tokenizer = make("qwen2_5")
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
