"""Tests of layers, precedence, provenance, derived values and errors of settings."""

from __future__ import annotations

import json
import math
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from settings import InputError, Resolved, Settings, load
from settings.checks.unused_settings import launch_notices
from settings.loading.algorithm_presets import ALGORITHM_PRESETS
from settings.loading.config_file import preset_names
from settings.loading.fields import FIELDS, value_of
from settings.loading.sources import env_name
from settings.loading.synonyms import ALIASES
from tests.settings.loading import load_text, with_sets

EXAMPLES = {
    "run.steps": 7,
    "rollout.prompts_per_step": 6,
    "rollout.group_size": 5,
    "rollout.max_new_tokens": 33,
    "rollout.max_length_total": 999,
    "rollout.prefill_length_min": 48,
    "mesh.shape": "1,-1,1",
    "model.path": "some/where",
    "logging.wandb_project": "a-project",
    "run.name": "a-name",
    "logging.wandb_mode": "offline",
    "score.policy.rows_per_device": 3,
    "score.reference.rows_per_device": 2,
    "score.dynamic": False,
    "score.max_tokens_per_device": 3000,
    "score.critic.max_tokens_per_device": 4000,
    "score.reward.max_tokens_per_device": 4000,
    "algorithm.mini_batch_prompts": 4,
    "algorithm.dynamic_microbatch": False,
    "algorithm.max_tokens_per_device": 2000,
    "algorithm.balance_batch": False,
    "algorithm.epochs": 2,
    "algorithm.beta": 0.04,
}
"""A value other than the default, for the fields of every alias."""


# Precedence


def test_later_layers_win_and_provenance_names_the_winner(folder: Path) -> None:
    text = "optimizer:\n  beta1: 0.1\n  beta2: 0.1\n  epsilon: 0.1\n"
    resolved = load_text(
        folder,
        text,
        "optimizer.beta2=0.2",
        "optimizer.epsilon=0.2",
        GRPO__OPTIMIZER__EPSILON="0.3",
    )
    optimizer = resolved.settings.optimizer
    assert (optimizer.weight_decay, optimizer.beta1, optimizer.beta2, optimizer.epsilon) == (0, 0.1, 0.2, 0.3)
    assert resolved.provenance["optimizer.weight_decay"] == "default"
    assert resolved.provenance["optimizer.beta1"] == "yaml:c.yaml:2"
    assert resolved.provenance["optimizer.beta2"] == "set"
    assert resolved.provenance["optimizer.epsilon"] == "env:GRPO__OPTIMIZER__EPSILON"
    assert resolved.provenance["run.name"] == "derived"


def test_every_field_says_what_it_is_and_every_number_has_a_bound() -> None:
    for name, field in FIELDS.items():
        assert field.description, name
        if {int, float} & {field.annotation, *get_args(field.annotation)}:
            assert field.metadata, name


def test_every_field_has_a_provenance() -> None:
    assert list(with_sets().provenance) == list(FIELDS)


def test_the_environment_overriding_a_set_is_announced() -> None:
    (notice,) = with_sets("run.steps=3", GRPO__RUN__STEPS="4").notices
    assert notice == "environment variable GRPO__RUN__STEPS sets run.steps to 4, instead of 3 from --set"


def test_a_bare_historic_variable_is_announced_once() -> None:
    resolved = with_sets("num_pre_q=3", NUM_PRE_Q="4", PATH="/bin")
    assert resolved.notices == ("environment variable NUM_PRE_Q sets rollout.group_size to 4, instead of 3 from --set",)
    assert with_sets(GRPO__ROLLOUT__GROUP_SIZE="4").notices == ()


FLAGS = {"--gamma": ("algorithm.gamma", "0.9")}


def test_a_verbs_flag_wins_over_every_layer_and_is_named() -> None:
    resolved = load(None, ["algorithm.gamma=0.1"], {"GRPO__ALGORITHM__GAMMA": "0.5"}, FLAGS)
    assert resolved.settings.algorithm.gamma == 0.9
    assert resolved.provenance["algorithm.gamma"] == resolved.origin("algorithm.gamma") == "--gamma"
    assert resolved.notices == ()


