"""Tests the layers of settings, their precedence and provenance, aliases, printing, values and config files."""

import json
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import get_args

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from settings import Resolved, load
from settings.checks.commands import check_for_train
from settings.checks.unused_settings import launch_notices
from settings.errors import join_words
from settings.loading.config_file import ConfigFile, preset_names
from settings.loading.fields import FIELDS
from settings.loading.sources import env_name
from tests.settings.loading import load_text, refusal, with_sets

MAX_SETTINGS = 187
"""This number may only fall: a new setting needs a user, and usually replaces another."""


# Precedence


def test_later_layers_override_earlier_ones_and_provenance_names_the_layer() -> None:
    text = "optimizer:\n  beta1: 0.1\n  beta2: 0.1\n  epsilon: 0.1\n"
    overrides = ("optimizer.beta2=0.2", "optimizer.epsilon=0.2")
    resolved = load_text(text, *overrides, GRPO__OPTIMIZER__EPSILON="0.3")
    optimizer = resolved.settings.optimizer
    assert list(resolved.provenance) == list(FIELDS)
    assert (optimizer.weight_decay, optimizer.beta1, optimizer.beta2, optimizer.epsilon) == (0, 0.1, 0.2, 0.3)
    assert resolved.provenance["optimizer.weight_decay"] == "default"
    assert resolved.provenance["optimizer.beta1"] == "yaml:c.yaml:2"
    assert resolved.provenance["optimizer.beta2"] == "set"
    assert resolved.provenance["optimizer.epsilon"] == "env:GRPO__OPTIMIZER__EPSILON"
    assert resolved.provenance["run.name"] == "derived"


def test_every_setting_has_a_description_and_every_number_a_bound() -> None:
    assert len(FIELDS) <= MAX_SETTINGS
    for name, field in FIELDS.items():
        assert field.description, name
        if {int, float} & {field.annotation, *get_args(field.annotation)}:
            assert field.metadata, name


def test_overriding_variables_and_historic_names_are_announced_once() -> None:
    for overrides, environ, notice in (
        (["run.steps=3"], {"GRPO__RUN__STEPS": "4"}, "GRPO__RUN__STEPS sets run.steps to 4, instead of 3 from --set"),
        (["num_pre_q=3"], {"NUM_PRE_Q": "4"}, "NUM_PRE_Q sets rollout.group_size to 4, instead of 3 from --set"),
        ([], {"NUM_PRE_Q": "4", "PATH": "/bin"}, "NUM_PRE_Q sets rollout.group_size to 4"),
        (
            ["score.dynamic=true"],
            {"USE_DYNAMIC_BSZ": "false"},
            "USE_DYNAMIC_BSZ sets score.dynamic and algorithm.dynamic_microbatch to False, "
            "instead of score.dynamic True from --set",
        ),
    ):
        assert with_sets(*overrides, **environ).notices == (f"environment variable {notice}",)
    assert with_sets(GRPO__ROLLOUT__GROUP_SIZE="4").notices == ()
    repeated = with_sets("run.steps=3", "run.seed=1", "run.steps=5", "run.seed=1")
    assert repeated.notices == ("--set run.steps=5 replaces the earlier --set run.steps=3",)
    assert (repeated.settings.run.steps, repeated.settings.run.seed) == (5, 1)


def test_environment_variables_of_other_programs_are_ignored() -> None:
    assert with_sets(MODEL="x", RUN="y", EVAL="1", steps="9", GRPO="z").settings == with_sets().settings


def test_every_setting_can_be_set_from_the_environment() -> None:
    defaults = with_sets().settings
    values = defaults.model_dump(mode="json")
    environ = {env_name(field): json.dumps(reduce(getitem, field.split("."), values)) for field in FIELDS}
    resolved = load(None, [], environ)
    assert resolved.settings == defaults
    assert resolved.provenance == {field: f"env:{env_name(field)}" for field in FIELDS}


