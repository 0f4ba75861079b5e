"""Tests of the notes about adapters at launch, and of the checkpoints that a critic can start from."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from app.preflight.inspect_mesh import read_config_only_spec
from app.runtime.model_spec import CriticSpec, adapter_notes, read_critic_spec, read_model_spec
from app.runtime.reward_model import read_reward_model_spec
from settings import InputError, Settings, load
from tests.tiny_directory import write_model, write_reward_model, write_tokenizer


def test_a_launch_says_which_weights_learn_and_that_a_critic_has_no_adapters(tiny_model: Path) -> None:
    model = read_model_spec(Settings.model_validate({"model": {"path": str(tiny_model), "lora": {"rank": 2}}}))
    (alone,) = adapter_notes(model, has_critic=False)
    assert alone.startswith("model.lora: 1,856 weights are trained (rank 2, alpha 16, q_proj")
    assert alone.endswith(" weights of tiny are frozen")
    assert adapter_notes(model, has_critic=True) == (f"{alone}; the critic trains all its weights",)
    assert adapter_notes(model.without_adapters, has_critic=True) == ()


def critic_input(policy: Path, critic: Path) -> CriticSpec:
    settings = load(None, [f"model.path={policy}", f"critic.path={critic}"], {}).settings
    return read_critic_spec(settings, read_model_spec(settings))


def test_every_network_computes_attention_as_the_setting_says(tiny_model: Path, tmp_path: Path) -> None:
    other, judge = write_model(tmp_path / "critic"), write_reward_model(tmp_path / "judge")
    chosen = [f"model.path={tiny_model}", "data.max_prompt_length=16", "algorithm.name=ppo", f"reward.model={judge}"]
    settings = load(None, [*chosen, f"critic.path={other}", "model.attention=xla", "model.lora.rank=2"], {}).settings
    policy, reward_model = read_model_spec(settings), read_reward_model_spec(settings)
    definitions = [policy.definition, policy.policy_definition, policy.reference_definition]
    definitions += [policy.decode_definition(jnp.dtype("float32")), read_critic_spec(settings, policy).definition]
    without_files = read_config_only_spec(settings)
    assert reward_model is not None and without_files.critic is not None and without_files.reward_model is not None
    definitions += [reward_model.definition, without_files.model.policy_definition]
    definitions += [without_files.critic.definition, without_files.reward_model.definition]
    assert [one.architecture.attention_implementation for one in definitions] == ["xla"] * 9


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