@pytest.mark.parametrize(
    ("overrides", "flags", "message"),
    [
        ([], {"--gamma": ("algorithm.gamma", "2")}, r"algorithm\.gamma: .* got 2 \(from --gamma\)"),
        ([], {"--gamma": ("algorithm.gamma", " ")}, "--gamma has no value"),
        ([], {"--gamma": ("algorithm.gamma", "[")}, "--gamma"),
        ([], {"--chunk-size": ("algorithm.gae_chunk_size", "131072")}, "less than or equal to 4096, got 131072"),
        (["algorithm.gama=1"], FLAGS, "did you mean algorithm.gamma"),
    ],
)
def test_a_bad_flag_is_blamed(overrides: list[str], flags: dict[str, tuple[str, str]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(None, overrides, {}, flags)


def test_variables_of_other_programs_are_left_alone() -> None:
    assert with_sets(MODEL="x", RUN="y", EVAL="1", steps="9", GRPO="z").settings == with_sets().settings


def test_every_field_can_be_set_from_the_environment() -> None:
    defaults = with_sets().settings
    values = defaults.model_dump(mode="json")
    for field in FIELDS:
        value = reduce(getitem, field.split("."), values)
        resolved = load(None, [], {env_name(field): json.dumps(value)})
        assert resolved.settings == defaults
        assert resolved.provenance[field] == f"env:{env_name(field)}"


def test_null_takes_back_what_a_lower_layer_set(folder: Path) -> None:
    resolved = load_text(folder, "rollout: {max_length_total: 500}", "rollout.max_length_total=null")
    assert resolved.provenance["rollout.max_length_total"] == "derived"


def test_a_section_without_content_sets_nothing(folder: Path) -> None:
    resolved = load_text(folder, "rollout:\n  # group_size: 4\nscore:\n  policy: null\n")
    assert set(resolved.provenance.values()) == {"default", "derived"}


# Historic names


def test_every_historic_name_has_an_example() -> None:
    assert {field for fields in ALIASES.values() for field in fields} == set(EXAMPLES)


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, fields in ALIASES.items() for field in fields])
def test_historic_names_work_in_every_layer(folder: Path, name: str, field: str) -> None:
    value = EXAMPLES[field]
    assert value_of(load_text(folder, "run: {seed: 1}").settings, field) != value
    for resolved, origin in [
        (load_text(folder, f"{name}: {value}"), "yaml:c.yaml:1"),
        (with_sets(f"{name}={value}"), "set"),
        (with_sets(**{name.upper(): str(value)}), f"env:{name.upper()}"),
    ]:
        assert value_of(resolved.settings, field) == value
        assert resolved.provenance[field] == origin


def test_a_historic_name_without_a_setting_is_refused_in_every_layer(folder: Path) -> None:
    reason = r"has no counterpart here: micro-batches follow from the token quota .* no result; for several optimizer"
    with pytest.raises(InputError, match=rf"grad_accum_steps \(yaml:c\.yaml:1\); .* {reason}"):
        load_text(folder, "grad_accum_steps: 4")
    with pytest.raises(InputError, match=rf"grad_accum_steps \(--set\); .* {reason}"):
        with_sets("grad_accum_steps=4")
    with pytest.raises(InputError, match=rf"GRAD_ACCUM_STEPS \(env:GRAD_ACCUM_STEPS\); .* {reason}"):
        with_sets(GRAD_ACCUM_STEPS="4")


def test_a_historic_name_of_two_fields_is_announced_in_one_line() -> None:
    resolved = with_sets("score.dynamic=true", USE_DYNAMIC_BSZ="false")
    assert resolved.notices == (
        "environment variable USE_DYNAMIC_BSZ sets score.dynamic and algorithm.dynamic_microbatch to False, "
        "instead of score.dynamic True from --set",
    )


# Derived values


def test_the_total_length_leaves_room_for_the_prompt(folder: Path) -> None:
    total = "rollout.max_length_total"
    short = load_text(folder, "rollout: {max_new_tokens: 1024}\ndata: {max_prompt_length: 16}")
    assert (value_of(short.settings, total), short.provenance[total]) == (1024 + 128, "derived")
    long = load_text(folder, "rollout: {max_new_tokens: 1024}\ndata: {max_prompt_length: 512}")
    assert value_of(long.settings, total) == 1024 + 512


def test_a_run_is_named_after_its_config_and_seed(folder: Path) -> None:
    assert with_sets("run.seed=3").settings.run.name == "quickstart-seed3"
    (folder / "_my config!.yaml").write_text("run: {seed: 5}")
    assert load("_my config!.yaml", [], {}).settings.run.name == "run_my-config--seed5"


def test_the_rest_is_derived_from_other_settings(folder: Path) -> None:
    settings = load_text(folder, "batch_size: 6\ndata: {source: 'rows.jsonl'}").settings
    assert settings.algorithm.mini_batch_prompts == 6
    assert (settings.data.eval_source, settings.data.eval_split) == (None, "test")
    assert settings.mesh.shape == "auto"


GRPO_PARTS = ("token", "ppo", 0.2, 0.2, "none")