def test_null_and_empty_sections_set_nothing() -> None:
    resolved = load_text("rollout: {max_length_total: 500}", "rollout.max_length_total=null")
    assert resolved.provenance["rollout.max_length_total"] == "derived"
    resolved = load_text("rollout:\n  # group_size: 4\nscore:\n  policy: null\n")
    assert set(resolved.provenance.values()) == {"default", "derived"}


# Printing


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_passes_the_checks_of_training_and_is_loaded_again_when_printed(preset: str) -> None:
    resolved = load(preset, ["run.seed=3"], {})
    check_for_train(resolved)
    again = load_text(resolved.to_yaml())
    assert again.settings == resolved.settings
    assert not {"default", "derived"} & set(again.provenance.values())
    # Unset settings are not reported as settings without effect.
    assert [line for line in launch_notices(again) if line.startswith("no effect")] == []


@hypothesis.settings(max_examples=10)
@given(st.text(), st.floats(min_value=0, exclude_min=True, allow_infinity=False))
def test_any_string_and_number_is_unchanged_by_printing_and_loading(text: str, rate: float) -> None:
    resolved = with_sets()
    settings = resolved.settings.model_copy(
        update={
            "data": resolved.settings.data.model_copy(update={"system_prompt": text}),
            "optimizer": resolved.settings.optimizer.model_copy(update={"learning_rate": rate}),
        }
    )
    printed = Resolved(settings, resolved.provenance).to_yaml().encode()
    again = load(ConfigFile("printed.yaml", "printed", printed), [], {}).settings
    assert (again.data.system_prompt, again.optimizer.learning_rate) == (text, rate)


# Values


def test_free_text_settings_keep_their_spelling() -> None:
    for value in ("12e4567", "007", "true", "1.50"):
        assert with_sets(f"model.path={value}").settings.model.path == value
        assert with_sets(GRPO__MODEL__PATH=value).settings.model.path == value
        assert load_text(f"model: {{path: {value}}}").settings.model.path == value


def test_a_reward_name_with_a_colon_is_a_plug_in_named_after_its_function() -> None:
    short = "[my_rewards:brevity, dir/file.py:Judge.score, {function: a:f, name: other, weight: 2}, gsm8k]"
    functions = with_sets(f"reward.functions={short}").settings.reward.functions
    assert [(f.name, f.function, f.weight) for f in functions] == [
        ("brevity", "my_rewards:brevity", 1.0),
        ("score", "dir/file.py:Judge.score", 1.0),
        ("other", "a:f", 2.0),
        ("gsm8k", None, 1.0),
    ]
    printed = with_sets(f"reward.functions={short}").to_yaml()
    assert "{name: other, function: 'a:f', weight: 2.0}, {name: gsm8k, weight: 1.0}]" in printed
    # One function needs no list.
    for resolved in (
        with_sets("reward.functions=rewards.py:f"),
        with_sets(GRPO__REWARD__FUNCTIONS="rewards.py:f"),
        load_text("reward: {functions: rewards.py:f}"),
    ):
        (function,) = resolved.settings.reward.functions
        assert (function.name, function.function, function.weight) == ("f", "rewards.py:f", 1.0)


# Config files


def test_an_unknown_config_is_refused_with_the_list_of_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = refusal(load, "quikstart", [], {})
    assert message.startswith(f"--config: there is no file {tmp_path / 'quikstart'}; give another one, or a preset: ")
    assert message.endswith(f"{join_words(preset_names())}; did you mean quickstart?")
    (tmp_path / "c.yaml").write_text("run: {seed: 1}")
    for config in ("a\0b", "c.yaml/x"):
        assert refusal(load, config, [], {}).startswith("--config: there is no file ")
    for config in ("", "/"):
        assert "cannot be read: Is a directory; give a YAML file" in refusal(load, config, [], {})
    # A preset is found from any directory, whatever is there.
    (tmp_path / "quickstart").mkdir()
    resolved = load("quickstart", [], {})
    assert resolved.provenance["model.path"].startswith("yaml:settings/presets/quickstart.yaml:")
