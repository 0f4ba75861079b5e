from typing import Any

import numpy as np
import pytest

from app.prompts.dataset import DatasetRow
from app.prompts.encode import encode_prompts
from settings.errors import InputError
from settings.schema.data import DataSettings


class WordTokenizer:
    """A tokenizer with one token per word, its length. The template adds 100 + first letter of the role to each
    message."""

    def chat_ids(self, messages):
        ids = []
        for message in messages:
            ids += [100 + ord(message["role"][0]), *(len(word) for word in message["content"].split())]
        return ids


USER, SYSTEM, ASSISTANT = (100 + ord(letter) for letter in "usa")


def row(prompt, uid="d/0", **columns):
    return DatasetRow(uid=uid, prompt=prompt, answer="1", extra=columns)


def encode(rows, system_prompt=None, max_prompt_length=4, overlong: Any = "drop"):
    data = DataSettings(system_prompt=system_prompt, max_prompt_length=max_prompt_length, overlong_prompts=overlong)
    return encode_prompts(rows, WordTokenizer().chat_ids, data)


def test_text_becomes_one_user_message():
    (prompt,), _ = encode([row("a bb ccc", level=3)])
    np.testing.assert_array_equal(prompt.token_ids, np.array([USER, 1, 2, 3], np.int32))
    assert prompt.token_ids.dtype == np.int32
    assert (prompt.uid, prompt.source, prompt.answer, prompt.extra) == ("d/0", "a bb ccc", "1", {"level": 3})


def test_the_system_prompt_stands_first_and_replaces_the_rows_own():
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bb"}]
    (one, two), _ = encode(
        [row(chat), row([{"role": "system", "content": "own"}, *chat])],
        system_prompt="dddd",
        max_prompt_length=9,
    )
    assert one.token_ids.tolist() == two.token_ids.tolist() == [SYSTEM, 4, USER, 1, ASSISTANT, 2]
    assert one.source == chat


def test_overlong_prompts_are_dropped_and_counted():
    prompts, report = encode([row("a", "d/0"), row("a b c d e", "d/1"), row("a b c", "d/2")])
    assert [prompt.uid for prompt in prompts] == ["d/0", "d/2"]
    assert report.num_dropped == 1
    assert report.text.startswith("prompts: 2 kept, 1 dropped, 0 truncated") and report.text.endswith(
        "longest 6 tokens"
    )


def test_truncation_keeps_the_last_tokens_and_is_counted():
    prompts, report = encode([row("a"), row("a bb ccc dddd eeeee")], overlong="truncate_left")
    assert [prompt.token_ids.tolist() for prompt in prompts] == [[USER, 1], [2, 3, 4, 5]]
    assert report.text.startswith("prompts: 2 kept, 0 dropped, 1 truncated")


def test_an_overlong_prompt_is_an_error_where_that_is_asked_for():
    rows = [row("a"), row("a b c d", "d/1"), row("a b c d e f", "d/2")]
    with pytest.raises(InputError, match=r"2 of 3 .*max_prompt_length = 4 .*first is d/1 with 5.*longest has 7"):
        encode(rows, overlong="error")
    assert len(encode(rows[:1], overlong="error")[0]) == 1


def test_all_rows_dropped_is_an_error_with_counts_and_the_way_out():
    with pytest.raises(InputError, match=r"2 of 2 .*data.max_prompt_length = 4.*shortest has 5.*truncate_left"):
        encode([row("a b c d"), row("a b c d e")])


def test_a_row_that_cannot_be_encoded_is_named_by_its_location():
    for where, shown in (("a.jsonl:3", "a.jsonl:3"), ("", "a/2")):
        row = DatasetRow(uid="a/2", prompt="x" * 1_000_001, answer=None, where=where)
        with pytest.raises(InputError, match=f"^{shown}: the prompt has 1,000,001 characters"):
            encode([row])
    with pytest.raises(InputError, match=r"^a/2: the answer is not Unicode text: surrogates not allowed"):
        encode([DatasetRow(uid="a/2", prompt="x", answer="\ud800")])