@pytest.mark.parametrize(
    ("name", "parts", "aggregation", "penalty"),
    [
        ("grpo", ("grpo", *GRPO_PARTS), "token-mean", ("loss", "k3")),
        ("dr_grpo", ("dr_grpo", *GRPO_PARTS), "constant-length", ("loss", "k3")),
        ("rloo", ("rloo", *GRPO_PARTS), "sequence-mean-token-sum", ("reward", "k1")),
        ("reinforce_plus_plus", ("reinforce_plus_plus", *GRPO_PARTS), "token-mean", ("reward", "k1")),
        ("gspo", ("grpo", "sequence", "ppo", 3e-4, 4e-4, "none"), "sequence-mean-token-mean", ("loss", "k3")),
        ("dapo", ("grpo", "token", "ppo", 0.2, 0.28, "zero_variance"), "token-mean", ("loss", "k3")),
        ("cispo", ("grpo", "token", "cispo", 10.0, 0.2, "zero_variance"), "token-mean", ("loss", "k3")),
        ("ppo", ("gae", *GRPO_PARTS), "token-mean", ("reward", "k1")),
    ],
)
def test_an_algorithm_sets_what_its_paper_fixes_and_the_user_may_change_each_part(name, parts, aggregation, penalty):
    fields = ("estimator", "ratio_level", "clip", "clip_low", "clip_high", "filter")
    fields += ("loss_aggregation", "kl_in", "kl_estimator")
    resolved = with_sets(f"algorithm.name={name}", "algorithm.beta=0.1")
    assert tuple(getattr(resolved.settings.algorithm, f) for f in fields) == (*parts, aggregation, *penalty)
    assert {resolved.provenance[f"algorithm.{field}"] for field in fields} == {"derived"}
    chosen = {"filter": "zero_variance", "clip_high": 0.5, "loss_aggregation": "token-mean"}
    changed = with_sets(f"algorithm.name={name}", *(f"algorithm.{field}={value}" for field, value in chosen.items()))
    assert {field: getattr(changed.settings.algorithm, field) for field in chosen} == chosen
    assert {changed.provenance[f"algorithm.{field}"] for field in chosen} == {"set"}


def test_a_name_says_what_it_changes_and_not_what_the_user_chose() -> None:
    dapo = "algorithm.name=dapo"
    expected = "dapo (Yu et al. 2025): clip_high 0.28 (grpo: 0.2), filter zero_variance (grpo: none)"
    assert with_sets(dapo).algorithm_changes == expected
    assert with_sets(dapo, "algorithm.clip_high=0.28").algorithm_changes == expected.replace(
        "clip_high 0.28 (grpo: 0.2), ", ""
    )
    assert with_sets().algorithm_changes is None
    # Without a penalty it has no place.
    assert "kl_in" not in str(with_sets("algorithm.name=rloo").algorithm_changes)
    assert "kl_in reward (grpo: loss)" in str(with_sets("algorithm.name=rloo", "algorithm.beta=0.1").algorithm_changes)


def test_what_follows_from_the_estimator_is_told_whoever_chose_it() -> None:
    follows = "whiten_advantages true (grpo: false), shuffle true (grpo: false)"
    expected = f"ppo (Schulman et al. 2017): estimator gae (grpo: grpo), {follows}"
    assert with_sets("algorithm.name=ppo").algorithm_changes == expected
    gae = ("algorithm.name=dapo", "algorithm.estimator=gae", "algorithm.clip_high=0.2", "algorithm.filter=none")
    assert with_sets(*gae).algorithm_changes == f"dapo (Yu et al. 2025) with estimator gae: {follows}"
    assert (
        with_sets(*gae, "algorithm.whiten_advantages=true").algorithm_changes
        == "dapo (Yu et al. 2025) with estimator gae: shuffle true (grpo: false)"
    )


def test_the_estimator_follows_the_place_of_the_penalty() -> None:
    ours = with_sets("algorithm.beta=0.1", "algorithm.kl_in=reward").settings.algorithm
    assert (ours.kl_estimator, ours.kl_in_reward) == ("k1", True)
    ours = with_sets("algorithm.name=rloo", "algorithm.beta=0.1", "algorithm.kl_in=loss").settings.algorithm
    assert (ours.kl_estimator, ours.kl_in_reward) == ("k3", False)


def test_a_penalty_of_weight_zero_has_neither_place_nor_estimator() -> None:
    ours = with_sets("algorithm.name=rloo").settings.algorithm
    assert (ours.kl_in, ours.kl_estimator, ours.kl_in_reward) == (None, None, False)


def test_every_name_of_an_algorithm_is_known_to_the_table_of_papers() -> None:
    assert set(ALGORITHM_PRESETS) == set(get_args(FIELDS["algorithm.name"].annotation))


# Printing


@pytest.mark.parametrize("preset", preset_names())
def test_what_is_printed_can_be_loaded_again(folder: Path, preset: str) -> None:
    resolved = load(preset, ["run.seed=3"], {})
    again = load_text(folder, resolved.to_yaml())
    assert again.settings == resolved.settings
    assert not {"default", "derived"} & set(again.provenance.values())
    # What nobody set is not taken for a setting without effect.
    assert [line for line in launch_notices(again) if line.startswith("no effect")] == []


