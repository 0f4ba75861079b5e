"""Tests that an exported tokenizer equals its source in this program and in transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from app.export.huggingface import write_tokenizer
from app.model.io.model_files import ModelFiles, open_model
from app.prompts.tokenizer import load_fast_tokenizer, load_tokenizer
from tests.prompts.test_tokenizer import write_directory, write_gguf

MESSAGES = [{"role": "user", "content": "12 + 1 = a?\n\nna\u00efve 345"}]


def written(files: ModelFiles, directory: Path) -> ModelFiles:
    """Returns the model files of a folder to which only the tokenizer of `files` was written."""
    directory.mkdir()
    write_tokenizer(files, directory)
    return replace(files, path=directory, weights=open_model("builtin:tiny").weights)


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "gpt-2"])
def test_the_tokenizer_of_a_gguf_file_becomes_files(tmp_path, pre):
    files = open_model(str(write_gguf(tmp_path / "a.gguf", pre=pre, padding=3)))
    again = written(files, tmp_path / "out")
    assert load_tokenizer(again).fingerprint == load_tokenizer(files).fingerprint
    # transformers chooses by the model's type, as a whole export says it.
    (tmp_path / "out" / "config.json").write_text(json.dumps(files.config))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = load_fast_tokenizer(files)
    assert theirs.eos_token == ours.eos_token == "<|im_end|>"
    assert theirs.encode(MESSAGES[0]["content"]) == ours.encode(MESSAGES[0]["content"])
    for generates in (False, True):
        chats = [
            tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=generates, return_dict=False)
            for tokenizer in (theirs, ours)
        ]
        assert chats[0] == chats[1]


def test_the_files_of_a_directory_are_copied_as_they_stand_and_code_is_not(tmp_path):
    directory = write_directory(tmp_path / "base")
    (directory / "tokenization_own.py").write_text("raise SystemExit")
    (directory / "merges.txt").symlink_to(directory / "tokenizer.json")
    files = open_model(str(directory))
    again = written(files, tmp_path / "out")
    copied = {path.name: path for path in (tmp_path / "out").iterdir()}
    assert set(copied) == {"tokenizer.json", "tokenizer_config.json", "merges.txt"}
    assert not copied["merges.txt"].is_symlink()
    assert all(path.read_bytes() == (directory / name).read_bytes() for name, path in copied.items())
    assert load_tokenizer(again).fingerprint == load_tokenizer(files).fingerprint
