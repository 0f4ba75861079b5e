"""Tests of what training data are checked for when they are tokenized."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from app.model.io.model_files import open_model
from app.prompts.tokenizer import load_tokenizer
from app.runtime.inputs import encode_train_rows, read_train_rows
from settings import load
from settings.errors import InputError

SHORT, LONG = "1 + 1?", "1 + 1? " * 50


def encode(folder: Path, *files: list[str]) -> list[str]:
    """Writes files with these prompts, and returns the uids of those that `encode_train_rows` keeps of them all."""
    paths = []
    for number, prompts in enumerate(files):
        paths.append(str(folder / f"{number}.jsonl"))
        lines = [json.dumps({"prompt": prompt, "answer": "2"}) for prompt in prompts]
        Path(paths[-1]).write_text("\n".join(lines))
    settings = load(None, [f"data.source={json.dumps(paths)}", "data.max_prompt_length=64"], {}).settings
    tokenizer = load_tokenizer(open_model("builtin:tiny"))
    return [prompt.uid for prompt in encode_train_rows(settings, read_train_rows(settings), tokenizer)[0]]


def test_a_source_of_which_no_prompt_is_left_is_named(tmp_path: Path) -> None:
    assert encode(tmp_path, [SHORT, LONG], [SHORT]) == ["0/0/0", "1/1/0"]
    with pytest.raises(InputError, match=r"data\.source: every prompt of .*1\.jsonl is longer than"):
        encode(tmp_path, [SHORT], [LONG])


def test_prompts_of_unknown_tokens_are_told_with_their_share(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        encode(tmp_path, ["ö + 1"], ["1" * 40])
        assert not caplog.messages
        encode(tmp_path, ["ö" * 40], ["1"])
    (message,) = caplog.messages
    assert " % of the tokens of the prompts are unknown to the tokenizer of builtin:tiny" in message