def test_every_printed_value_says_what_set_it(folder: Path) -> None:
    text = load_text(folder, "num_pre_q: 1", "run.steps=3", WANDB_MODE="offline").to_yaml()
    lines = [line.strip() for line in text.splitlines() if not line.endswith(":")]
    assert len(lines) == len(FIELDS)
    assert "steps: 3  # set" in lines
    assert "wandb_mode: offline  # env:WANDB_MODE" in lines
    assert "group_size: 1  # yaml:c.yaml:1" in lines
    assert "name: c-seed0  # derived" in lines
    assert "beta1: 0.9  # default" in lines


@given(st.text(), st.floats(min_value=0, exclude_min=True, allow_infinity=False))
def test_any_text_and_number_survives_printing(
    tmp_path_factory: pytest.TempPathFactory, text: str, rate: float
) -> None:
    resolved = with_sets()
    settings = resolved.settings.model_copy(
        update={
            "data": resolved.settings.data.model_copy(update={"system_prompt": text}),
            "optimizer": resolved.settings.optimizer.model_copy(update={"learning_rate": rate}),
        }
    )
    path = tmp_path_factory.getbasetemp() / "printed.yaml"
    path.write_text(Resolved(settings, resolved.provenance).to_yaml(), encoding="utf-8")
    again = load(str(path), [], {}).settings
    assert (again.data.system_prompt, again.optimizer.learning_rate) == (text, rate)


# Values


@pytest.mark.parametrize("value", ["12e4567", "007", "true", "1.50"])
def test_free_text_stays_as_it_was_written(folder: Path, value: str) -> None:
    assert with_sets(f"model.path={value}").settings.model.path == value
    assert with_sets(GRPO__MODEL__PATH=value).settings.model.path == value
    assert load_text(folder, f"model: {{path: {value}}}").settings.model.path == value


def test_a_reward_with_a_colon_is_a_plug_in_named_after_its_function() -> None:
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


def test_one_reward_function_needs_no_list(folder: Path) -> None:
    for resolved in (
        with_sets("reward.functions=rewards.py:f"),
        with_sets(GRPO__REWARD__FUNCTIONS="rewards.py:f"),
        load_text(folder, "reward: {functions: rewards.py:f}"),
    ):
        (function,) = resolved.settings.reward.functions
        assert (function.name, function.function, function.weight) == ("f", "rewards.py:f", 1.0)


def test_the_mesh_shape_loses_its_spaces() -> None:
    assert with_sets("mesh.shape=1, -1, 1").settings.mesh.shape == "1,-1,1"


def test_defaults_alone_are_valid_and_need_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", "{}")
    monkeypatch.setenv("RUN", "nonsense")
    assert Settings().run.steps == 100


# Config files


def test_a_missing_config_is_named_in_full_beside_the_presets(folder: Path) -> None:
    with pytest.raises(InputError) as caught:
        load("quikstart", [], {})
    assert str(folder / "quikstart") in str(caught.value)
    assert "did you mean quickstart?" in str(caught.value)
    assert all(preset in str(caught.value) for preset in preset_names())


@pytest.mark.parametrize("config", ["missing.yaml", "a\0b", "c.yaml/x", "", "/"])
def test_a_config_that_is_no_file_is_refused(folder: Path, config: str) -> None:
    (folder / "c.yaml").write_text("run: {seed: 1}")
    expected = (
        "cannot be read: Is a directory; give a YAML file"
        if config == "/"
        else r"config file (not found|.*cannot be read)"
    )
    with pytest.raises(InputError, match=expected):
        load(config, [], {})


def test_a_preset_is_found_from_any_directory(folder: Path) -> None:
    (folder / "quickstart").mkdir()
    resolved = load("quickstart", [], {})
    assert resolved.provenance["model.path"].startswith("yaml:settings/presets/quickstart.yaml:")


def test_the_historic_runner_keeps_its_numbers() -> None:
    settings = load("gsm8k_qwen2_5_3b_v4_16", [], {}).settings
    assert (settings.mesh.shape, settings.rollout.group_size, settings.rollout.prompts_per_step) == (
        "1,-1,1",
        8,
        16,
    )
    assert (settings.rollout.max_new_tokens, settings.model.path) == (1024, "Qwen/Qwen2.5-3B-Instruct")
    assert math.isclose(settings.optimizer.learning_rate, 1e-6)
    one_host = load("gsm8k_qwen2_5_3b_v6e_8", [], {}).settings.rollout
    assert (one_host.prompts_per_step * one_host.group_size, one_host.max_new_tokens) == (128, 1024)
