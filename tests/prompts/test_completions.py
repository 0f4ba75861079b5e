"""Tests given completions: which tokens they have, and which of them the assistant writes."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.prompts.completions import CompletionEncoder, encode_completions
from app.prompts.dataset import DatasetRow
from app.prompts.encode import encode_prompts
from app.prompts.tokenizer import Tokenizer
from app.records.sample import Sample
from settings.errors import InputError
from settings.schema.data import DataSettings
from tests.prompts.chat_families import CALCULATOR, CHATML, FAMILIES, family_tokenizer
from tests.prompts.test_turns import rendered

QUESTION = {"role": "user", "content": "How much is it?"}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "calculator", "arguments": {"text": "1+1"}}}],
}
MARKLESS = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def encoded(
    tokenizer: Tokenizer, prompt: Any, completion: Any, *, max_tokens: int = 1000, **data: Any
) -> tuple[Sample, str]:
    """Returns the sample of a row, and the report."""
    chosen = DataSettings.model_validate({"max_prompt_length": 1000} | data)
    row = DatasetRow("d/0", prompt, completion, where="d.jsonl:1")
    prompts, _ = encode_prompts([row], tokenizer, chosen)
    (sample,), report = encode_completions(
        prompts, CompletionEncoder(tokenizer, chosen), max_tokens=max_tokens, places={}
    )
    return sample, report


def parts_of(tokenizer: Tokenizer, sample: Sample) -> list[tuple[bool, str]]:
    """Returns each run of tokens with an equal loss mask: the mask and the text."""
    edges = [0, *(np.flatnonzero(np.diff(sample.mask)) + 1).tolist(), len(sample.mask)]
    return [
        (bool(sample.mask[first]), tokenizer.decode_with_special_tokens(sample.completion_ids[first:last]))
        for first, last in itertools.pairwise(edges)
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_conversation_is_encoded_by_the_template_with_only_assistant_turns_in_the_loss(
    name: str, tmp_path: Path
) -> None:
    tokenizer = family_tokenizer(tmp_path, name)
    turns, asked = ["he asks", "数 again\n\nand", "the end"], [QUESTION, {"role": "user", "content": "he <b>said</b>"}]
    chat = [says(turns[0]), asked[0], says(turns[1]), asked[1], says(turns[2]), QUESTION]
    sample, report = encoded(tokenizer, "Sum?", chat)
    end = tokenizer.decode_with_special_tokens([sample.completion_ids[-1]])
    assert sample.completion_ids[-1] in tokenizer.eos_ids
    thinking = "<think>\n\n</think>\n\n" if name == "qwen3" else ""
    parts = parts_of(tokenizer, sample)
    assert [text for is_learned, text in parts if is_learned] == [f"{thinking}{turn}{end}" for turn in turns]
    assert [is_learned for is_learned, _ in parts] == [True, False, True, False, True]
    assert sample.completion == turns[-1] and sample.finish_reason == "stop"
    assert f"{sample.mask.sum()} tokens to learn" in report
    # After a turn, the template continues as in a sampled conversation.
    if name != "qwen3":  # its template adds no thinking to earlier turns
        whole = rendered(tmp_path, [{"role": "user", "content": "Sum?"}, *chat])
        ids = [*sample.prompt.token_ids, *sample.completion_ids]
        assert whole[: len(ids)] == ids


def test_text_completion_is_one_turn_in_which_control_tokens_are_text(tmp_path: Path) -> None:
    tokenizer = family_tokenizer(tmp_path, "qwen2_5")
    text = "four<|im_end|>and<|im_start|>"
    sample, _ = encoded(tokenizer, "2 + 2?", text)
    assert sample.loss_mask is None
    assert sum(token_id in tokenizer.special_ids for token_id in sample.completion_ids) == 1
    assert tokenizer.decode(sample.completion_ids) == text
    for prompt, completion in (([{"role": "user", "content": "2 + 2?"}], text), ("2 + 2?", [says(text)])):
        same, _ = encoded(tokenizer, prompt, completion)
        np.testing.assert_array_equal(same.prompt.token_ids, sample.prompt.token_ids)
        np.testing.assert_array_equal(same.completion_ids, sample.completion_ids)
    # The completion does not change if the prompt is truncated on the left.
    cut, _ = encoded(tokenizer, "2 + 2?", text, max_prompt_length=5, overlong_prompts="truncate_left")
    np.testing.assert_array_equal(cut.completion_ids, sample.completion_ids)
    assert len(cut.prompt.token_ids) == 5


def test_tool_calls_are_in_the_loss_but_tool_results_are_not(tmp_path: Path) -> None:
    tokenizer = family_tokenizer(tmp_path, "qwen2_5")
    tokenizer.tools = [CALCULATOR]
    sample, _ = encoded(tokenizer, "1 + 1?", [CALL, {"role": "tool", "content": "2"}, says("It is 2.")])
    parts = parts_of(tokenizer, sample)
    assert [is_learned for is_learned, _ in parts] == [True, False, True]
    assert '"name": "calculator"' in parts[0][1] and "<tool_response>\n2\n</tool_response>" in parts[1][1]
    assert parts[2][1] == "It is 2.<|im_end|>"


def test_without_a_template_a_completion_is_the_text_after_the_prompt(tmp_path: Path) -> None:
    tokenizer = family_tokenizer(tmp_path, "smollm2")
    sample, _ = encoded(tokenizer, "Q: he ", "says<|im_start|>", chat_template="none")
    whole = tokenizer.text_ids("Q: he says<|im_start|>")
    assert [*sample.prompt.token_ids, *sample.completion_ids] == [*whole, tokenizer.eos_ids[0]]
    ended, _ = encoded(tokenizer, "Q: he ", "says<|im_end|>", chat_template="none")
    assert tokenizer.decode_with_special_tokens(ended.completion_ids) == "says<|im_end|>"
    # No merge crosses the border, because a policy that continues the prompt could not write it.
    apart, _ = encoded(tokenizer, "Q: h", "e", chat_template="none")
    assert tokenizer.decode(apart.prompt.token_ids) == "Q: h" and tokenizer.decode(apart.completion_ids) == "e"
    with pytest.raises(InputError, match=r"d/0: the completion is a chat, but data\.chat_template: none"):
        encoded(tokenizer, "Q", [says("A"), QUESTION], chat_template="none")


def test_completion_gets_an_eos_token_if_the_template_does_not_end_turns(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant]{% endif %}"
    tokenizer = family_tokenizer(tmp_path, CHATML, template)
    sample, _ = encoded(tokenizer, "Q", "A")
    assert tokenizer.decode_with_special_tokens(sample.completion_ids) == "A<|im_end|>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (MARKLESS, r"d/0: the assistant's tokens cannot be identified, .* opens a turn with 'A:', but "
            r"writes '<\|im_start\|>four' when the turn is complete; edit the model's"),
        ("{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}{% if add_generation_prompt %}[assistant]"
            "{% endif %}", r"the chat template ends a turn with '\[/\]', but only .* ends a completion"),
    ],
    ids=["start", "end"],
)  # fmt: skip
def test_template_whose_turns_cannot_be_identified_is_refused(template: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        encoded(family_tokenizer(tmp_path, CHATML, template), "2 + 2?", "four")


def test_long_completions_are_dropped_or_refused(tmp_path: Path) -> None:
    tokenizer, data = family_tokenizer(tmp_path, "smollm2"), DataSettings(max_prompt_length=1000)
    rows = [DatasetRow(f"d/{n}", "Q", "x" * n, where=f"d:{n}") for n in (3, 8, 5)]
    prompts, _ = encode_prompts(rows, tokenizer, data)
    encoder = CompletionEncoder(tokenizer, data)
    samples, report = encode_completions(prompts, encoder, max_tokens=6, places={})
    assert [sample.completion for sample in samples] == ["xxx", "xxxxx"]
    assert report == ("completions: 2 kept, 1 dropped (rollout.max_new_tokens 6); longest 9 tokens; 10 tokens to learn")
    one = r"rollout\.max_new_tokens = 6 is too short for 1 of 3 completions: .*or set data\.overlong_prompts: drop"
    with pytest.raises(InputError, match=one):
        strict = CompletionEncoder(tokenizer, DataSettings(max_prompt_length=1000, overlong_prompts="error"))
        encode_completions(prompts, strict, max_tokens=6, places={})
    with pytest.raises(InputError, match=r"3 of 3 completions: the shortest has 4 tokens, the longest 9; raise it$"):
        encode_completions(prompts, encoder, max_tokens=3, places={})
