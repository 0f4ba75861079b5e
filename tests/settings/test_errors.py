"""Tests the words that replace others in messages of InputError."""

import pytest

from settings.errors import InputError, renamed_in_errors


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("data.split: unknown; correct data.split", "data.eval_split: unknown; correct data.eval_split"),
        ("data.source: /a/data.split/b.jsonl: no such file", "data.source: /a/data.split/b.jsonl: no such file"),
        ("/a/mydata.split, /a/data.split.jsonl, hf:data.split", "/a/mydata.split, /a/data.split.jsonl, hf:data.split"),
    ],
)
def test_a_setting_is_renamed_but_no_path_that_contains_its_name(message: str, expected: str) -> None:
    with pytest.raises(InputError) as raised, renamed_in_errors("data.split", to="data.eval_split"):
        raise InputError(message)
    assert str(raised.value) == expected
