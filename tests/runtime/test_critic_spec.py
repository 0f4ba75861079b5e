"""Tests of the checkpoints that a critic can start from, before any of them is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.runtime.model_spec import CriticSpec, read_critic_spec, read_model_spec
from settings import InputError, load
from tests.tiny_directory import write_model, write_tokenizer


def critic_input(policy: Path, critic: Path) -> CriticSpec:
    settings = load(None, [f"model.path={policy}", f"critic.path={critic}"], {}).settings
    return read_critic_spec(settings, read_model_spec(settings))


def change_tokenizer(model: Path, **changes: object) -> Path:
    path = model / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return model


def test_a_critic_needs_the_policy_s_ids_and_neither_a_template_nor_its_ends(tiny_model: Path, tmp_path: Path) -> None:
    critic = write_model(tmp_path / "critic")
    (critic / "chat_template.jinja").unlink()
    write_tokenizer(critic, eos_token=None, chat_template=None)
    assert critic_input(tiny_model, critic).files.path == critic
    # What a trainer of classifiers leaves behind when it saves its tokenizer.
    cut = {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}
    assert critic_input(tiny_model, change_tokenizer(critic, truncation=cut)).files.path == critic


def test_a_critic_that_splits_texts_otherwise_or_has_too_few_rows_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    split = change_tokenizer(write_model(tmp_path / "split"), pre_tokenizer=None)
    with pytest.raises(InputError, match=r"critic\.path: the tokenizer of .* is not that of model\.path"):
        critic_input(tiny_model, split)
    small = write_model(tmp_path / "small", vocab_size=20)
    with pytest.raises(InputError, match=r"critic\.path: the tokenizer has 22 tokens.* only 20 rows"):
        critic_input(tiny_model, small)
